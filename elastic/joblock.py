"""Who writes into a job directory: one agent at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from elastic import modes
from elastic.errors import ConfigError


class JobLock:
    """The job directory's lock: one agent writes its ledger. Held until the process ends."""

    def __init__(self, path: Path, otherwise: str) -> None:
        """otherwise: what to do if somebody holds it. Raises ConfigError then."""
        self._file = modes.opener(str(path), os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._file, 64, 0).decode(errors="replace").strip()
            os.close(self._file)
            raise ConfigError(f"{path.parent} is in use by a running agent ({holder}); {otherwise}") from None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"pid {os.getpid()}".encode(), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._file)
