"""Who may read what a job writes: its owner. ELASTIC_UMASK, octal as of umask(1), leaves others more, for example 027
the group's reading; the umask of the process counts besides. What is there already keeps its mode.

Files that hold a job's settings are SETTINGS whatever it says: they have its environment.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from elastic.errors import ConfigError

UMASK_VARIABLE = "ELASTIC_UMASK"
SETTINGS = 0o600


def mask() -> int:
    """What others may not. Raises ConfigError for a value that is no mask."""
    text = os.environ.get(UMASK_VARIABLE, "077")
    try:
        value = int(text, 8)
        if not 0 <= value <= 0o777 or not text.isdigit():
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"{UMASK_VARIABLE}={text!r:.40} must be an octal mask, such as 027; the default is 077"
        ) from None
    return value


def of_file() -> int:
    """The mode of a new file."""
    return 0o666 & ~mask()


def of_directory() -> int:
    """The mode of a new directory."""
    return 0o777 & ~mask()


def opener(path: str, flags: int) -> int:
    """For open(): a new file has this module's mode."""
    return os.open(path, flags | os.O_CLOEXEC, of_file())


def regular(path: str, flags: int) -> int:
    """As `opener`, in a directory of somebody else, who may have put another thing there: a FIFO would be waited for.
    Raises OSError."""
    descriptor = opener(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "this is no file", path)
    os.set_blocking(descriptor, True)
    return descriptor


def make_directory(path: Path | str) -> None:
    """With its parents, unless it is there. Raises OSError."""
    path = Path(path)
    if path.is_dir():
        return
    if path.parent != path:
        make_directory(path.parent)
    path.mkdir(of_directory(), exist_ok=True)
