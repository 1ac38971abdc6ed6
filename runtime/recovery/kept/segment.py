"""A segment: what one process keeps of one step, as a file in memory.

    header   what the segment is, its checksum, and a checksum of the header itself
    body     the bytes of tensors, each at a multiple of ALIGNED
    table    JSON: which tensors these are, and all other values

A writer first makes the header invalid, then writes body and table, and then the header: a process that is killed in
between leaves no segment. It has three files and writes into the one with the oldest step. The other two are whole: the
newest step of this process, and the one before, which is the newest of all when another process was killed first.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

from elastic.errors import CheckpointCorrupt
from runtime.recovery.kept.choice import HeldSegment, RoundNumber
from runtime.recovery.transfer.checksum import checksum
from runtime.script_end import TorchThread

BUFFERS = 3
ALIGNED = 64
HEADER_BYTES = 128
_MAGIC = b"elastic1"
_HEADER = struct.Struct("<8s9QI")
_OWN_SUM = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Header:
    """step, run, generation, group, part, parts, copies: as of HeldSegment. body, table: bytes. sum: of both."""

    step: int
    run: int
    generation: int
    group: int
    part: int
    parts: int
    copies: int
    body: int
    table: int
    sum: int

    def pack(self) -> bytes:
        said = _HEADER.pack(_MAGIC, *astuple(self))
        return (said + _OWN_SUM.pack(zlib.crc32(said))).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, raw: bytes) -> Self | None:
        """None: the header is invalid. Raises CheckpointCorrupt for one that nobody has written."""
        if len(raw) < HEADER_BYTES or not any(raw):
            return None
        magic, *fields = _HEADER.unpack_from(raw)
        (own,) = _OWN_SUM.unpack_from(raw, _HEADER.size)
        if magic != _MAGIC or zlib.crc32(raw[: _HEADER.size]) != own:
            raise CheckpointCorrupt("its header is not as it was written")
        return cls(*fields)

    @property
    def held(self) -> HeldSegment:
        number = RoundNumber(self.run, self.generation)
        return HeldSegment(self.step, number, self.group, self.part, self.parts, self.copies)


def read_header(path: Path) -> Header | None:
    """None: the file holds no segment now, or is gone. Raises CheckpointCorrupt."""
    try:
        with open(path, "rb") as file:
            return Header.unpack(file.read(HEADER_BYTES))
    except FileNotFoundError:
        return None


class Segment:
    """A segment that is read. Its bytes are those of the file as long as this object lives."""

    def __init__(self, path: Path, header: Header) -> None:
        """Raises OSError."""
        self.path = path
        self.header = header
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants memory that it may write
        self.body = memoryview(self._map)[HEADER_BYTES : HEADER_BYTES + header.body]
        self._table = memoryview(self._map)[HEADER_BYTES + header.body :][: header.table]

    def check(self) -> None:
        """Raise CheckpointCorrupt if a bit has changed since it was written."""
        found = checksum(self._table, checksum(self.body))
        if found != self.header.sum:
            raise CheckpointCorrupt(
                f"the checksum of its {self.header.body + self.header.table} bytes is {found:08x}, "
                f"and was {self.header.sum:08x}"
            )

    def table(self) -> Any:
        """The JSON of the table."""
        return json.loads(self.table_bytes())

    def table_bytes(self) -> bytes:
        return bytes(self._table)

    def read(self, at: int, size: int) -> memoryview:
        """A part of the body."""
        return self.body[at : at + size]


class SegmentFile:
    """One of the files of a writer. Raises OSError where there is no memory, and if the job's directory is gone."""

    def __init__(self, path: Path) -> None:
        self.step = -1
        """Of the segment that it holds; -1: none."""
        self.name = path.name
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._map: mmap.mmap | None = None
        self._reserved = 0

    @property
    def memory(self) -> mmap.mmap:
        """The map of the file, once a body was begun. If a later body needs a larger file, this is another object."""
        assert self._map is not None, "it has begun"
        return self._map

    def body(self, at: int, size: int) -> memoryview:
        """A part of the body that was begun last."""
        return memoryview(self.memory)[HEADER_BYTES + at : HEADER_BYTES + at + size]

    def begin(self, body: int) -> memoryview:
        """Make the header invalid. Returns the place for a body of so many bytes."""
        os.pwrite(self._file, bytes(HEADER_BYTES), 0)
        self.step = -1
        needed = HEADER_BYTES + body
        if self._map is None or needed > self._reserved:
            # Without the reservation a process that writes to the map when memory is full gets SIGBUS.
            os.posix_fallocate(self._file, 0, needed)
            self._map, self._reserved = mmap.mmap(self._file, needed), needed
        return self.body(0, body)

    def finish(
        self, held: HeldSegment, body: memoryview, table: bytes, wanted: int | None = None, *, summed: int | None = None
    ) -> Header:
        """Write the table and the header: from now on the file holds this segment. wanted: the checksum of a copy.
        summed: checksum(body), if it is known. Raises CheckpointCorrupt if it has not the one that is wanted."""
        for start in range(0, len(table), 1 << 30):
            os.pwrite(self._file, table[start : start + (1 << 30)], HEADER_BYTES + body.nbytes + start)
        total = checksum(memoryview(table), checksum(body) if summed is None else summed)
        if wanted not in (None, total):
            raise CheckpointCorrupt(f"the checksum of the copy is {total:08x}, and that of the segment {wanted:08x}")
        number = held.round
        header = Header(
            held.step,
            number.run,
            number.generation,
            held.group,
            held.part,
            held.parts,
            held.copies,
            body.nbytes,
            len(table),
            total,
        )
        os.pwrite(self._file, header.pack(), 0)
        self.step = held.step
        return header

    def close(self) -> None:
        os.close(self._file)


class CopyThread:
    """Makes one call behind the other, in a thread that lives as long as this object: to start a thread in each step,
    and to wait until it has begun, takes the script a third of a millisecond."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: TorchThread | None = None
        weakref.finalize(self, self._calls.put, None)  # also when the script ends

    def call(self, one: Callable[[], None]) -> None:
        """Have the thread make this call, which raises nothing."""
        if self._thread is None or not self._thread.is_alive():  # as in a process that was forked since
            self._thread = TorchThread(target=_call_all, args=(self._calls,), name="keep")
            self._thread.start()
        self._calls.put(one)


def _call_all(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    while (one := calls.get()) is not None:
        one()
        del one  # it holds tensors


class SegmentWriter:
    """Writes the segments of one part of a round. Used by one thread at a time. thread: where its user may do so."""

    def __init__(self, directory: Path, group: int, part: int) -> None:
        """directory: of the round; it is there. Raises OSError."""
        self._buffers = [SegmentFile(directory / f"{group}.{part}.{number}") for number in range(BUFFERS)]
        self.thread = CopyThread()

    def oldest(self) -> SegmentFile:
        """The file for the next segment."""
        return min(self._buffers, key=lambda buffer: buffer.step)

    def close(self) -> None:
        for buffer in self._buffers:
            buffer.close()


def segments_in(directory: Path) -> Iterator[Path]:
    """The files of segments in the directory of a round, in an order that all processes find; none if it is gone."""
    with _gone_is_empty():
        yield from sorted(path for path in directory.iterdir() if path.name.count(".") == 2)


@contextmanager
def _gone_is_empty() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        return


def aligned(size: int) -> int:
    """The next multiple of ALIGNED."""
    return -(-size // ALIGNED) * ALIGNED
