"""Which member writes what: consecutive rows of tensors, about the same number of bytes for each member.

Every member holds the whole state, so this depends on the tensors' shapes and the number of members alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows first..end-1, of the first dimension, of tensor number `tensor`. A tensor without dimensions has one."""

    tensor: int
    first: int
    end: int


def share(shapes: Sequence[Sequence[int]], sizes: Sequence[int], rank: int, world: int) -> list[Rows]:
    """The rows of one member. sizes: bytes of each tensor. The shares of ranks 0..world-1 cover everything once."""
    total = sum(sizes)
    low, high = total * rank // world, total * (rank + 1) // world
    found: list[Rows] = []
    offset = 0
    for number, (shape, size) in enumerate(zip(shapes, sizes, strict=True)):
        rows = shape[0] if shape else 1
        if size == 0:
            if rank == 0:
                found.append(Rows(number, 0, rows))
            continue
        row_bytes = size // rows
        first, end = (min(rows, max(0, math.ceil((cut - offset) / row_bytes))) for cut in (low, high))
        if first < end:
            found.append(Rows(number, first, end))
        offset += size
    return found
