"""Which donor sends which part of a state. Pure: each is asked for one part at a time, so the faster ones send more.

A part is a row of slices of blobs. One that was lost with its donor is given to another; every part is done once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

Slice: TypeAlias = tuple[int, int, int]
"""(number of the blob, first byte, end)"""
Part: TypeAlias = tuple[Slice, ...]


def parts_of(sizes: Sequence[int], most_bytes: int) -> list[Part]:
    """Blobs of these sizes, in order, in parts of at most so many bytes; every byte is in one of them."""
    parts: list[Part] = []
    part: list[Slice] = []
    left = most_bytes
    for blob, size in enumerate(sizes):
        start = 0
        while start < size:
            end = min(size, start + left)
            part.append((blob, start, end))
            left -= end - start
            start = end
            if not left:
                parts.append(tuple(part))
                part, left = [], most_bytes
    return [*parts, tuple(part)] if part else parts


class Parts:
    """Which are still to be asked for, and who has been asked."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._todo = deque(parts)
        self._asked: dict[str, Part] = {}

    def take(self, donor: str) -> Part | None:
        """The part that this donor is to send next; None: there is none to be asked for, at present."""
        if not self._todo:
            return None
        self._asked[donor] = self._todo.popleft()
        return self._asked[donor]

    def done(self, donor: str) -> None:
        """What it was asked for is here, and verified."""
        del self._asked[donor]

    def lost(self, donor: str) -> None:
        """It will send nothing more; another one has to."""
        if (part := self._asked.pop(donor, None)) is not None:
            self._todo.appendleft(part)

    @property
    def under_way(self) -> bool:
        return bool(self._asked)

    @property
    def complete(self) -> bool:
        return not self._todo and not self._asked
