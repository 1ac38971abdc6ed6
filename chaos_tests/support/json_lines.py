"""Reading files of JSON lines while others write them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from elastic.records.job_follower import Growing
from elastic.records.journal import parse


class Tail:
    """The complete lines that were added to a JSON lines file since the last look, but for those that a kill has torn.

    read: one line; None for a torn one.
    """

    def __init__(self, path: Path, read: Callable[[bytes], dict[str, Any] | None] = parse) -> None:
        self._tail, self._read = Growing(path, from_end=False), read

    def lines(self) -> list[dict[str, Any]]:
        return [line for text in self._tail.all_lines() if (line := self._read(text)) is not None]


class Journals:
    """The lines of all journals there are, by time, as they come.

    paths: looked up again each time, because processes that begin later have journals of their own.
    """

    def __init__(self, paths: Callable[[], Iterable[Path]]) -> None:
        self._paths = paths
        self._tails: dict[Path, Tail] = {}
        self._lines: list[dict[str, Any]] = []

    def new(self) -> list[dict[str, Any]]:
        """Those that were added since the last look."""
        try:
            paths = list(self._paths())
        except FileNotFoundError:  # a run that goes on has just put the journals of the one before aside
            paths = []
        tails = [self._tails.setdefault(path, Tail(path)) for path in paths]
        added = sorted((line for tail in tails for line in tail.lines()), key=_when)
        if added:
            self._lines += added
            self._lines.sort(key=_when)
        return added

    def all(self) -> list[dict[str, Any]]:
        """All lines by time. A line of another process may come behind later lines, and is put where it belongs."""
        self.new()
        return list(self._lines)


def _when(line: dict[str, Any]) -> int:
    return int(line["t_mono_ns"])
