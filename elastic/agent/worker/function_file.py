"""The function on its way to the workers, and its value on the way back: pickles in a directory of this user's own.

`elastic.launch`, and the drivers of engines, whose tasks write such a file on each node.

A user who can write a pickle can run code where it is read. So the files are in a directory of mode 0700, have mode
0600, and are read only if they belong to this user and nobody else can write them; nothing comes from a network.
cloudpickle writes them, because what is defined in a notebook is in no module that a worker could import.
"""

from __future__ import annotations

import linecache
import os
import pickle
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from elastic.errors import ConfigError

FUNCTION = "function"
VARIABLE = "ELASTIC_FUNCTION"
"""The environment variable with the path of the function's file, for the workers that call it."""
VALUE = "value."
"""Followed by the rank of the worker that has returned it."""


def check_installed(call: str, extra: str) -> None:
    """Raises ConfigError without cloudpickle."""
    try:
        import cloudpickle  # noqa: F401
    except ImportError:
        raise ConfigError(f"{call} needs cloudpickle, of an extra: pip install 'elastic-ring[{extra}]'") from None


def write_function(directory: Path, function: Callable[..., Any], arguments: Sequence[Any]) -> Path:
    """Also where this process finds modules, and the source of cells, for tracebacks. Raises ConfigError for what
    cannot be pickled."""
    cells = {name: entry for name, entry in linecache.cache.items() if len(entry) > 1 and not os.path.exists(name)}
    path = directory / FUNCTION
    _write(path, {"path": sys.path, "cells": cells}, (function, tuple(arguments)))
    return path


def read_function(path: Path) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Makes what the function imports importable here. Raises ConfigError for a file that others could have written."""
    with _opened(path) as file:
        about = pickle.load(file)
        sys.path += [entry for entry in about["path"] if entry not in sys.path]
        linecache.cache.update(about["cells"])
        function, arguments = pickle.load(file)
    return function, arguments


def write_value(directory: Path, rank: int, value: object) -> None:
    """Raises ConfigError for what cannot be pickled."""
    _write(directory / f"{VALUE}{rank}", value)


def read_values(directory: Path) -> list[Any]:
    """What the function has returned on each rank that has returned, by rank: one can end between the last step and the
    return. Raises ConfigError if none has."""
    found = sorted(directory.glob(f"{VALUE}*"), key=lambda path: int(path.name.removeprefix(VALUE)))
    if not found:
        raise ConfigError("the job is complete, and no worker has returned from the function; its log says why")
    read = []
    for path in found:
        with _opened(path) as file:
            read.append(pickle.load(file))
    return read


def values(directory: Path) -> dict[int, bytes]:
    """Rank -> its value, as it is in its file."""
    return {int(path.name.removeprefix(VALUE)): path.read_bytes() for path in directory.glob(f"{VALUE}*[0-9]")}


def keep_value(directory: Path, rank: int, content: bytes) -> None:
    """Keep a rank's value, which `values` gave on another machine, for `read_values` here."""
    (directory / f"{VALUE}{rank}").touch(0o600)
    (directory / f"{VALUE}{rank}").write_bytes(content)


def _write(path: Path, *objects: object) -> None:
    import cloudpickle

    temporary = path.with_name(f"tmp.{path.name}.{os.getpid()}")  # stays if the worker is killed, and is no value
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            for each in objects:
                file.write(cloudpickle.dumps(each))
        temporary.rename(path)
    except OSError:
        raise
    except Exception as error:  # each class has its own way to refuse: multiprocessing's locks raise RuntimeError
        temporary.unlink()
        what = "the function, or something that it uses," if path.name == FUNCTION else "the value of the function"
        raise ConfigError(
            f"{what} cannot be pickled: {error}; open files, locks and connections where they are used"
        ) from error


def _opened(path: Path) -> IO[bytes]:
    """Raises ConfigError unless the file is this user's, and nobody else can write it or replace it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    for status, what in ((os.fstat(descriptor), path), (os.stat(path.parent), path.parent)):
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            os.close(descriptor)
            raise ConfigError(f"{what} may be somebody else's; only what this user alone can write is unpickled")
    return open(descriptor, "rb")
