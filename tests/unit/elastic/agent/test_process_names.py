"""A process may name itself with any bytes, and the kernel cuts a name after 15 of them, also within a character."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from elastic.agent.process import subreaper, worker_process
from elastic.agent.worker import stack_dump
from elastic.process import stop_signals
from runtime.frontends.restart.script_watch import ScriptWatch, where
from runtime.worker.activity import cpu_s

NAMES_ITSELF = """
import ctypes, time
ctypes.CDLL(None).prctl(15, "ab训练任务一".encode(), 0, 0, 0)
print(flush=True)
time.sleep(600)
"""


@pytest.fixture
def odd() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", NAMES_ITSELF], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        yield process.pid
        process.kill()


def test_a_name_that_is_no_text_does_not_matter(odd: int) -> None:
    facts = worker_process.facts(odd)
    assert facts is not None and facts.state in "SRD"
    assert worker_process.started(odd) and worker_process.ending_status(odd) == 0
    assert odd in subreaper._children(), "which looks at every process of the machine"
    assert stop_signals.order_to(odd, signal.SIGTERM) == signal.SIGTERM
    assert stack_dump.ask(odd) is False
    assert cpu_s(os.getpid()) >= cpu_s(odd) >= 0.0
    assert ScriptWatch(odd, 1.0, 0.0).look(0.1) is False
    assert "thread" in "\n".join(where(odd))
