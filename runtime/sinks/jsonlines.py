"""A file with one JSON object for each applied step."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import IO, TYPE_CHECKING

from elastic.errors import ConfigError
from runtime.session import StepRecord

if TYPE_CHECKING:
    from runtime.job import Job


_BEGIN = b'{"step": '


class JsonLines:
    """{"step", "epoch", "world_size", "lr": [...], "scalars": {name: value}} a line; "nan", "inf", "-inf" are strings.

    The file tells the next leader where it ended, so every worker must see it. A torn last line is cut off.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._file: IO[bytes] | None = None

    def __str__(self) -> str:
        return str(self._path)

    def open(self, job: Job) -> int:
        """Raises ConfigError if the file holds something else, OSError if it cannot be written."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        complete, next_step = self._read() if self._path.exists() else (0, 0)
        self._file = self._path.open("ab", buffering=0)
        self._file.truncate(complete)
        return next_step

    def _read(self) -> tuple[int, int]:
        """(bytes of complete lines, step after the last)."""
        complete, last, torn = 0, b"", b""
        with self._path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    complete, last = complete + len(line), line
                else:
                    torn = line
        try:
            if not torn.startswith(_BEGIN[: len(torn)]):
                raise ValueError("a torn line of something else")
            return complete, int(json.loads(last)["step"]) + 1 if last else 0
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self._path} ends with no line of a step; give job.log_to another file") from error

    def write(self, record: StepRecord) -> None:
        """A line is handed to the kernel at once. Raises OSError."""
        assert self._file is not None
        line = {
            "step": record.step,
            "epoch": record.epoch,
            "world_size": record.world_size,
            "lr": list(record.lr),
            "scalars": {name: _finite(value) for name, value in record.scalars.items()},
        }
        self._file.write(json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        """Nothing is left to be written."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
