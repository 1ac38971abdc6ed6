"""The stores of several workers in one thread: questions are calls, and workers die where a seed says.

Each update adds a power of two of its own to every piece, so the values of a piece say which updates are in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, cast

import torch

from runtime.asynchronous.piece_copies import LostUpdates, PieceCopies
from runtime.asynchronous.store import MembersNow, ParameterStore, PieceUpdate
from runtime.asynchronous.update_rules import DelayedNesterov, PieceState, StalenessBound
from runtime.recovery.transfer.connection import CopyConnection, CopyFailed

PIECES = 4
UPDATES_MAX = 22
"""Float32 holds the sum of so many powers of two exactly."""


class Died(BaseException):
    """The worker whose code runs is dead."""


class Line:
    """The connection of one question."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self.answer: tuple[dict[str, Any], list[torch.Tensor]] = ({}, [])

    def receive(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        return {}, [tensor.clone().view(torch.uint8) for tensor in self.tensors]

    def send(self, header: dict[str, Any], blobs: Sequence[torch.Tensor] = ()) -> None:
        self.answer = header, [blob.clone().view(torch.float32) for blob in blobs]


@dataclass
class Fate:
    """kill: the chance that a question kills who asks, or who is asked, before or after it is answered."""

    random: Random
    kill: float
    kills_left: int

    def strikes(self) -> bool:
        if self.kills_left and self.random.random() < self.kill:
            self.kills_left -= 1
            return True
        return False


@dataclass
class StoreWorld:
    names: list[str]
    fate: Fate
    dead: set[str] = field(default_factory=set)
    stores: dict[str, ParameterStore] = field(default_factory=dict)
    copies: dict[str, PieceCopies] = field(default_factory=dict)
    seen: dict[str, MembersNow] = field(default_factory=dict)
    """What each worker knows of the members."""
    lost: list[LostUpdates] = field(default_factory=list)
    acknowledged: list[set[int]] = field(default_factory=lambda: [set() for _ in range(PIECES)])
    issued: int = 0
    generation: int = 1

    def __post_init__(self) -> None:
        rule, bound = DelayedNesterov(1.0, 0.0, 1), StalenessBound(10**6, 1e9, "drop")
        for name in self.names:
            self.seen[name] = MembersNow(1, tuple(self.names))
            self.copies[name] = PieceCopies(name, rule, bound)
            members = partial(self.seen.__getitem__, name)
            self.stores[name] = ParameterStore(name, self.copies[name], _Calls(self, name), members, self.lost.extend)

    def begin(self) -> None:
        for name in self.living():
            start = [PieceState(torch.zeros(1), torch.zeros(1), torch.zeros(1)) for _ in range(PIECES)]
            self.stores[name].begin(0, self.names, start)

    def living(self) -> list[str]:
        return [name for name in self.names if name not in self.dead]

    def kill(self, name: str) -> None:
        """At least one worker stays."""
        if len(self.living()) > 1:
            self.dead.add(name)

    def learn(self, name: str) -> None:
        """The leader has noticed who is dead, and this worker hears of it."""
        living = tuple(self.living())
        if len(living) < len(self.seen[name].members):
            if all(seen.members != living for seen in self.seen.values()):
                self.generation += 1
            self.seen[name] = MembersNow(self.generation, living)
            self.stores[name]._follow(self.seen[name])

    def look(self, name: str) -> None:
        """What the thread of the store does."""
        if name not in self.dead:
            with suppress(Died):
                self.stores[name].look()

    def push(self, name: str, number: int) -> bool:
        """One update of a worker. Returns whether it has survived."""
        bit = self.issued
        self.issued += 1
        differences = {piece: torch.full((1,), -float(1 << bit)) for piece in range(PIECES)}
        update = PieceUpdate(number, dict.fromkeys(range(PIECES), 0), 0.0, differences)
        try:
            pushed = self.stores[name].push(update, lambda: self.learn(name))
        except Died:
            return False
        for piece in pushed.values:
            self.acknowledged[piece].add(bit)
        return True

    def held(self) -> list[set[int]]:
        """Of each piece the updates that its owner has, with all deaths known to all."""
        for name in self.living():
            self.learn(name)
        found: list[set[int]] = [set() for _ in range(PIECES)]
        for name in self.living():
            for piece, held in self.stores[name].owned().items():
                value = int(held.state.values.item())
                assert not found[piece], "a piece has two owners"
                found[piece] = {bit for bit in range(UPDATES_MAX + 1) if value >> bit & 1}
                assert held.state.version == len(found[piece]), "an update was applied twice, or in part"
        return found


class _Calls:
    def __init__(self, world: StoreWorld, me: str) -> None:
        self._world, self._me = world, me

    def ask(
        self, channel: str, worker: str, request: dict[str, Any], tensors: Sequence[torch.Tensor]
    ) -> tuple[dict[str, Any], list[torch.Tensor]]:
        world, drawn = self._world, self._world.fate.random
        if drawn.random() < 0.3:
            world.learn(drawn.choice(world.living()))
        for victim in (self._me, worker):
            if victim not in world.dead and world.fate.strikes():
                world.kill(victim)
        self._still()
        line = Line(tensors)
        if worker not in world.dead:
            try:
                world.stores[worker].answer(cast(CopyConnection, line), cast(Mapping[str, Any], request))
            except Died:
                self._still()
        for victim in (self._me, worker):
            if victim not in world.dead and world.fate.strikes():
                world.kill(victim)
        self._still()
        if worker in world.dead:
            world.learn(self._me)
            raise CopyFailed(f"{worker} is dead")
        return line.answer

    def _still(self) -> None:
        if self._me in self._world.dead:
            raise Died

    def keep(self, members: Sequence[str]) -> None:
        """Nobody waits."""
