"""How many bytes a worker has sent over its ring, counted where they leave."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from runtime.allreduce.ring.frames import SendQueue

_NUMBERS = struct.Struct("<qq")


class Sent:
    """Keeps `<directory>/<name>.sent`: steps so far, and bytes of this process's rings, their frames' headers too."""

    def __init__(self, directory: Path, name: str) -> None:
        self._file = os.open(directory / f"{name}.sent", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._steps = self._bytes = 0
        drop_sent = SendQueue.drop_sent

        def count(queue: SendQueue, sent: int) -> None:
            self._bytes += sent
            drop_sent(queue, sent)

        setattr(SendQueue, "drop_sent", count)  # noqa: B010 (mypy refuses the assignment)

    def write(self) -> None:
        """A step is over: one system call."""
        self._steps += 1
        os.pwrite(self._file, _NUMBERS.pack(self._steps, self._bytes), 0)


def read(directory: Path) -> dict[str, tuple[int, int]]:
    """(steps, bytes) by worker, so far."""
    return {path.stem: _NUMBERS.unpack(path.read_bytes()) for path in directory.glob("*.sent")}
