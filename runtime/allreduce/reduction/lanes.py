"""What comes to a member while tensors are summed, and the memory for it.

A lane is a sequence of pieces whose terms come to one member, in the same order from each peer. A peer may be some
pieces ahead of the sum, so each has a few slots of scratch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from runtime.allreduce.ring.frames import PeerLink
from runtime.allreduce.ring.ring import Ring

_PIECE_BYTES_MIN = 64 << 10
"""Pieces get smaller where a member aggregates many slices, so that its memory does not grow with the nodes."""
_WINDOW = 4
"""How many pieces of a slice and term a peer may be ahead of the sum, so that memory does not grow with the model."""
_SCRATCH_BYTES = 32 << 20
"""Bytes of scratch per peer; with many terms the window shrinks, at worst to one piece of each."""


@dataclass(slots=True)
class TermsOfPeer:
    """What one peer sends to a lane, in the order of (piece, term)."""

    pieces: Sequence[int]
    terms: int
    depth: int
    """How many pieces of it the slots hold."""
    slots: list[tuple[memoryview, Tensor]] = field(default_factory=list)
    got: int = 0
    term: int = 0
    used: int = 0

    @property
    def expected(self) -> int:
        """The number of frames that still have to come."""
        return (len(self.pieces) - self.got) * self.terms - self.term

    @property
    def next(self) -> tuple[int, int] | None:
        """The piece and the term of the next frame."""
        return (self.pieces[self.got], self.term) if self.got < len(self.pieces) else None

    @property
    def is_full(self) -> bool:
        return self.got >= self.used + self.depth

    def slot(self, piece: int, term: int) -> tuple[memoryview, Tensor]:
        return self.slots[(piece % self.depth) * self.terms + term]

    def take(self) -> None:
        """Note that the next frame has come."""
        self.term += 1
        if self.term == self.terms:
            self.got, self.term = self.got + 1, 0

    def is_at(self, piece: int) -> bool:
        """Whether this piece is the next one to be added."""
        return self.used < len(self.pieces) and self.pieces[self.used] == piece


class Lane:
    """Pieces, by their numbers in the schedule, whose terms come to this member: of slices that it owns, or of slices
    that it aggregates for its node only. slices: how many."""

    def __init__(self, pieces: Sequence[int], slices: int) -> None:
        self.pieces = pieces
        self.position = {piece: position for position, piece in enumerate(pieces)}
        self.window = _WINDOW * slices
        self.done = 0
        self.of: dict[str, TermsOfPeer] = {}
        """By peer."""

    @property
    def next(self) -> int | None:
        """The piece that is added next."""
        return self.pieces[self.done] if self.done < len(self.pieces) else None

    def has_come(self, piece: int) -> bool:
        """Whether all terms of the next piece are there."""
        return all(terms.got > terms.used for terms in self.of.values() if terms.is_at(piece))

    def use(self, piece: int) -> None:
        """Note that the next piece was added."""
        self.done += 1
        for terms in self.of.values():
            terms.used += terms.is_at(piece)


@dataclass(slots=True)
class LeavingPiece:
    """Memory for what leaves the node of an aggregator, for one piece. ticket: see PeerLink.send."""

    parts: list[tuple[memoryview, Tensor]]
    link: PeerLink | None = None
    ticket: int = 0

    @property
    def is_free(self) -> bool:
        return self.link is None or self.link.has_sent(self.ticket)


def expect(ring: Ring, peer: str, terms: int, lanes: dict[Lane, Sequence[int]], largest: int) -> None:
    """Make memory for so many terms of a peer, for these pieces of each lane. largest: bytes of a piece."""
    affordable = _SCRATCH_BYTES // max(largest * terms * len(lanes), 1)
    depths = {lane: max(1, min(lane.window, affordable, len(numbers))) for lane, numbers in lanes.items() if numbers}
    memory = ring.scratch(peer, sum(depths.values()) * terms * largest)
    start = 0
    for lane, depth in depths.items():
        contribution = lane.of[peer] = TermsOfPeer(lanes[lane], terms, depth)
        for _ in range(depth * terms):
            contribution.slots.append(_slot(memory, start, largest))
            start += largest


def rooms(ring: Ring, lane: Lane, leave: int, largest: int) -> list[LeavingPiece]:
    """Memory for what this aggregator adds up for owners on other nodes. leave: values for each piece of the lane."""
    affordable = max(1, _SCRATCH_BYTES // max(largest * leave, 1))
    depth = min(lane.window, affordable, len(lane.pieces))
    memory = ring.scratch("leaving", depth * leave * largest)
    slots = [_slot(memory, start * largest, largest) for start in range(depth * leave)]
    return [LeavingPiece(slots[at * leave : (at + 1) * leave]) for at in range(depth)]


def piece_bytes(slices: int, most: int) -> int:
    """The size of a piece, at most `most`, where a member aggregates that many slices."""
    return min(most, max(_PIECE_BYTES_MIN, most * _WINDOW // slices))


def _slot(memory: memoryview, start: int, size: int) -> tuple[memoryview, Tensor]:
    part = memory[start : start + size]
    return part, torch.frombuffer(part, dtype=torch.uint8)
