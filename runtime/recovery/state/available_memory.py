"""How much memory a process can still get, and a file in a directory in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from elastic.process.memory_cgroups import CGROUPS, PROC, own_memory_cgroups


@dataclass(frozen=True, slots=True)
class _Files:
    """Names of the files and fields of a memory cgroup. cached: the field for page cache that has not been used for a
    while, which the kernel frees before it refuses memory."""

    limit: str
    used: str
    cached: str


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")


def available_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Bytes that this process can still get: from the machine, and from every memory cgroup that it is in."""
    return min([_of_machine(proc), *_of_cgroups(proc, cgroups)])


def free_bytes(directory: str | Path) -> int:
    """Bytes that are free on the file system of that directory. Raises OSError."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def _of_machine(proc: Path) -> int:
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _of_cgroups(proc: Path, cgroups: Path) -> Iterator[int]:
    """Bytes left in each cgroup with a limit, and in those around it."""
    for group, version in own_memory_cgroups(proc, cgroups):
        files = _V2 if version == 2 else _V1
        limit = _first_word(group / files.limit)
        if limit.isdigit():  # version 2 may say "max"; without a limit, version 1 has a huge number
            statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            cached = int(statistics.get(files.cached, 0))
            yield max(0, int(limit) - int(_first_word(group / files.used)) + cached)


def _first_word(path: Path) -> str:
    """The first word of a file; "": the file does not exist, so this cgroup has no such limit."""
    try:
        return path.read_text().split()[0]
    except FileNotFoundError:
        return ""
