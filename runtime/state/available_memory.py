"""How much memory a process can still get."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class _Files:
    """What a memory cgroup calls its numbers. cached: of the page cache, what has not been used for a while is given up
    before anything is refused."""

    limit: str
    used: str
    cached: str


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that this process can still get: of the machine, and of every memory cgroup that it is in."""
    return min([_of_machine(proc), *_of_cgroups(proc, cgroups)])


def _of_machine(proc: Path) -> int:
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _of_cgroups(proc: Path, cgroups: Path) -> Iterator[int]:
    """Both versions: on a machine with both the controller for memory is in one of them."""
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            yield from _of_hierarchy(cgroups, path, _V2)
        elif "memory" in controllers.split(","):
            yield from _of_hierarchy(cgroups / "memory", path, _V1)


def _of_hierarchy(mount: Path, path: str, files: _Files) -> Iterator[int]:
    """In a container the path may be that of the host, and what is mounted its own cgroup: then there is no such
    directory, and the mount itself has the limit."""
    group = mount / path.lstrip("/")
    while group.is_relative_to(mount):
        limit = _first_word(group / files.limit)
        if limit.isdigit():  # of version 2 it may be "max"; of version 1, without one, a number above any memory
            statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            cached = int(statistics.get(files.cached, 0))
            yield max(0, int(limit) - int(_first_word(group / files.used)) + cached)
        group = group.parent


def _first_word(path: Path) -> str:
    """Empty: there is no such file, so this cgroup has no such limit."""
    try:
        return path.read_text().split()[0]
    except FileNotFoundError:
        return ""
