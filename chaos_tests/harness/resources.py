"""What processes hold, read from /proc, and what a machine is left with when they are gone."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
LISTEN = "0A"
"""State of a listening socket in /proc/net/tcp."""


@dataclass(frozen=True, slots=True)
class Held:
    """Of one process. rss_mb: resident memory in MiB."""

    fds: int
    threads: int
    rss_mb: float

    def since(self, earlier: Held) -> Held:
        return Held(self.fds - earlier.fds, self.threads - earlier.threads, self.rss_mb - earlier.rss_mb)


def held(pid: int) -> Held:
    """Raises OSError if the process is gone."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    rss_kib = int(status["VmRSS"].split()[0])
    return Held(len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"]), rss_kib / 1024)


def least(samples: Iterable[Held]) -> Held:
    """Each figure at its smallest: what is held between two short-lived needs."""
    seen = list(samples)
    return Held(min(s.fds for s in seen), min(s.threads for s in seen), min(s.rss_mb for s in seen))


def listening_ports(pids: Iterable[int]) -> set[int]:
    """TCP ports on which these processes listen; of a process that ended meanwhile, none."""
    sockets = {inode for pid in pids for inode in _sockets(pid)}
    return {port for port, inode in _listening() if inode in sockets}


def still_listening(ports: set[int]) -> set[int]:
    """Those of the ports on which anybody listens."""
    return ports & {port for port, _ in _listening()}


def shared_memory() -> set[str]:
    """Names of all segments in /dev/shm."""
    return {path.name for path in SHARED_MEMORY.iterdir()}


def abandoned(segments: Iterable[str]) -> set[str]:
    """Those of the segments that no process has mapped: their makers ended without removing them."""
    left = set(segments)
    for directory in Path("/proc").iterdir():
        if left and directory.name.isdigit():
            try:
                maps = (directory / "maps").read_text()
            except OSError:  # it ended meanwhile, or belongs to another user
                continue
            left = {name for name in left if f"{SHARED_MEMORY}/{name}\n" not in maps}
    return left


def _sockets(pid: int) -> set[str]:
    found = set()
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:  # closed also if the process ends meanwhile
            for entry in entries:
                link = os.readlink(entry.path)
                if link.startswith("socket:["):
                    found.add(link[len("socket:[") : -1])
    except OSError:
        return found
    return found


def _listening() -> list[tuple[int, str]]:
    """(port, inode) of all listening TCP sockets."""
    rows = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN:
                rows.append((int(fields[1].rsplit(":", 1)[1], 16), fields[9]))
    return rows
