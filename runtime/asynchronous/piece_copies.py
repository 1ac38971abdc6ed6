"""The pieces that one worker holds in a phase: what it may change, and what becomes of its copies when workers die.

A state machine without sockets and clocks; its owner calls it under one lock. The rules:

* Updates of a piece are committed by its owner, one after the other. An update is committed when the mirror has applied
  it; then the owner applies it, too. Without a mirror the owner is enough.
* Owner and mirror speak only within one generation, and a worker has left the older one as soon as it knows a newer
  one. So an owner that was expelled and does not know it commits nothing.
* A mirror that is not in step gets a copy of the piece. Whoever becomes the owner without ever having been in step has
  lost updates: owner and mirror have died together. It goes on with the newest copy that it has, at worst that of the
  beginning of the phase, in a *lineage* of its own, so that no older copy is taken for one that is in step.
* An update is applied once: each piece knows the number of the last update of each worker.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from elastic.errors import ElasticError
from runtime.asynchronous.ownership import Holders, holders, order
from runtime.asynchronous.update_rules import DelayedNesterov, PieceState, StalenessBound


class AskLater(ElasticError):
    """Another worker can do it, or this one a little later: it is not in this phase or generation, or not the owner."""


@dataclass(slots=True)
class HeldPiece:
    """lineage: the generation in which an owner went on without the newest updates; 0: none has. applied: worker -> the
    number of its last update in this phase. in_step: whether every committed update is in it."""

    state: PieceState
    lineage: int = 0
    applied: dict[str, int] = field(default_factory=dict)
    in_step: bool = True

    def mark(self) -> tuple[int, int]:
        """Two copies with the same mark, of which one was made of the other, are equal."""
        return self.lineage, self.state.version


class Judged(NamedTuple):
    """What becomes of one piece of an update. weight: None: nothing is to be applied, as it was before. mark: of the
    owner's copy."""

    piece: int
    weight: float | None
    mirror: str
    mark: tuple[int, int]


class LostUpdates(NamedTuple):
    """A piece that goes on without updates that were committed. version: that with which it goes on."""

    piece: int
    lineage: int
    version: int


class PieceCopies:
    """Use: `begin` a phase, `enter` each generation; then what an owner or a mirror does."""

    def __init__(self, me: str, rule: DelayedNesterov, bound: StalenessBound) -> None:
        self._me, self._rule, self._bound = me, rule, bound
        self.phase = -1
        self.generation = 0
        self.closed = True
        """Whether this worker, as an owner, takes no updates."""
        self._orders: list[tuple[str, ...]] = []
        self._start: Sequence[PieceState] = ()
        self.sizes: tuple[int, ...] = ()
        """Elements of each piece."""
        self._held: dict[int, HeldPiece] = {}
        self._now: list[Holders] = []

    def begin(self, phase: int, roster: Sequence[str], start: Sequence[PieceState], *, in_step: bool = True) -> None:
        """All workers have the same pieces. roster: those with which the phase begins. start: not changed here.
        in_step: False: others may have trained in this phase without this worker, which had left and was taken back."""
        self.phase, self.closed = phase, False
        self._orders = [order(piece, roster) for piece in range(len(start))]
        self._start, self.sizes = start, tuple(one.values.numel() for one in start)
        self._held = {
            piece: HeldPiece(start[piece].clone(), in_step=in_step)
            for piece, ordered in enumerate(self._orders)
            if self._me in ordered[:2]
        }
        self.generation, self._now = 0, []

    def enter(self, generation: int, members: Collection[str]) -> list[LostUpdates]:
        """These are the members now. Returns the pieces that this worker has to go on with, and of which updates may be
        lost."""
        self.generation = generation
        self._now = [holders(ordered, members) for ordered in self._orders]
        lost = []
        for piece in self.owned():
            held = self._held.get(piece) or HeldPiece(self._start[piece].clone(), in_step=False)
            if not held.in_step:
                held.lineage, held.in_step = generation, True
                lost.append(LostUpdates(piece, generation, held.state.version))
            self._held[piece] = held
        return lost

    def holders(self, piece: int) -> Holders:
        """Raises AskLater before the first generation of a phase."""
        if not self._now:
            raise AskLater(f"{self._me} has not entered a generation in phase {self.phase}")
        return self._now[piece]

    def owned(self) -> list[int]:
        """The pieces that this worker owns."""
        return [piece for piece, now in enumerate(self._now) if now.owner == self._me]

    def own(self, piece: int) -> HeldPiece:
        """The copy of a piece that this worker owns. Raises AskLater."""
        if not 0 <= piece < len(self._now) or self._now[piece].owner != self._me:
            raise AskLater(f"{self._me} does not own piece {piece} in generation {self.generation}")
        return self._held[piece]

    def check(self, phase: int, generation: int | None = None) -> None:
        """Raises AskLater for another phase. generation: that of an owner, which must be this one; None: a worker
        brings an update, and the phase must not be over for this owner."""
        if phase != self.phase or self.generation == 0 or (generation is None and self.closed):
            raise AskLater(f"{self._me} is in phase {self.phase}, not {phase}")
        if generation is not None and generation != self.generation:
            raise AskLater(f"{self._me} is in generation {self.generation}, not {generation}")

    # The owner

    def judge(
        self, worker: str, number: int, pieces: Sequence[int], bases: Sequence[int], age_s: float
    ) -> list[Judged]:
        """What becomes of an update. number: of this worker's updates in the phase, from 1. bases: the versions of the
        pieces from which it began. Raises AskLater."""
        found = []
        for piece, base in zip(pieces, bases, strict=True):
            held, weight = self.own(piece), None
            if held.applied.get(worker, 0) < number:
                weight = self._bound.weight(max(0, held.state.version - base), age_s)
            found.append(Judged(piece, weight, self._now[piece].mirror, held.mark()))
        return found

    def commit(
        self, worker: str, number: int, judged: Iterable[Judged], differences: Mapping[int, torch.Tensor]
    ) -> None:
        """Apply what the mirrors have applied. differences: by piece."""
        for one in judged:
            if one.weight is not None:
                self._apply(self._held[one.piece], worker, number, one.weight, differences[one.piece])

    def _apply(self, held: HeldPiece, worker: str, number: int, weight: float, difference: torch.Tensor) -> None:
        self._rule.apply(held.state, difference, weight)
        held.applied[worker] = number

    # The mirror

    def mirror(
        self, worker: str, number: int, judged: Iterable[Judged], differences: Mapping[int, torch.Tensor]
    ) -> list[int]:
        """Apply an update that the owner is about to apply. Returns the pieces of which this worker first needs a copy;
        of the others it is applied."""
        stale = []
        for one in judged:
            held = self._held.get(one.piece)
            if held is None or held.lineage != one.mark[0]:
                stale.append(one.piece)
            elif one.weight is not None and held.applied.get(worker, 0) >= number:
                continue  # the owner had no answer, and says it once more
            elif held.mark() != one.mark:
                stale.append(one.piece)
            elif one.weight is not None:
                self._apply(held, worker, number, one.weight, differences[one.piece])
        return stale

    def take_copy(self, piece: int, copy: HeldPiece) -> None:
        """The owner has sent a copy. Raises AskLater if this worker is not the mirror."""
        if self._now[piece].mirror != self._me:
            raise AskLater(f"{self._me} does not mirror piece {piece} in generation {self.generation}")
        copy.in_step = True
        self._held[piece] = copy
