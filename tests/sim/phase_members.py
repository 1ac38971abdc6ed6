"""What a simulated phase consists of: members, operations of all, and questions over a network that takes time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from runtime.asynchronous.piece_copies import LostUpdates, PieceCopies
from runtime.asynchronous.store import MembersNow, ParameterStore
from runtime.asynchronous.units_left import UnitsLeft
from runtime.asynchronous.update_rules import PieceState
from runtime.recovery.transfer.connection import CopyFailed

if TYPE_CHECKING:
    from tests.sim.phases import PhasesWorld


@dataclass
class Operation:
    """said: by worker. result: once it is complete. generation: the planned one that took effect behind it, or 0.
    waiting: tasks."""

    label: str
    said: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] | None = None
    generation: int = 0
    waiting: list[Any] = field(default_factory=list)


@dataclass
class Member:
    """A worker. inner_s: of an inner step. knows: what it has heard of the members. copied: what a newcomer has got."""

    name: str
    inner_s: float
    knows: MembersNow
    store: ParameterStore
    copies: PieceCopies
    place: int = 0
    """The number of its next operation."""
    state: tuple[list[PieceState], UnitsLeft, dict[str, int], int] | None = None
    inner: int = 0
    """Inner steps that it has made of the unit that it has begun."""
    stopped: dict[str, int] = field(default_factory=dict)
    asked: int = -1
    fell_back: list[LostUpdates] = field(default_factory=list)
    seen: dict[tuple[int, int], int] = field(default_factory=dict)
    drains: bool = False
    leaves: bool = False
    """A planned generation without it is in effect, and nobody has acknowledged that it may go."""
    has_left: bool = False
    acknowledged: list[set[int]] = field(default_factory=list)
    """Of each piece, when it left."""
    done: bool = False


class Line:
    """The connection of one question."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self.answer: tuple[dict[str, Any], list[torch.Tensor]] | None = None

    def receive(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        return {}, [tensor.clone() for tensor in self.tensors]

    def send(self, header: dict[str, Any], blobs: Sequence[torch.Tensor] = ()) -> None:
        self.answer = header, [blob.clone().view(torch.float64) for blob in blobs]


class Calls:
    """As MemberCalls, over a network that takes time; whoever asks or is asked may die before and after the answer."""

    def __init__(self, world: PhasesWorld, me: str) -> None:
        self._world, self._me = world, me
        self._waiting: dict[Any, str] = {}

    def ask(
        self,
        channel: str,
        worker: str,
        request: dict[str, Any],
        tensors: Sequence[torch.Tensor],
        within_s: float | None = None,
    ) -> tuple[dict[str, Any], list[torch.Tensor]]:
        world, tasks, me = self._world, self._world.tasks, self._world.tasks.me()
        target = world.members[worker]
        if worker not in world.members[self._me].knows.members:
            raise CopyFailed(f"{worker} is no member")
        self._strike(worker)
        self._travel()
        line, heard = Line([tensor.clone() for tensor in tensors]), [False]

        def answer() -> None:
            try:
                world.answer(target, line, request)
            except CopyFailed:
                line.answer = None
            finally:
                heard[0] = True
                me.wake()

        if not world._lives(worker):
            raise CopyFailed(f"{worker} is dead")
        tasks.start(worker, answer)
        until_s = world.clock.now_s + within_s if within_s is not None else float("inf")
        self._waiting[me] = worker
        try:
            while not heard[0]:
                me.wait(0.02)
                if not world._lives(worker) or worker not in self._waiting.values() or world.clock.now_s > until_s:
                    raise CopyFailed(f"{worker} does not answer")
        finally:
            self._waiting.pop(me, None)
        self._strike(worker)
        self._travel()
        if line.answer is None:
            raise CopyFailed(f"{worker} has broken off")
        return line.answer

    def _travel(self) -> None:
        clock = self._world.clock
        self._world.tasks.sleep(clock.between(0.0005, 0.005) * (self._world.slow if clock.chance(0.2) else 1.0))

    def _strike(self, worker: str) -> None:
        world = self._world
        for victim in (self._me, worker):
            if world.faults_left and world.clock.chance(world.strikes):
                world.faults_left -= 1
                world.kill(victim)
        world.tasks.check()

    def keep(self, members: Collection[str]) -> None:
        for task, worker in list(self._waiting.items()):
            if worker not in members:
                self._waiting[task] = ""
