"""Where a job keeps its newest state in the memory of this machine: a directory in /dev/shm.

`elastic run` makes it and removes it. It belongs to one run of one job: its name is
new each time, and a later run never looks into it. If the command is killed, the keeper of its agent removes it
(keeper.py); if that is killed too, the next `elastic run` of this user on this machine does (scratch.py).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from elastic import scratch

PARENT = Path("/dev/shm")
PREFIX = "elastic-"


@contextlib.contextmanager
def directory(parent: Path = PARENT, *, wanted: bool) -> Iterator[Path | None]:
    """A new directory for this process, which only this user can read; it goes at the end of the block. None if it is
    not wanted, or cannot be had; that is said.
    """
    sweep(parent)
    if not wanted:
        yield None
        return
    try:
        made = scratch.Scratch(parent, PREFIX)
    except OSError as error:
        print(
            f"elastic: the state is not kept in memory: {parent} cannot be used ({error.strerror}); if all workers die "
            "at once, the job goes on from a checkpoint. --snapshot-every off says that this is meant",
            file=sys.stderr,
            flush=True,
        )
        yield None
        return
    try:
        yield made.path
    finally:
        made.remove()


def sweep(parent: Path = PARENT) -> None:
    """Remove the directories of this user whose processes are gone."""
    scratch.sweep(parent, PREFIX)
