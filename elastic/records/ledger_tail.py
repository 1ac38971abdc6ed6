"""A growing ledger: how far it is, and how fast it grows."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

RATE_WINDOW_S = 10.0
LONG_WINDOW_S = 300.0
"""The window for steps that take seconds."""
FEW_STEPS = 3
"""With fewer steps in the short window, the long window is used."""
MAX_READ = 4 * 2**20
"""Bytes of the ledger that are read at once, so that a long ledger does not hold up the display."""


class StepsTail:
    """Follows a ledger that another process writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._torn = b""
        self._window: deque[tuple[float, int, int]] = deque()
        self._idle: tuple[float, int, int] | None = None
        """The last poll before the first new step."""
        self.steps = 0
        self.samples = 0
        self.last: dict[str, Any] = {}

    def poll(self, now_s: float) -> None:
        """Take in what was written since the last call."""
        while data := self._read():
            *lines, self._torn = (self._torn + data).split(b"\n")
            for text in lines:
                self.last = json.loads(text)
                self.steps += 1
                self.samples += samples_of(self.last)
        self._window.append((now_s, self.steps, self.samples))
        if self._idle is None or self._idle[1] == self.steps:
            self._idle = self._window[-1]
        while len(self._window) > 2 and self._window[1][0] < now_s - LONG_WINDOW_S:
            self._window.popleft()

    @property
    def samples_per_s(self) -> float:
        """Samples per second over the last RATE_WINDOW_S seconds of polls."""
        (since_s, _, before), (now_s, _, after) = self._since(RATE_WINDOW_S), self._window[-1]
        return (after - before) / (now_s - since_s) if now_s > since_s else 0.0

    @property
    def steps_per_s(self) -> float:
        """Steps per second over the last RATE_WINDOW_S seconds, or LONG_WINDOW_S if few steps; 0: none yet."""
        now_s, after, _ = self._window[-1]
        since_s, before, _ = self._since(RATE_WINDOW_S)
        if after - before < FEW_STEPS:
            since_s, before, _ = self._since(LONG_WINDOW_S)
        return (after - before) / (now_s - since_s) if now_s > since_s else 0.0

    def _since(self, window_s: float) -> tuple[float, int, int]:
        """The poll at which that window begins. Time before the first new step is set-up, and not counted."""
        begun_s = self._window[-1][0] - window_s
        begins = max((poll for poll in self._window if poll[0] <= begun_s), default=self._window[0])
        return max(begins, self._idle or begins)

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(MAX_READ)
        except FileNotFoundError:
            return b""
        self._offset += len(data)
        return data


def samples_of(line: dict[str, Any]) -> int:
    """How many samples a step of the ledger has used."""
    return sum(_count(shard) for shard in line["samples"])


def _count(shard: object) -> int:
    if isinstance(shard, dict):
        count = shard.get("n", 0)  # not known for a stream's batch
        return count if isinstance(count, int) else 0
    return len(shard) if isinstance(shard, list) else 0
