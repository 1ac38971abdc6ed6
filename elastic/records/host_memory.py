"""The directory in /dev/shm in which a job keeps its newest state in the memory of this machine.

`elastic run`, or the daemon of a node, makes and removes it for each job that it runs. It belongs to one run of one
job: its name is new each time, and a later run never looks into it. If its owner is killed, the agent's subreaper
removes it (subreaper.py); if that is killed too, the next owner of this user on this machine does (temp_dirs.py).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from elastic.records import temp_dirs

PARENT = Path("/dev/shm")
PREFIX = "elastic-"


@contextlib.contextmanager
def directory(parent: Path = PARENT, *, wanted: bool) -> Iterator[Path | None]:
    """A new directory for this process, which only this user can read; removed at the end of the block. None: it is not
    wanted, or cannot be made, which is printed."""
    sweep(parent)
    made = claim(parent) if wanted else None
    try:
        yield made.path if made is not None else None
    finally:
        if made is not None:
            made.remove()


def claim(parent: Path = PARENT, complain: Callable[[str], None] | None = None) -> temp_dirs.TempDirectory | None:
    """As `directory`, until `remove` is called. complain: is told why there is none, instead of the user."""
    try:
        return temp_dirs.TempDirectory(parent, PREFIX)
    except OSError as error:
        (complain or _print)(
            f"the state is not kept in memory: {parent} cannot be used ({error.strerror}); if all workers die "
            "at once, the job goes on from a checkpoint. --snapshot-every off, or snapshot_every in a job.toml, says "
            "that this is meant"
        )
        return None


def _print(sentence: str) -> None:
    print(f"elastic: {sentence}", file=sys.stderr, flush=True)


def sweep(parent: Path = PARENT) -> None:
    """Remove this user's directories whose processes are gone."""
    temp_dirs.sweep(parent, PREFIX)
