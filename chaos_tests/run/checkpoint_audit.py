"""Reads every checkpoint and snapshot of a job that anybody calls complete, byte by byte, as soon as it is called so.

And once more at the end whatever lies on disk. Decided from that is I14; see checkers/durability.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from chaos_tests.checkers.durability import GONE
from elastic.checkpoints.naming import EntryName
from elastic.checkpoints.select import Found
from elastic.checkpoints.series import Series
from elastic.checkpoints.storage import MemoryStorage, Storage, storage_at
from elastic.errors import ElasticError
from elastic.records.job_directory import read_settings
from elastic.records.journal import Journal

LARGE_BYTES = 1 << 30
"""A larger one is looked at without reading its data, and noted as not read: that would slow down what is measured."""

PLACES = {"snapshot_complete": "memory", "checkpoint_complete": "disk"}


class Auditor:
    """Polled by the harness's one thread. places: the job's directory on each of its nodes."""

    def __init__(self, places: Mapping[str, Path], journal: Journal) -> None:
        self._places, self._journal = places, journal

    def look(self, lines: Iterable[dict[str, Any]]) -> None:
        """lines: new ones of the job's journals."""
        for line in lines:
            if (place := PLACES.get(line["event"])) is not None:
                name = EntryName.parse(str(line["entry"]))
                if name is not None and (storage := self._storage(place, line["node"])) is not None:
                    self._read(place, Series(storage, str(line["series"])), name)

    def look_at_all(self) -> None:
        """Reads all checkpoints that are listed as complete when the job has ended."""
        if (storage := self._storage("disk", next(iter(self._places)))) is None:
            return  # all nodes have the same one
        for directory in storage.directories(""):
            series = Series(storage, directory)
            for name in series.names():
                if not series.look(name).unfinished:
                    self._read("disk", series, name, at="the end")

    def _read(self, place: str, series: Series, name: EntryName, at: str = "completion") -> None:
        found = series.look(name)
        read = found.manifest is None or found.manifest.size <= LARGE_BYTES
        if read:
            found = series.verify(found)
        if found.problem and series.look(name).manifest is None:  # its manifest goes first
            found = Found(name, None, GONE)
        self._journal.write(
            "checkpoint_read",
            place=place,
            series=series.name,
            entry=str(name),
            step=name.step,
            at=at,
            read=read,
            problem=found.problem,
        )

    def _storage(self, place: str, node: str) -> Storage | None:
        try:
            settings = read_settings(self._places[node])
            if place == "disk":
                return storage_at(settings.root)
        except (OSError, ElasticError, ValueError, KeyError):
            return None
        return MemoryStorage(settings.memory) if settings.memory else None
