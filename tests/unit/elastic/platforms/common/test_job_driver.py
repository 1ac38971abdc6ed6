"""What is said of a task that has failed, and how a job goes on that has lost its nodes."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from elastic.checkpoints.naming import EntryName
from elastic.config import JobSpec
from elastic.errors import ElasticError, ExitCode, LaunchFailed
from elastic.fleet import registry
from elastic.fleet.registry import Registry
from elastic.platforms.common import job_driver
from elastic.platforms.common.job_driver import JobDriver, cause
from elastic.platforms.common.job_request import JobRequest
from elastic.store.election import Candidate
from tests.memory_store import MemoryStore

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
            "ray::serve()\n  File x\nelastic.platforms.common.node_task.AgentEnded: the agent has ended",
            "elastic.platforms.common.node_task.AgentEnded: the agent has ended",
        ),
        ("The actor died because its node has died.\nMore of it.", "The actor died because its node has died."),
        ("", ""),
        ("x" * 1000, "x" * 300),
    ],
)
def test_the_line_that_a_person_needs_is_told(text: str, line: str) -> None:
    assert cause(text) == line


class Fleet:
    """A fleet on paper. loses: how many answers to requests for a job get lost. stopped: an operator has ended the
    job."""

    loses = 0
    stopped = False

    def __init__(self, host: str) -> None:
        self.client, self.store, self.environment = self, MemoryStore(), dict[str, str]()
        candidate = Candidate(self.store, registry.NAME, host, lambda: 0.0)
        candidate.stand()
        self._registry = Registry(self.store, candidate)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        pass

    def submit(self, spec: JobSpec, resume: str = "", token: str = "", identity: str = "") -> dict[str, Any]:
        name = self._registry.submit(spec, None, resume.partition("@")[2], token, None, identity)
        if self.loses:
            self.loses -= 1
            raise ElasticError("nobody answers")
        return {"job": name}

    def entry(self, job: str) -> dict[str, Any]:
        state = "ended" if job.endswith("-1") else "placed"
        ended = {"exit_code": ExitCode.DRAINED, "checkpoints": "", "identity": "", "because": "every node had to go"}
        return {"job": job, "state": state, "stopped": self.stopped, **ended}


@pytest.mark.parametrize("patience_s", [300.0, 0.0])
def test_a_job_that_has_lost_its_nodes_goes_on_as_one_job_though_an_answer_was_lost(
    patience_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_driver, "GO_ON_S", patience_s, raising=False)
    monkeypatch.setattr(job_driver, "PrivateFleet", Fleet)
    monkeypatch.setattr(job_driver, "newest_at", lambda url, identity: EntryName(7, 0, 1, "0" * 8))
    request = JobRequest(what="train.py", workers=1, checkpoint_dir=str(tmp_path))
    with JobDriver(request, "here", "ray") as driver:
        fleet: Any = driver.fleet
        fleet.loses = 1
        if not patience_s:
            assert driver.poll(), "it is over"
            return
        for _ in range(3):
            driver._asks_s = 0.0
            assert not driver.poll() and not driver.poll()
        state, _ = registry.read(fleet.store)
        assert [job.name.rpartition("-")[2] for job in state.jobs] == ["1", "2"] and driver.job == state.jobs[1].name


def test_a_job_that_an_operator_has_stopped_does_not_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_driver, "PrivateFleet", Fleet)
    monkeypatch.setattr(job_driver, "newest_at", lambda url, identity: EntryName(7, 0, 1, "0" * 8))
    request = JobRequest(what="train.py", workers=1, checkpoint_dir=str(tmp_path))
    with JobDriver(request, "here", "ray") as driver:
        fleet: Any = driver.fleet
        fleet.stopped = True
        assert driver.poll() and driver.job.endswith("-1"), "it is over"
        with pytest.raises(LaunchFailed, match="every node had to go"):
            driver.result()
