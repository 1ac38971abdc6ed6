"""Where a job keeps its newest state in the memory of this machine: a directory in /dev/shm.

`elastic run` makes it, holds its lock while it lives, and removes it. It belongs to one run of one job: its name is
new each time, and a later run never looks into it. If the command is killed, the keeper of its agent removes it
(keeper.py); if that is killed too, the next `elastic run` of this user on this machine does. Whose owner is gone is
told by the lock (flock), which the kernel gives up with its holder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

PARENT = Path("/dev/shm")
PREFIX = "elastic-"
_NAME = re.compile(rf"{PREFIX}[0-9a-f]{{16}}")
"""Ours, and nobody else's whose names begin alike."""


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
        path, lock = _make(parent)
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
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def sweep(parent: Path = PARENT) -> None:
    """Remove the directories of this user whose processes are gone."""
    with contextlib.suppress(OSError):  # this machine has no such memory, or not for us
        for path in filter(lambda path: _NAME.fullmatch(path.name), parent.iterdir()):
            with contextlib.suppress(OSError):  # somebody else's, or somebody else removes it too
                if path.stat(follow_symlinks=False).st_uid == os.getuid() and (lock := _lock(path)) is not None:
                    shutil.rmtree(path, ignore_errors=True)
                    os.close(lock)


def _make(parent: Path) -> tuple[Path, int]:
    while True:
        path = parent / f"{PREFIX}{secrets.token_hex(8)}"
        path.mkdir(0o700)
        with contextlib.suppress(FileNotFoundError):  # swept before it was locked
            if (lock := _lock(path)) is not None:
                return path, lock


def _lock(path: Path) -> int | None:
    """The descriptor that holds its lock; None if somebody else does. Raises OSError, also if the path is gone."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.stat(path)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
