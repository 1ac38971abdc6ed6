"""What processes hold open, read from /proc, and what is still on the machine when they are gone."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from chaos_tests.support import processes

SHARED_MEMORY = Path("/dev/shm")
LISTEN = "0A"
"""State of a listening socket in /proc/net/tcp."""


@dataclass(frozen=True, slots=True, order=True)
class OpenPort:
    """A listening TCP socket. inode: the kernel's name for it, never used again."""

    port: int
    inode: str


def open_ports(pids: Iterable[int]) -> set[OpenPort]:
    """On which these processes listen; of a process that ended meanwhile, none."""
    sockets = {inode for pid in pids for inode in _sockets(pid)}
    return {port for port in _listening() if port.inode in sockets}


def still_open(ports: set[OpenPort]) -> set[OpenPort]:
    """Those of them that are still there. The same port may have become somebody else's since."""
    return ports & set(_listening())


def shared_memory() -> set[str]:
    """Names of all segments in /dev/shm."""
    return {path.name for path in SHARED_MEMORY.iterdir()}


def abandoned(segments: Iterable[str]) -> set[str]:
    """Those of the segments, and of the directories among them, that are there and that no process has mapped or
    open: their makers ended without removing them."""
    left = set(segments)
    return (left - in_use(left)) & shared_memory()


def in_use(segments: Iterable[str], but_by: Collection[int] = ()) -> set[str]:
    """Those of them that some process has mapped or open. but_by: pids that do not count."""
    left, used = set(segments), set[str]()
    for directory in Path("/proc").iterdir():
        if left and directory.name.isdigit() and int(directory.name) not in but_by:
            try:
                maps = (directory / "maps").read_text(errors="replace")
            except OSError:  # it ended meanwhile, or belongs to another user
                continue
            opened = _opened(int(directory.name))
            used |= {n for n in left if f"{SHARED_MEMORY}/{n}\n" in maps or f"{SHARED_MEMORY}/{n}" in opened}
            left -= used
    return used


def _sockets(pid: int) -> set[str]:
    return {link[len("socket:[") : -1] for link in _opened(pid) if link.startswith("socket:[")}


def _opened(pid: int) -> set[str]:
    """What the descriptors of a process stand for, as /proc says it."""
    found = set()
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:  # closed also if the process ends meanwhile
            for entry in entries:
                found.add(os.readlink(entry.path))
    except OSError:
        return found
    return found


def _listening() -> list[OpenPort]:
    rows = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN:
                rows.append(OpenPort(int(fields[1].rsplit(":", 1)[1], 16), fields[9]))
    return rows


GONE_S = 10.0
ENDS_S = 60.0
"""The same where daemons tell that a job has ended while its processes are still on their way out: an interpreter with
torch in it, on a busy machine."""
LEFTOVERS_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Before:
    """What was there before the job, and may stay."""

    segments: frozenset[str]
    temporary: frozenset[str]

    @classmethod
    def now(cls, temporary: Path) -> Self:
        return cls(frozenset(shared_memory()), frozenset(path.name for path in temporary.iterdir()))

    def beside(self, segments: set[str]) -> Self:
        """With those of another job that began later: whether it leaves any behind is not this one's to say."""
        return replace(self, segments=self.segments | segments)


def left(
    mark: str, ports: set[OpenPort], temporary: Path, before: Before, daemons: frozenset[int] = frozenset()
) -> tuple[str, ...]:
    """A sentence for each. mark: of the job's processes. ports: on which they listened. daemons: processes of that mark
    that outlive the job."""
    deadline_s = time.monotonic() + (ENDS_S if daemons else GONE_S)
    while True:
        still = processes.await_exits(processes.living(mark) - daemons, max(0.0, deadline_s - time.monotonic()))
        found = tuple(_left(still, ports, temporary, before))
        if not found or not daemons or time.monotonic() > deadline_s:
            return found
        time.sleep(LEFTOVERS_POLL_S)  # those that stay clear away what the job has left: there is nothing to wait on


def _left(still: set[int], ports: set[OpenPort], temporary: Path, before: Before) -> Iterator[str]:
    for pid in sorted(still):
        yield f"process {pid} is left: {processes.command_line(pid)}"
    for port in sorted(still_open(ports)):
        yield f"port {port.port} is still listened on"
    for name in sorted({path.name for path in temporary.iterdir()} - before.temporary):
        yield f"temporary {name} is left"
    for name in sorted(abandoned(shared_memory() - before.segments)):
        yield f"shared memory {name} is left"
