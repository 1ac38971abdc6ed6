"""The loop of elastic.asynchronous in several workers that are threads and take turns: questions are calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic.errors import ConfigError
from runtime.asynchronous import loop
from runtime.asynchronous.store import ParameterStore
from runtime.recovery.transfer.connection import CopyConnection, CopyFailed
from tests.unit.runtime.asynchronous.store_world import Line
from tests.unit.worlds import FakeMember, World

Answer = Callable[[CopyConnection, dict[str, Any]], bool]


class _Calls:
    def __init__(self, answers: dict[str, Answer], session: FakeMember) -> None:
        self._answers, self._session = answers, session

    def answer_with(self, answer: Answer) -> None:
        self._answers[self._session.worker_id] = answer

    def ask(
        self, channel: str, worker: str, request: dict[str, Any], tensors: Sequence[torch.Tensor], within_s: float = 0
    ) -> tuple[dict[str, Any], list[torch.Tensor]]:
        if worker not in self._session.world.members:
            raise CopyFailed(f"{worker} is no member")
        if worker not in self._answers:
            raise CopyFailed(f"{worker} has not begun its loop")
        line: Any = Line(tensors)
        with _out_of_turn(self._session.world.lock):
            assert self._answers[worker](line, request)
        return line.answer  # type: ignore[no-any-return]

    def keep(self, members: Collection[str]) -> None:
        """No question is open."""

    def close(self) -> None:
        """No connection is open."""


@contextmanager
def _out_of_turn(turn: threading.Condition) -> Iterator[None]:
    """Others may run: an answer may need that of a third worker, which has to begin its phase first."""
    try:
        turn.release()
    except RuntimeError:  # it is asked for an answer
        yield
        return
    try:
        yield
    finally:
        turn.acquire()


def world_of(workers: int, patch: pytest.MonkeyPatch, *, due: bool = False) -> World:
    """Nobody dies in it. due: whether workers want to come or go, all the time."""
    world, answers = World(workers), dict[str, Answer]()

    def calls_of(session: object) -> _Calls:
        if not isinstance(session, FakeMember):
            raise ConfigError("a worker of a world of threads")
        return _Calls(answers, session)

    def sleep(seconds: float) -> None:
        world.lock.wait(seconds)

    def answer_push(store: ParameterStore, *update: Any) -> Any:
        with _out_of_turn(world.lock):  # it may wait for the update of another worker, which waits for a third one
            return answered(store, *update)

    def let_others_go_on(session: FakeMember) -> None:
        sleep(0.001)  # called in each inner step, and while an owner is waited for

    patch.setattr(FakeMember, "due", due)
    patch.setattr(FakeMember, "leave_if_over", let_others_go_on)
    patch.setattr(loop, "calls_of", calls_of)
    patch.setattr(loop, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    patch.setattr(ParameterStore, "follow_members", lambda store: None)
    answered = ParameterStore._answer_push
    patch.setattr(ParameterStore, "_answer_push", answer_push)
    return world
