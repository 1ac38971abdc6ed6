"""Retention: which checkpoints stay."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from elastic.checkpoints.naming import EntryName
from elastic.errors import ConfigError

_KEEP = re.compile(r"(?:last\s+)?(\d{1,15})(?:\s*,\s*every\s+(\d{1,15})(?:\s+steps)?)?")


@dataclass(frozen=True, slots=True)
class Keep:
    """The newest `last` ones, and for good the first of each `every` steps (0: none for good)."""

    last: int = 2
    every: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Of "last 3", "3" or "last 3, every 10000 steps". Raises ConfigError."""
        match = _KEEP.fullmatch(text.strip())
        if match is None or int(match[1]) < 1 or match[2] == "0":
            raise ConfigError(f'keep={text!r}: write "last 2", or "last 2, every 10000 steps"; at least one is kept')
        return cls(int(match[1]), int(match[2] or 0))

    def __str__(self) -> str:
        return f"last {self.last}" + (f", every {self.every} steps" if self.every else "")


def superfluous(keep: Keep, complete: Iterable[EntryName], unfinished: Iterable[EntryName]) -> list[EntryName]:
    """What to remove, oldest first. An unfinished one that is older than a complete one will never be needed."""
    ordered = sorted(complete)
    stay = set(ordered[-keep.last :])
    if keep.every:
        first: dict[int, EntryName] = {}
        for name in ordered:
            first.setdefault(name.step // keep.every, name)
        stay |= set(first.values())
    newest = ordered[-1] if ordered else None
    gone = [name for name in unfinished if newest is not None and name.step < newest.step]
    return sorted([name for name in ordered if name not in stay] + gone)
