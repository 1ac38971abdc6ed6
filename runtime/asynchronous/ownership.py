"""Which workers hold which piece of the parameters.

The parameters, one behind the other, are cut into pieces. Each piece has an order of the workers with which a phase
begins, by rendezvous hashing (Thaler and Ravishankar, 1998): a worker that comes or goes moves the pieces of its own
only. Of those of the order that live, the first is the *owner* of the piece and the second its *mirror*. Nobody joins
within a phase, so a mirror becomes the owner or stays the mirror, and never loses its part to another worker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import NamedTuple

from elastic.protocol.worker_id import node_of

PIECE_ELEMENTS = 1 << 18
"""Numbers of a piece of a large model, of which each takes 4 bytes."""
PIECES_MIN, PIECES_MAX = 16, 256
"""Pieces of a small model and of a very large one: enough that each of some dozens of workers has one."""


class Holders(NamedTuple):
    """Worker ids; mirror: "" if one worker lives."""

    owner: str
    mirror: str


def cut(elements: int) -> tuple[range, ...]:
    """The places of each piece in a vector of so many numbers; the same for every worker of the job."""
    count = max(1, min(elements, max(PIECES_MIN, min(PIECES_MAX, -(-elements // PIECE_ELEMENTS)))))
    return tuple(range(elements * piece // count, elements * (piece + 1) // count) for piece in range(count))


def order(piece: int, workers: Sequence[str]) -> tuple[str, ...]:
    """The workers in the order in which they hold this piece. The second one is on another node than the first, if
    there is one: nodes die as a whole."""
    ranked = sorted(workers, key=lambda worker: (_score(piece, worker), worker), reverse=True)
    elsewhere = next((worker for worker in ranked if node_of(worker) != node_of(ranked[0])), None)
    if elsewhere is not None:
        ranked.remove(elsewhere)
        ranked.insert(1, elsewhere)
    return tuple(ranked)


def _score(piece: int, worker: str) -> bytes:
    return hashlib.blake2b(f"{piece} {worker}".encode(), digest_size=8).digest()


def holders(ordered: Sequence[str], alive: Collection[str]) -> Holders:
    """The owner and the mirror of the piece with this order of workers. Raises ValueError if none of them lives."""
    living = [worker for worker in ordered if worker in alive]
    if not living:
        raise ValueError(f"none of {', '.join(ordered)} is a member")
    return Holders(living[0], living[1] if len(living) > 1 else "")
