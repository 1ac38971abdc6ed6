"""What is kept of a job's state outside its processes: snapshots in the memory of a node, checkpoints on a storage."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from elastic.checkpoints.naming import EntryName
from tests.sim.training import Meta

CHECKPOINTS_KEPT = 2
"""Older ones are removed by whoever holds the pointer."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The parameters before the operation at that place of the program."""

    place: int
    state: int
    moment: Meta
    """Where its script was."""


class Memory:
    """Of one node. A snapshot is whole once each member there has written its part; then the one before goes."""

    def __init__(self) -> None:
        self._parts: dict[EntryName, set[str]] = {}
        self._whole: dict[EntryName, Kept] = {}

    @property
    def newest(self) -> str:
        """The name of the newest that is whole, or empty."""
        return str(max(self._whole, default=""))

    def write(self, name: EntryName, worker: str, of: Collection[str], kept: Kept) -> None:
        """of: the members here, each of which writes its part."""
        written = self._parts.setdefault(name, set())
        written.add(worker)
        if written >= set(of):
            del self._parts[name]
            self._whole[name] = kept
            newest = max(self._whole)
            self._whole = {newest: self._whole[newest]}

    def read(self, entry: str) -> Kept | None:
        return self._whole.get(name) if (name := EntryName.parse(entry)) else None


class Storage:
    """Which everybody reaches."""

    def __init__(self) -> None:
        self._whole: dict[EntryName, Kept] = {}

    def write(self, name: EntryName, kept: Kept) -> None:
        self._whole[name] = kept

    def read(self, entry: str) -> Kept | None:
        return self._whole.get(name) if (name := EntryName.parse(entry)) else None

    def prune(self, entry: str) -> None:
        """By the holder of the pointer to that entry."""
        newest = EntryName.parse(entry)
        for name in sorted(name for name in self._whole if newest and name <= newest)[:-CHECKPOINTS_KEPT]:
            del self._whole[name]
