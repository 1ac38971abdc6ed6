"""What is still on the machine although a job has ended."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from chaos_tests.harness import processes, resources

GONE_S = 10.0
ENDS_S = 60.0
"""The same where daemons tell that a job has ended while its processes are still on their way out: an interpreter with
torch in it, on a busy machine."""
LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Before:
    """What was there before the job, and may stay."""

    segments: frozenset[str]
    temporary: frozenset[str]

    @classmethod
    def now(cls, temporary: Path) -> Self:
        return cls(frozenset(resources.shared_memory()), frozenset(path.name for path in temporary.iterdir()))

    def beside(self, segments: set[str]) -> Self:
        """With those of another job that began later: whether it leaves any behind is not this one's to say."""
        return replace(self, segments=self.segments | segments)


def left(
    mark: str,
    doors: set[resources.Door],
    temporary: Path,
    before: Before,
    daemons: frozenset[int] = frozenset(),
) -> tuple[str, ...]:
    """A sentence for each. mark: of the job's processes. doors: on which they listened. daemons: processes of that mark
    that outlive the job."""
    deadline_s = time.monotonic() + (ENDS_S if daemons else GONE_S)
    while True:
        still = processes.await_exits(processes.living(mark) - daemons, max(0.0, deadline_s - time.monotonic()))
        found = tuple(_left(still, doors, temporary, before))
        if not found or not daemons or time.monotonic() > deadline_s:
            return found
        time.sleep(LOOK_S)  # those that stay clear away what the job has left: there is nothing to wait on


def _left(still: set[int], doors: set[resources.Door], temporary: Path, before: Before) -> Iterator[str]:
    for pid in sorted(still):
        yield f"process {pid} is left: {processes.command_line(pid)}"
    for door in sorted(resources.still_open(doors)):
        yield f"port {door.port} is still listened on"
    for name in sorted({path.name for path in temporary.iterdir()} - before.temporary):
        yield f"temporary {name} is left"
    for name in sorted(resources.abandoned(resources.shared_memory() - before.segments)):
        yield f"shared memory {name} is left"
