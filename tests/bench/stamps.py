"""What every measured training script writes, the same for all contenders: one stamp for each step it has applied.

Some also write down each shard that they begin to compute. The times are CLOCK_MONOTONIC of the machine, so stamps of
all processes can be compared.
"""

from __future__ import annotations

import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_RECORD = struct.Struct("<qqqqqd")
_SHARD = struct.Struct("<qq")


@dataclass(frozen=True, slots=True)
class Stamp:
    """t_ns: after optimizer.step(). began, group: generation of the member list, or restarts so far, when the step
    began and at t_ns. world: members when it began. loss: mean over the micro-batches this worker knows of.
    """

    t_ns: int
    step: int
    began: int
    group: int
    world: int
    loss: float


class Stamps:
    """Appends to `<directory>/<name>.stamps`: one system call of 48 bytes a step."""

    def __init__(self, directory: Path, name: str) -> None:
        self._file = os.open(directory / f"{name}.stamps", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, step: int, began: int, group: int, world: int, loss: float) -> None:
        os.write(self._file, _RECORD.pack(time.monotonic_ns(), step, began, group, world, loss))


def read(directory: Path) -> dict[str, list[Stamp]]:
    """Stamps so far by worker, in order. A record torn by a kill is left out."""
    found = {}
    for path in sorted(directory.glob("*.stamps")):
        data = path.read_bytes()
        whole = len(data) - len(data) % _RECORD.size
        found[path.stem] = [Stamp(*fields) for fields in _RECORD.iter_unpack(data[:whole])]
    return found


class Shards:
    """Appends to `<directory>/<name>.shards`."""

    def __init__(self, directory: Path, name: str) -> None:
        self._file = os.open(directory / f"{name}.shards", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, step: int, shard: int) -> None:
        os.write(self._file, _SHARD.pack(step, shard))


def read_shards(directory: Path) -> dict[str, list[tuple[int, int]]]:
    """(step, shard) of each shard that a worker has begun, by worker, in order; rehearsals too."""
    found = {}
    for path in sorted(directory.glob("*.shards")):
        data = path.read_bytes()
        whole = len(data) - len(data) % _SHARD.size
        found[path.stem] = [(step, shard) for step, shard in _SHARD.iter_unpack(data[:whole])]
    return found
