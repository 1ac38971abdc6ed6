"""A file with one JSON object for each applied step."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import IO

from elastic.errors import ConfigError
from runtime.loop.hooks.leader_hooks import JobView
from runtime.session import StepRecord

_BEGIN = b'{"step": '


class JsonLines:
    """{"step", "epoch", "world_size", "lr": [...], "scalars": {name: value}} a line; "nan", "inf", "-inf" are strings.

    The file tells the next leader where it ended, so every worker must see the file. A torn last line is cut off.

    A leader that was frozen does not know at once that the job has gone on without it. So each write first checks that
    the file is as this leader left it. If it is not, the file's content counts, and no step is written twice. A line
    that still comes out of order is cut off by the next write, close or open.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._file: IO[bytes] | None = None
        self._size = 0
        """Bytes of the file, as this leader left it."""
        self._next = 0

    def __str__(self) -> str:
        return str(self._path)

    def open(self, job: JobView) -> int:
        """Raises ConfigError if the file holds anything else, OSError if it cannot be written."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = self._path.open("a+b", buffering=0)
        try:
            self._look(file)
        except BaseException:
            file.close()
            raise
        self._file = file
        return self._next

    def _look(self, file: IO[bytes]) -> None:
        """Find where the file ends, and cut off what does not belong to it."""
        while True:
            complete, seen, self._next = self._read(file)
            if os.fstat(file.fileno()).st_size == seen:  # else another process writes, and knows better
                if seen > complete:
                    file.truncate(complete)
                self._size = complete
                return

    def _read(self, file: IO[bytes]) -> tuple[int, int, int]:
        """(bytes of complete lines in order, bytes of the file, step after the last of these lines). The open file is
        read, because another file may be at its path by now."""
        complete, seen, next_step, torn = 0, 0, 0, b""
        in_order = True
        with open(file.fileno(), "rb", closefd=False) as lines:
            lines.seek(0)
            for line in lines:
                seen += len(line)
                if not line.endswith(b"\n"):
                    torn = line
                    continue
                step = self._step_of(line)
                in_order = in_order and step >= next_step
                if in_order:
                    complete, next_step = seen, step + 1
        if not torn.startswith(_BEGIN[: len(torn)]):
            raise self._other("a torn line of something else")
        return complete, seen, next_step

    def _step_of(self, line: bytes) -> int:
        try:
            if not line.startswith(_BEGIN):
                raise ValueError("a line of something else")
            return int(line[len(_BEGIN) : line.index(b",")])
        except ValueError as error:
            raise self._other(error) from error

    def _other(self, error: object) -> ConfigError:
        return ConfigError(f"{self._path} holds a line that is of no step ({error}); give job.log_to another file")

    def write(self, record: StepRecord) -> None:
        """Hand a line to the kernel at once. Raises OSError; ConfigError if the file holds anything else."""
        assert self._file is not None
        if os.fstat(self._file.fileno()).st_size != self._size:
            self._look(self._file)
        if record.step < self._next:
            return
        values = {
            "step": record.step,
            "epoch": record.epoch,
            "world_size": record.world_size,
            "lr": list(record.lr),
            "scalars": {name: _finite(value) for name, value in record.scalars.items()},
        }
        line = json.dumps(values).encode() + b"\n"
        while line:
            written = self._file.write(line)
            line, self._size = line[written:], self._size + written
        self._next = record.step + 1

    def close(self) -> None:
        """Cut off what is not in order, and close the file."""
        if self._file is not None:
            if os.fstat(self._file.fileno()).st_size != self._size:
                self._look(self._file)
            self._file.close()
            self._file = None


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
