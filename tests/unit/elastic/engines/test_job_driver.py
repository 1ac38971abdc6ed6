"""What is said of a task that has failed."""

from __future__ import annotations

import pytest

from elastic.engines.job_driver import cause

SPARK = """An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 0.0 failed 4 times
Traceback (most recent call last):
  File "task.py", line 3, in attend
ModuleNotFoundError: No module named 'grpc'

	at org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:572)
Caused by: org.apache.spark.api.python.PythonException: Traceback (most recent call last):
	... 1 more
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (SPARK, "ModuleNotFoundError: No module named 'grpc'"),
        (
            "ray::serve()\n  File x\nelastic.engines.node_task.AgentEnded: the agent has ended",
            "elastic.engines.node_task.AgentEnded: the agent has ended",
        ),
        ("The actor died because its node has died.\nMore of it.", "The actor died because its node has died."),
        ("", ""),
        ("x" * 1000, "x" * 300),
    ],
)
def test_the_line_that_a_person_needs_is_told(text: str, line: str) -> None:
    assert cause(text) == line
