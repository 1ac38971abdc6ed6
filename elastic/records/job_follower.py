"""Follows the files of one job of this machine while other processes write them: of each look, a bounded piece.

Lines of several processes are taken in the order of their times: a line that is as young as the look waits for the
next look.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from elastic.process import file_modes
from elastic.records.files import read_resumes
from elastic.records.journal import Line, parse

READ_BYTES = 1 << 22
"""Most bytes of one file in one look."""

BLOCK_BYTES = 1 << 16
"""What is read at a time to find the end of the last whole line."""

SETTLE_NS = 50_000_000
"""Between the time in a line and the moment when it is in its file."""


AHEAD_NS = 60_000_000_000
"""A line that is so much younger than the look was written before a reboot, or on another machine."""


class JobReader(Protocol):
    """Takes what is written about a job. events: the events of journals that matter to it; it gets no other lines."""

    @property
    def events(self) -> Sequence[str]: ...

    def see(self, line: Line) -> None:
        """Take a line of a journal."""

    def resumed(self, redone: Sequence[int] | None) -> None:
        """The job goes on from a checkpoint. redone: first and last step that are done again, or None."""

    def applied(self, steps: list[dict[str, Any]], now_s: float) -> None:
        """Take new lines of the ledger. now_s: monotonic seconds of the look."""

    def tick(self, now_s: float, now_wall: float) -> None:
        """The look is over."""


class Growing:
    """The new whole lines of a file to which others append. Another file of that name is read from its beginning. What
    cannot be read has none."""

    def __init__(self, path: Path, *, from_end: bool) -> None:
        self._path = path
        self._offset, self._inode = 0, 0
        if from_end:
            with contextlib.suppress(OSError), open(path, "rb", opener=file_modes.regular) as file:
                self._offset, self._inode = _end_of_lines(file), os.fstat(file.fileno()).st_ino

    def all_lines(self) -> Iterator[bytes]:
        """The new lines to the end of the file, however many."""
        while found := self.lines():
            yield from found

    def lines(self) -> list[bytes]:
        """At most READ_BYTES of them."""
        try:
            facts = self._path.stat()
            if (facts.st_ino, facts.st_size) == (self._inode, self._offset):
                return []
            with open(self._path, "rb", opener=file_modes.regular) as file:
                if facts.st_ino != self._inode or facts.st_size < self._offset:
                    self._offset, self._inode = 0, facts.st_ino
                file.seek(self._offset)
                data = file.read(READ_BYTES)
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        # A line that does not fit into one look is of no process of ours, and must not end the reading.
        self._offset += len(whole) if whole or len(data) < READ_BYTES else len(data)
        return whole.splitlines()

    @property
    def is_replaced(self) -> bool:
        """Whether another file has the name now."""
        try:
            return self._inode not in (0, self._path.stat().st_ino)
        except FileNotFoundError:
            return False

    def rest(self, moved: Iterable[Path]) -> list[bytes]:
        """The lines that were not read when the file was moved away, if it is one of these files now."""
        for path in moved:
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == self._inode:
                    self._path = path
                    return self.lines()
        return []


def _end_of_lines(file: BinaryIO) -> int:
    """Where the last whole line ends. Behind it may be a torn one, which is cut off when the file is written again."""
    size = end = file.seek(0, os.SEEK_END)
    while end > max(0, size - READ_BYTES):
        begin = max(0, end - BLOCK_BYTES)
        file.seek(begin)
        if (found := file.read(end - begin).rfind(b"\n")) >= 0:
            return begin + found + 1
        end = begin
    return size if end else 0


class JobFiles:
    """The files of one job directory. from_end: what is there already is not read."""

    def __init__(self, job_dir: Path, reader: JobReader, *, from_end: bool) -> None:
        self._dir = job_dir
        self._reader = reader
        self._wanted = re.compile(f'"event":"({"|".join(reader.events)})"'.encode())
        self._ledger = Growing(job_dir / "steps.jsonl", from_end=from_end)
        self._journals: dict[Path, Growing] = {}
        self._waiting: list[Line] = []
        self._resumes = len(read_resumes(job_dir)) if from_end else 0
        if from_end:
            self._find(from_end=True)

    def look(self, now_ns: int, now_wall: float) -> bool:
        """Take in what is new. Returns whether there was anything. now_ns: monotonic."""
        if left := self._find(from_end=False):  # a run is over, and its journals were put aside
            self._take(left)
            self._see(self._waiting)
            self._waiting = []
        resumes = read_resumes(self._dir)
        for resume in resumes[self._resumes :]:
            self._reader.resumed(resume["redone"])
        self._resumes = len(resumes)
        self._take(text for tail in self._journals.values() for text in tail.lines())
        settled: list[Line] = []
        young: list[Line] = []
        for line in self._waiting:
            (young if -AHEAD_NS <= now_ns - line["t_mono_ns"] < SETTLE_NS else settled).append(line)
        self._waiting = young
        self._see(settled)
        steps = list(parsed_steps(self._ledger.lines()))
        self._reader.applied(steps, now_ns / 1e9)
        self._reader.tick(now_ns / 1e9, now_wall)
        return bool(settled or steps)

    def _take(self, texts: Iterable[bytes]) -> None:
        self._waiting += filter(None, map(parse, filter(self._wanted.search, texts)))
        self._waiting.sort(key=lambda line: int(line["t_mono_ns"]))

    def _see(self, lines: Iterable[Line]) -> None:
        for line in lines:
            self._reader.see(line)

    def _find(self, *, from_end: bool) -> list[bytes]:
        """Follow new journals, and give up those that are gone. Returns what these had left."""
        present = set((self._dir / "journal").glob("*.jsonl"))
        gone = [path for path, tail in self._journals.items() if path not in present or tail.is_replaced]
        left = []
        for path in gone:
            left += self._journals.pop(path).rest(self._dir.glob(f"runs/*/journal/{path.name}"))
        for path in present - self._journals.keys():
            self._journals[path] = Growing(path, from_end=from_end)
        return left


def parsed_steps(texts: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The lines of a ledger among these; torn ones are left out."""
    for text in texts:
        with contextlib.suppress(ValueError, RecursionError):
            line = json.loads(text)
            if isinstance(line, dict) and type(line.get("step")) is int and isinstance(line.get("samples"), list):
                yield line
