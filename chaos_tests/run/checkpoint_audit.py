"""Reads every checkpoint and snapshot of a job that anybody calls complete, byte by byte, as soon as it is called so.

And once more at the end whatever lies on disk. Decided from that is I14; see checkers/durability.py.
"""

from __future__ import annotations

import time
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

AGAIN_S = 1.0
"""An entry without a manifest is looked at again after so long: one that is being removed loses its manifest first."""
NO_MANIFEST = "it has no manifest"

PLACES = {"snapshot_complete": "memory", "checkpoint_complete": "disk"}


class Auditor:
    """Polled by the harness's one thread. places: the job's directory on each of its nodes."""

    def __init__(self, places: Mapping[str, Path], journal: Journal) -> None:
        self._places, self._journal = places, journal
        self._last: dict[tuple[str, str], EntryName] = {}
        """(URL, series) -> the entry that was called complete last."""
        self._without: list[tuple[float, str, Series, Found]] = []
        """(since when, place, series, entry): called complete, and found without a manifest."""

    def look(self, lines: Iterable[dict[str, Any]]) -> None:
        """lines: new ones of the job's journals."""
        for line in lines:
            if (place := PLACES.get(line["event"])) is not None:
                name = EntryName.parse(str(line["entry"]))
                if name is not None and (storage := self._storage(place, line["node"])) is not None:
                    series = Series(storage, str(line["series"]))
                    self._last[storage.url, series.name] = name
                    if (found := series.look(name)).unfinished:
                        self._without.append((time.monotonic(), place, series, found))
                    else:
                        self._read(place, series, found)
        self._look_again(time.monotonic() - AGAIN_S)

    def look_at_all(self) -> None:
        """Reads all checkpoints that are listed as complete when the job has ended."""
        self._look_again(time.monotonic())
        if (storage := self._storage("disk", next(iter(self._places)))) is None:
            return  # all nodes have the same one
        for directory in storage.directories(""):
            series = Series(storage, directory)
            for name in series.names():
                if not (found := series.look(name)).unfinished:
                    self._read("disk", series, found, at="the end")

    def _look_again(self, until_s: float) -> None:
        """At those that had no manifest until then. Whoever removes one has completed another one before, and may have
        been killed on the way."""
        waiting, self._without = self._without, []
        for since_s, place, series, found in waiting:
            if since_s > until_s:
                self._without.append((since_s, place, series, found))
                continue
            removed = self._last[series.storage.url, series.name] != found.name or found.name not in series.names()
            self._note(place, series, found.name, "completion", GONE if removed else NO_MANIFEST)

    def _read(self, place: str, series: Series, found: Found, at: str = "completion") -> None:
        read = found.manifest is None or found.manifest.size <= LARGE_BYTES
        if read:
            found = series.verify(found)
        self._note(place, series, found.name, at, GONE if found.removed else found.problem, read=read)

    def _note(self, place: str, series: Series, name: EntryName, at: str, problem: str, *, read: bool = True) -> None:
        self._journal.write(
            "checkpoint_read",
            place=place,
            series=series.name,
            entry=str(name),
            step=name.step,
            at=at,
            read=read,
            problem=problem,
        )

    def _storage(self, place: str, node: str) -> Storage | None:
        try:
            settings = read_settings(self._places[node])
            if place == "disk":
                return storage_at(settings.root)
        except (OSError, ElasticError, ValueError, KeyError):
            return None
        return MemoryStorage(settings.memory) if settings.memory else None
