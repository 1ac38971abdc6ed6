"""The memory cgroups of this process, of both versions of cgroups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def own_memory_cgroups(proc: Path = PROC, cgroups: Path = CGROUPS) -> Iterator[tuple[Path, int]]:
    """Directory and version of each, from the inside out: on a machine with both versions, one of them controls memory.

    In a container the path may be the host's, while its own cgroup is mounted: then a directory does not exist, and the
    mount itself, which comes last, has the files. Nothing where the kernel has no cgroups.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            mount, version = cgroups, 2
        elif "memory" in controllers.split(","):
            mount, version = cgroups / "memory", 1
        else:
            continue
        directory = mount / path.lstrip("/")
        while directory.is_relative_to(mount):
            yield directory, version
            directory = directory.parent
