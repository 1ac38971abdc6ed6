"""Jobs that compute in turns: workers stop before the limit, and go on when it is raised."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.turnstile import OPEN, Gate, Turnstile

WITHIN_S = 60.0


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.close()


def nothing() -> None:
    """The job has not ended."""


def test_a_worker_stops_at_the_limit_and_goes_on_when_it_is_raised(gate: Gate) -> None:
    done: list[int] = []

    def work() -> None:
        turnstile = Turnstile(str(gate.path), "w")
        for step in range(5):
            turnstile.wait(step)
            done.append(step)
        turnstile.close()

    worker = threading.Thread(target=work)
    worker.start()
    gate.await_stop(1, WITHIN_S, nothing)
    assert done == []
    gate.allow(3)
    gate.await_stop(1, WITHIN_S, nothing)
    assert done == [0, 1, 2]
    gate.allow(OPEN)
    worker.join(WITHIN_S)
    assert done == [0, 1, 2, 3, 4]


def test_workers_are_known_by_name_and_pid_until_they_are_gone(gate: Gate) -> None:
    turnstile = Turnstile(str(gate.path), "worker-7")
    assert gate.workers == {"worker-7": os.getpid()}
    turnstile.close()
    deadline_s = time.monotonic() + WITHIN_S
    while gate.workers:
        assert time.monotonic() < deadline_s


def test_a_job_that_ends_instead_of_stopping_is_reported(gate: Gate) -> None:
    def ended() -> None:
        raise RuntimeError("the job ended")

    with pytest.raises(RuntimeError, match="the job ended"):
        gate.await_stop(1, WITHIN_S, ended)


def test_a_worker_ends_with_its_driver(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    turnstile = Turnstile(str(gate.path), "w")
    gate.close()
    with pytest.raises(SystemExit, match="driver"):
        turnstile.wait(0)
    turnstile.close()
