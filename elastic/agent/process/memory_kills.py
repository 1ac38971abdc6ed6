"""Whether the kernel has ended a process for want of memory: its counters, of the machine and of memory cgroups.

The kernel tells nobody whom it has ended and why, but for its log, which few may read. It counts, before it sends the
signal. So a worker that gets a SIGKILL which its agent has not sent, within seconds of such a count, is taken for the
process that was counted.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from elastic.process.memory_cgroups import CGROUPS, PROC, own_memory_cgroups

SOON_S = 10.0
"""A count says nothing about a worker that ends later than that. It is looked at as often."""
MACHINE = "the machine"
HUGE_BYTES = 1 << 60
"""A limit of version 1 above that is none."""


class MemoryKills:
    """Used by one thread. proc, cgroups: where the kernel's files are."""

    def __init__(self, proc: Path = PROC, cgroups: Path = CGROUPS) -> None:
        self._proc, self._cgroups = proc, cgroups
        self._counts = dict(self._counted())
        self._noted: list[tuple[float, str]] = []
        """When a kill was counted, and what had no memory left; no worker has been found for it."""

    def note(self) -> None:
        """Read the counters."""
        now_s, found = time.monotonic(), dict(self._counted())
        grown = {name: count - self._counts.get(name, 0) for name, count in found.items()}
        # What a cgroup has counted, those around it and the machine count too.
        first = next((name for name, more in grown.items() if more > 0), None)
        if first is not None:
            self._noted += [(now_s, first)] * grown[first]
        self._counts = found
        self._noted = [(at_s, name) for at_s, name in self._noted if at_s > now_s - SOON_S]

    def take(self) -> str:
        """What had no memory left when a process was ended just now, in words; "": no such end was counted. Each is
        told once."""
        self.note()
        return self._said(self._noted.pop(0)[1]) if self._noted else ""

    def _said(self, name: str) -> str:
        if name == MACHINE:  # other containers and other agents of this machine count the same
            return "a process of this machine was ended for want of memory just then, probably this one"
        limits = [limit for one in (Path(name), *Path(name).parents) if (limit := _limit(one)) is not None]
        if limits:
            return f"no memory was left within the limit of its cgroup, {min(limits) / 1e9:.1f} GB"
        return "no memory was left on the machine"

    def _counted(self) -> Iterator[tuple[str, int]]:
        """The counters: of this process's cgroups from the inside out, then of the machine."""
        for directory, _ in own_memory_cgroups(self._proc, self._cgroups):
            for file in ("memory.events", "memory.oom_control"):
                if (count := _field(directory / file)) is not None:
                    yield str(directory), count
        if (count := _field(self._proc / "vmstat")) is not None:
            yield MACHINE, count


def _field(path: Path) -> int | None:
    """The number behind `oom_kill` in such a file; None: there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def _limit(cgroup: Path) -> int | None:
    """In bytes; None: it has none of its own."""
    for file in ("memory.max", "memory.limit_in_bytes"):
        with contextlib.suppress(OSError):
            word = (cgroup / file).read_text().strip()
            return int(word) if word.isdigit() and int(word) < HUGE_BYTES else None
    return None
