"""Step records on their way from a worker to its agent: in order, bounded in memory, kept until acknowledged.

Adding never waits for the agent. Records that do not fit in memory go to a file and come back from it, in order, when
there is room. Records that are left when the worker ends stay in that file for the agent.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from elastic.process import file_modes

IN_MEMORY = 1024
"""Most records in memory, sent or not. At a millisecond per step they last through a second of the agent's silence."""

ON_THE_WAY = 64
"""Most records sent and not acknowledged, so that a word never queues behind thousands of them."""


class StepSpool:
    """A queue of records with numbers from 1. Any thread may call `add`, the sender's thread the rest."""

    def __init__(self, spill: Path, in_memory: int = IN_MEMORY) -> None:
        self._lock = threading.Lock()
        self._spill = spill
        self._limit = in_memory
        self._held: deque[tuple[int, str]] = deque()
        self._unsent = 0
        self._added = 0
        self._writing: IO[str] | None = None
        self._reading: IO[str] | None = None
        self._spilled = 0

    def add(self, line: str) -> None:
        """Add a record. line: one JSON document without line breaks. Raises OSError if disk and memory are full."""
        with self._lock:
            if self._spilled or len(self._held) >= self._limit:
                self._spill_out(line)
            else:
                self._hold(line)

    @property
    def has_next(self) -> bool:
        """Whether take() would give a record."""
        with self._lock:
            return self._may_take()

    def take(self) -> tuple[int, str] | None:
        """The next record to send and its number; None: there is none, or ON_THE_WAY records are unacknowledged."""
        with self._lock:
            if not self._may_take():
                return None
            self._unsent -= 1
            return self._held[-1 - self._unsent]

    def acknowledged(self, up_to: int) -> None:
        """Drop the records up to this number, which the agent has on file."""
        with self._lock:
            while self._held and self._held[0][0] <= up_to:
                self._held.popleft()
            self._unsent = min(self._unsent, len(self._held))
            while self._spilled and len(self._held) < self._limit:
                self._hold(self._read_back())

    def close(self) -> None:
        """Write all unacknowledged records to the file, or remove the file if there are none."""
        with self._lock:
            rest = [line for _, line in self._held] + [self._read_back() for _ in range(self._spilled)]
            self._held.clear()
            self._unsent = 0
            for file in (self._writing, self._reading):
                if file is not None:
                    file.close()
            self._writing = self._reading = None
            if rest:
                file_modes.make_directory(self._spill.parent)
                with open(self._spill, "w", encoding="utf-8", opener=file_modes.opener) as file:
                    file.writelines(f"{line}\n" for line in rest)
            else:
                self._spill.unlink(missing_ok=True)

    def _may_take(self) -> bool:
        return self._unsent > 0 and len(self._held) - self._unsent < ON_THE_WAY

    def _hold(self, line: str) -> None:
        self._added += 1
        self._unsent += 1
        self._held.append((self._added, line))

    def _spill_out(self, line: str) -> None:
        if self._writing is None:
            file_modes.make_directory(self._spill.parent)
            new = file_modes.opener(str(self._spill), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            self._writing = os.fdopen(new, "w", encoding="utf-8")
            self._reading = self._spill.open(encoding="utf-8")
        self._writing.write(line + "\n")
        self._writing.flush()
        self._spilled += 1

    def _read_back(self) -> str:
        assert self._reading is not None and self._writing is not None
        line = self._reading.readline()
        self._spilled -= 1
        if not self._spilled:
            self._writing.close()
            self._reading.close()
            self._writing = self._reading = None
            self._spill.unlink(missing_ok=True)
        return line.rstrip("\n")


def spill_path(job_dir: Path, worker_id: str) -> Path:
    return job_dir / "spill" / f"{worker_id}.jsonl"


def left_behind(path: Path) -> Iterator[bytes]:
    """The unparsed records of a worker that ended before they were acknowledged, without a torn last line."""
    if not path.exists():
        return
    for text in path.read_bytes().splitlines(keepends=True):
        if text.endswith(b"\n"):
            yield text
