"""How much is kept: of the journals of a process that runs for ever, and of the jobs that a replica has seen.

Such a journal is written in parts, `<who>.jsonl`, `<who>.1.jsonl`, `<who>.2.jsonl` and so on. A part keeps its name, so
that a remote reader finds it again. With each new part the oldest parts of all processes of the same kind are removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

PART_BYTES = 8 * 2**20
KEPT_BYTES = 64 * 2**20
"""The most bytes of all journals of one kind in one directory."""


@dataclass(frozen=True, slots=True)
class Retention:
    """kind: the prefix of the names of such journals."""

    kind: str
    part_bytes: int = PART_BYTES
    kept_bytes: int = KEPT_BYTES

    def is_over(self, file: int) -> bool:
        """Whether the next line belongs into another part, because this one is full or was removed."""
        found = os.fstat(file)
        return found.st_size >= self.part_bytes or found.st_nlink == 0

    def part(self, path: Path) -> Path:
        """The file to which the journal of that path is to be written now."""
        numbers = [0]
        for other in path.parent.glob(f"{path.stem}.*.jsonl"):
            number = other.stem.removeprefix(f"{path.stem}.")
            numbers += [int(number)] if number.isdecimal() else []
        last = max(numbers)
        with contextlib.suppress(FileNotFoundError):
            last += _part(path, last).stat().st_size >= self.part_bytes
        return _part(path, last)

    def prune(self, now: Path) -> None:
        """Remove the oldest parts, never the one that is written now. A part that cannot be removed only costs room."""
        found: list[tuple[int, int, Path]] = []
        for path in now.parent.glob(f"{self.kind}*.jsonl"):
            with contextlib.suppress(OSError):  # another process removes them too
                seen = path.stat()
                found.append((seen.st_mtime_ns, seen.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self.kept_bytes:
                return
            if path != now:
                with contextlib.suppress(OSError):
                    path.unlink()
                    total -= size


def forget(jobs: Path, known: Collection[str], kept: int) -> list[str]:
    """Remove the directories of jobs that are not known any more, the oldest first, until `kept` directories are left.
    Returns their names."""
    directories = [path for path in jobs.iterdir() if path.is_dir()] if jobs.is_dir() else []
    strangers: list[tuple[float, Path]] = []
    for path in directories:
        if path.name not in known:
            with contextlib.suppress(OSError):  # another replica, in the same directory, removes them too
                strangers.append((path.stat().st_mtime, path))
    gone = [path for _, path in sorted(strangers)[: max(0, len(directories) - kept)]]
    for path in gone:
        shutil.rmtree(path, ignore_errors=True)  # the rest is tried again later
    return [path.name for path in gone]


def _part(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.{number}.jsonl") if number else path
