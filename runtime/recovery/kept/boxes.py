"""Boxes: where a shard lies in its tensor, and what it shares with a shard of another world."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A part of a tensor: from `offset` on, `shape` elements in each dimension. A scalar has no dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def common(self, other: Box) -> Box | None:
        """What both have, as a box of the same tensor; None: nothing."""
        low = tuple(map(max, self.offset, other.offset))
        high = tuple(
            min(a + m, b + n) for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(end - start for start, end in zip(low, high, strict=True))
        return Box(low, shape) if all(size > 0 for size in shape) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The index of this box in a tensor that holds the outer one."""
        return tuple(
            slice(start - base, start - base + size)
            for start, base, size in zip(self.offset, outer.offset, self.shape, strict=True)
        )


def missing(wanted: Box, held: Iterable[Box]) -> int:
    """How many elements of a box none of the others has."""
    return sum(rest.elements for rest in _without(wanted, held))


def _without(wanted: Box, held: Iterable[Box]) -> list[Box]:
    """What is left of a box when the others are cut out of it."""
    left = [wanted] if wanted.elements else []
    for other in held:
        left = [piece for rest in left for piece in _cut(rest, other)]
        if not left:
            break
    return left


def _cut(box: Box, hole: Box) -> list[Box]:
    """The box without the hole: up to two pieces a dimension."""
    common = box.common(hole)
    if common is None:
        return [box]
    pieces: list[Box] = []
    offset, shape = list(box.offset), list(box.shape)
    for dim, (start, size) in enumerate(zip(common.offset, common.shape, strict=True)):
        end, last = start + size, offset[dim] + shape[dim]
        for low, high in ((offset[dim], start), (end, last)):
            if low < high:
                pieces.append(_replaced(offset, shape, dim, low, high - low))
        offset[dim], shape[dim] = start, size
    return pieces


def _replaced(offset: list[int], shape: list[int], dim: int, start: int, size: int) -> Box:
    return Box((*offset[:dim], start, *offset[dim + 1 :]), (*shape[:dim], size, *shape[dim + 1 :]))
