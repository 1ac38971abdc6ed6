"""How much memory a process can still get."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that this process can still get: of the machine, and of every cgroup (version 2) that it is in."""
    return min([_of_machine(proc), *_of_cgroups(proc, cgroups)])


def _of_machine(proc: Path) -> int:
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _of_cgroups(proc: Path, cgroups: Path) -> Iterator[int]:
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        if not line.startswith("0::"):
            continue
        group = cgroups / line.removeprefix("0::").lstrip("/")
        while group.is_relative_to(cgroups):
            limit = _first_word(group / "memory.max")
            if limit.isdigit():
                statistics = (group / "memory.stat").read_text().splitlines()
                # Of the page cache, what has not been used for a while is given up before anything is refused.
                cached = next((int(line.split()[1]) for line in statistics if line.startswith("inactive_file ")), 0)
                yield max(0, int(limit) - int(_first_word(group / "memory.current")) + cached)
            group = group.parent


def _first_word(path: Path) -> str:
    """Empty: there is no such file, so this cgroup has no such limit."""
    try:
        return path.read_text().split()[0]
    except FileNotFoundError:
        return ""
