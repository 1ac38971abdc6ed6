"""Lines on an agent's own standard output, which somebody may have stopped reading."""

from __future__ import annotations

import queue
import sys
import threading

FORWARD_LINES = 10_000
"""Lines of the leading worker waiting for a reader of our stdout; later ones are in its log only."""


class Stdout:
    """The leading worker's lines on our stdout, through a thread: a reader that stops must not stop the agent."""

    def __init__(self) -> None:
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
        """Write what waits, for at most that long. Returns the number of lines that did not get out."""
        try:
            self._lines.put(None, timeout=wait_s)
        except queue.Full:
            return self._dropped + self._lines.qsize()
        self._thread.join(wait_s)
        return self._dropped + self._lines.qsize()

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
            except (BrokenPipeError, ValueError):
                self._dropped += 1
