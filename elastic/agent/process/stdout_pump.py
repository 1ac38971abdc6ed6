"""Lines on an agent's own standard output, whose reader may have stopped."""

from __future__ import annotations

import os
import queue
import threading

FORWARD_LINES = 10_000
"""Most lines of the leading worker that wait for a reader of the agent's stdout; later ones are in its log only."""


class Stdout:
    """Writes the leading worker's lines to the agent's stdout in a thread: a stopped reader must not stop the agent."""

    def __init__(self, descriptor: int = 1) -> None:
        self._descriptor = descriptor
        self._lines: queue.Queue[bytes | None] = queue.Queue(FORWARD_LINES)
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, name="stdout", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._dropped += 1

    def close(self, wait_s: float) -> int:
        """Write the waiting lines, for at most wait_s seconds. Returns the number of lines that were not written."""
        try:
            self._lines.put(None, timeout=wait_s)
        except queue.Full:
            return self._dropped + self._lines.qsize()
        self._thread.join(wait_s)
        return self._dropped + self._lines.qsize()

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                while line:
                    line = line[os.write(self._descriptor, line) :]
            except OSError:  # nobody reads, or a disk is full: the next line may find room
                self._dropped += 1
