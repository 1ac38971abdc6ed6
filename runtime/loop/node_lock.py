"""job.node_lock: one process of a machine at a time, for work that a machine needs once, such as a download.

The lock is a kernel lock on an open file, so it ends with the process that holds it.
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elastic.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@contextmanager
def node_lock(name: str) -> Iterator[None]:
    """Wait until no other process of this user and machine holds the lock of this name, then hold it.

    Raises ConfigError for a name that cannot be a file's, and if another user owns the directory of the locks.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"node_lock({name!r}): a name has up to 100 letters, digits, '.', '_' or '-' and starts with a letter or "
            "digit"
        )
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    # A child that is forked inside the block shares the lock, which ends with the last of them or the unlock.
    file = os.open(_directory() / name, flags, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
    finally:
        os.close(file)


def _directory() -> Path:
    """The directory of this user's locks, on this machine. A lock's file is never removed: processes that wait for it
    would then hold different locks."""
    path = Path(tempfile.gettempdir()) / f"elastic-locks-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if found.st_uid != os.getuid() or path.is_symlink() or found.st_mode & 0o022:
        raise ConfigError(f"node_lock: {path} is somebody else's or open to others; remove it, or set TMPDIR")
    return path
