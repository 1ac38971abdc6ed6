"""What each worker did last: a file of fixed size for each worker, `flight/<worker_id>.ring` in the job's directory.

The worker writes into memory that it shares with the file, so a note costs no system call, and the kernel keeps what
was written when the worker is killed. It is lost with the machine. The file has a header of 64 bytes and RECORDS places
of 96 bytes, used in turns; a place holds the number of its note in its last 8 bytes, which are written last.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from elastic.process import file_modes

RECORDS = 4096
"""Some 8 notes a step and worker, so 500 steps."""
KEPT = 3
"""Files of a slot: of its present worker, and of those before it."""
_MAGIC = b"elastic flight 1"
_HEADER = struct.Struct("<16sqqq24x")  # magic, pid, CLOCK_REALTIME - CLOCK_MONOTONIC in ns, records
_NOTE = struct.Struct("<QqiiB63s")  # t_ns, operation, generation, unit, event, text
_NUMBER = struct.Struct("<Q")
_PLACE = _NOTE.size + _NUMBER.size


class FlightEvent(IntEnum):
    """What a note is about. The operation is the one that the worker takes part in next."""

    DECLARED = 1
    """The script does something outside of operations, for example its set-up."""
    BEGUN = 2
    """The operation has begun."""
    COMPUTES = 3
    """A unit, for example a shard, was handed out."""
    COMPUTED = 4
    """The worker's units are computed so far."""
    WAITS = 5
    """The worker's part is done, and it waits for the other members."""
    GATHERED = 6
    """All members have come; the sums are exchanged."""
    REDUCED = 7
    """The sums are there."""
    DONE = 8
    """The operation is complete, and the script goes on."""
    BROKEN = 9
    """The ring was left before the operation was complete."""


@dataclass(frozen=True, slots=True)
class FlightNote:
    """t_ns: CLOCK_MONOTONIC. operation: its number in the job, from 0. unit: -1 where the note is about none."""

    number: int
    t_ns: int
    generation: int
    operation: int
    unit: int
    event: FlightEvent
    text: str


@dataclass(frozen=True, slots=True)
class Flight:
    """The notes of one worker, oldest first. offset_ns: to be added to t_ns for the time since 1970."""

    worker_id: str
    pid: int
    offset_ns: int
    notes: tuple[FlightNote, ...]


def path_of(job_dir: Path, worker_id: str) -> Path:
    return job_dir / "flight" / f"{worker_id}.ring"


class FlightRecorder:
    """The writer. Any thread may call `note`."""

    def __init__(self, job_dir: Path, worker_id: str, where: Callable[[], tuple[int, int]]) -> None:
        """where: the worker's generation and the number of its next operation. Raises OSError, for example if the disk
        is full."""
        directory = job_dir / "flight"
        file_modes.make_directory(directory)
        self._where = where
        self._lock = threading.Lock()
        self._number = 0
        size = _HEADER.size + RECORDS * _PLACE
        file = file_modes.opener(str(path_of(job_dir, worker_id)), os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            os.posix_fallocate(file, 0, size)  # a page that cannot be had later would end the process (SIGBUS)
            self._memory = mmap.mmap(file, size)
        finally:
            os.close(file)
        offset_ns = time.time_ns() - time.monotonic_ns()
        _HEADER.pack_into(self._memory, 0, _MAGIC, os.getpid(), offset_ns, RECORDS)
        _forget_old(directory, worker_id)

    def note(self, event: FlightEvent, text: str = "", unit: int = -1) -> None:
        """text: at most 63 bytes are kept."""
        generation, operation = self._where()
        with self._lock:
            self._number += 1
            place = _HEADER.size + (self._number - 1) % RECORDS * _PLACE
            now_ns = time.monotonic_ns()
            _NOTE.pack_into(self._memory, place, now_ns, operation, generation, unit, event, text.encode()[:63])
            _NUMBER.pack_into(self._memory, place + _NOTE.size, self._number)


def _forget_old(directory: Path, worker_id: str) -> None:
    slot = worker_id.rpartition(".")[0]
    of_slot = [path for path in directory.glob(f"{slot}.*.ring") if path.stem[len(slot) + 1 :].isdecimal()]
    for path in sorted(of_slot, key=lambda path: int(path.stem[len(slot) + 1 :]))[:-KEPT]:
        with suppress(OSError):
            path.unlink()


def read(path: Path) -> Flight | None:
    """The notes of one file; None if it is no such file. Notes that a kill has torn are left out."""
    data = path.read_bytes()
    if len(data) < _HEADER.size or not data.startswith(_MAGIC):
        return None
    _, pid, offset_ns, places = _HEADER.unpack_from(data)
    found = []
    for place in range(min(places, (len(data) - _HEADER.size) // _PLACE)):
        at = _HEADER.size + place * _PLACE
        (number,) = _NUMBER.unpack_from(data, at + _NOTE.size)
        t_ns, operation, generation, unit, event, text = _NOTE.unpack_from(data, at)
        if number and (number - 1) % places == place and event in FlightEvent.__members__.values():
            words = text.rstrip(b"\0").decode(errors="replace")
            found.append(FlightNote(number, t_ns, generation, operation, unit, FlightEvent(event), words))
    found.sort(key=lambda note: note.number)
    return Flight(path.stem, pid, offset_ns, tuple(found))


def last(job_dir: Path, worker_id: str) -> FlightNote | None:
    """The last note of a worker; None: it is not known."""
    with suppress(OSError):
        flight = read(path_of(job_dir, worker_id))
        return flight.notes[-1] if flight is not None and flight.notes else None
    return None


def read_all(job_dir: Path) -> list[Flight]:
    """The flights of all workers whose files are in a job's directory, by worker id."""
    return [flight for path in sorted((job_dir / "flight").glob("*.ring")) if (flight := read(path)) is not None]
