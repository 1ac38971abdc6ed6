"""What is still on the machine although a job has ended."""

from __future__ import annotations

from pathlib import Path

from chaos_tests.harness import processes, resources

GONE_S = 10.0


def left(mark: str, doors: set[resources.Door], temporary: Path, segments: set[str]) -> tuple[str, ...]:
    """A sentence for each. mark: of the job's processes. doors: on which they listened. segments: there before it."""
    still = processes.await_exits(processes.living(mark), GONE_S)
    return (
        *(f"process {pid} is left: {processes.command_line(pid)}" for pid in sorted(still)),
        *(f"port {door.port} is still listened on" for door in sorted(resources.still_open(doors))),
        *(f"temporary {path.name} is left" for path in sorted(temporary.iterdir())),
        *(f"shared memory {n} is left" for n in sorted(resources.abandoned(resources.shared_memory() - segments))),
    )
