"""The process beside a leader: what it sends, and when it ends."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from elastic.observability.trackers import process
from elastic.observability.trackers.process import Lines, StepPoints, Superseded, serve

Worker = tuple[int, Lines]
"""A worker's end of the pipe, and the process's."""


class Remembering:
    """A tracker that fails as often as it is told."""

    def __init__(self, next_step: int = 0, failures: int = 0, superseded: bool = False) -> None:
        self.next_step, self.failures, self.superseded = next_step, failures, superseded
        self.batches: list[list[int]] = []
        self.finished: list[bool] = []

    def _fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("nobody answers")

    def connect(self) -> int:
        self._fail()
        return self.next_step

    def send(self, steps: list[StepPoints]) -> None:
        self._fail()
        if self.superseded:
            raise Superseded
        self.batches.append([step.number for step in steps])

    def finish(self, *, complete: bool) -> None:
        self.finished.append(complete)


@pytest.fixture
def worker() -> Iterator[Worker]:
    reading, writing = os.pipe()
    yield writing, Lines(reading)
    os.close(reading)


@pytest.fixture
def no_naps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: None)


def write(pipe: int, *documents: dict[str, Any]) -> None:
    os.write(pipe, b"".join(json.dumps(document).encode() + b"\n" for document in documents))


def step(number: int) -> dict[str, Any]:
    return {"step": number, "points": {"loss": 0.5}}


def test_what_comes_until_the_end_is_sent_in_order(worker: Worker) -> None:
    pipe, lines = worker
    write(pipe, step(3), step(4), {"end": True})
    tracker, answers = Remembering(next_step=3), list[dict[str, Any]]()
    assert serve(tracker, lines, answers.append) == 0
    os.close(pipe)
    assert answers == [{"next": 3}]
    assert (tracker.batches, tracker.finished) == ([[3, 4]], [True])


def test_what_a_dead_worker_had_not_sent_is_left_to_the_next_leader(worker: Worker) -> None:
    pipe, lines = worker
    write(pipe, step(0), step(1))
    os.close(pipe)
    tracker = Remembering()
    assert serve(tracker, lines, lambda answer: None) == 0
    assert (tracker.batches, tracker.finished) == ([], [False])


def test_a_batch_has_a_greatest_length(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "BATCH_MAX", 2)
    pipe, lines = worker
    write(pipe, *map(step, range(5)), {"end": True})
    tracker = Remembering()
    serve(tracker, lines, lambda answer: None)
    os.close(pipe)
    assert tracker.batches == [[0, 1], [2, 3], [4]]


def test_a_batch_is_sent_while_no_more_comes(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker closes its end only when the first batch was sent."""
    monkeypatch.setattr(process, "FLUSH_S", 0.05)
    pipe, lines = worker
    write(pipe, step(0))

    class Closing(Remembering):
        def send(self, steps: list[StepPoints]) -> None:
            super().send(steps)
            os.close(pipe)

    tracker = Closing()
    assert serve(tracker, lines, lambda answer: None) == 0
    assert tracker.batches == [[0]]


@pytest.mark.usefixtures("no_naps")
def test_it_tries_again_and_says_so_once(worker: Worker) -> None:
    pipe, lines = worker
    write(pipe, step(0), {"end": True})
    tracker, answers = Remembering(failures=5), list[dict[str, Any]]()
    assert serve(tracker, lines, answers.append) == 0
    os.close(pipe)
    said, following = answers
    assert said["said"].startswith("ConnectionError: nobody answers; it is tried again")
    assert following == {"next": 0}
    assert tracker.batches == [[0]]


def test_it_ends_if_another_process_sends(worker: Worker) -> None:
    pipe, lines = worker
    write(pipe, step(0), {"end": True})
    tracker = Remembering(superseded=True)
    assert serve(tracker, lines, lambda answer: None) == process.SUPERSEDED
    os.close(pipe)
    assert tracker.finished == []


@pytest.mark.usefixtures("no_naps")
def test_it_ends_with_its_worker_while_nobody_answers(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    parents = iter([7, 7, 7, 1, 1, 1])
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    tracker = Remembering(failures=1000)
    assert serve(tracker, worker[1], lambda answer: None) == 0
    assert tracker.failures > 990
    os.close(worker[0])


def test_a_process_whose_worker_died_before_it_began_does_not_take_the_run(worker: Worker) -> None:
    """The next leader's process may have it by now."""
    tracker, answers = Remembering(), list[dict[str, Any]]()
    os.close(worker[0])
    assert serve(tracker, worker[1], answers.append) == 0
    assert (answers, tracker.finished) == ([], [])
