"""Whether this machine's memory has room for snapshots."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

COPIES = 2
"""What lies in memory while one is written: it, and the one before."""

STAGED = 1
"""What all workers of a machine together copy aside first."""

PART = 0.5
"""How much of what is left snapshots may take: the script's own processes need memory, and some of them /dev/shm."""


def shortage(state_bytes: int, free_bytes: int, available_bytes: int) -> str:
    """Why a state of this size gets no snapshots, as a sentence; "" if there is room.

    free_bytes: of the file system in memory; available_bytes: of the memory that processes can get without swapping.
    """
    copies, all_bytes = COPIES * state_bytes, (COPIES + STAGED) * state_bytes
    if copies > PART * free_bytes:
        return (
            f"{COPIES} copies of a state of {_megabytes(state_bytes)} would take more than half of the "
            f"{_megabytes(free_bytes)} that are left in /dev/shm (a container is given more by docker run --shm-size)"
        )
    if all_bytes > PART * available_bytes:
        return (
            f"{COPIES + STAGED} copies of a state of {_megabytes(state_bytes)} would take more than half of the "
            f"{_megabytes(available_bytes)} of memory that are left on this machine"
        )
    return ""


def free_bytes(path: str) -> int:
    """Of the file system of that directory. Raises OSError."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


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


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB"
