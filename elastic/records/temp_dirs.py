"""Directories that belong to one process, which removes them; if it was killed, a later process does.

A lock (flock) tells whether the owner lives: the kernel releases it when its holder ends, in any container.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import tempfile
from pathlib import Path

AGENT_PREFIX = "elastic-agent-"
"""The directory of an agent's socket has a name with this prefix, if the path in the job directory is too long."""


class TempDirectory:
    """A new directory `<parent>/<prefix><16 hex digits>`, which only this user can read. Raises OSError."""

    def __init__(self, parent: Path, prefix: str) -> None:
        self.path, self._lock = _make(parent, prefix)

    def remove(self) -> None:
        """Any number of times."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def in_tmp(prefix: str) -> TempDirectory:
    """A new one in $TMPDIR, or /tmp, from which those of that prefix whose processes are gone are removed first."""
    parent = Path(tempfile.gettempdir())
    sweep(parent, prefix)
    return TempDirectory(parent, prefix)


def sweep(parent: Path, prefix: str) -> None:
    """Remove this user's directories of that prefix whose processes are gone."""
    name = re.compile(rf"{re.escape(prefix)}[0-9a-f]{{16}}")
    with contextlib.suppress(OSError):  # this machine has no such directory, or this user may not read it
        for path in filter(lambda path: name.fullmatch(path.name), parent.iterdir()):
            with contextlib.suppress(OSError):  # another user's, or another process removes it too
                if path.stat(follow_symlinks=False).st_uid == os.getuid() and (lock := _lock(path)) is not None:
                    shutil.rmtree(path, ignore_errors=True)
                    os.close(lock)


def _make(parent: Path, prefix: str) -> tuple[Path, int]:
    while True:
        path = parent / f"{prefix}{secrets.token_hex(8)}"
        path.mkdir(0o700)
        with contextlib.suppress(FileNotFoundError):  # swept before it was locked
            if (lock := _lock(path)) is not None:
                return path, lock


def _lock(path: Path) -> int | None:
    """The descriptor that holds the directory's lock; None: another process holds it. Raises OSError, also if it is
    gone."""
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
