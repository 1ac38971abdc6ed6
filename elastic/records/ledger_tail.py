"""A growing ledger: how far it is, and how fast it grows."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import Any

from elastic.records.job_follower import Growing, parsed_steps

RATE_WINDOW_S = 10.0
LONG_WINDOW_S = 300.0
"""The window for steps that take seconds."""
FEW_STEPS = 3
"""With fewer steps in the short window, the long window is used."""


LINE_BYTES = 1 << 20
"""How much of a ledger's end is read for its last line; a longer line names the samples of a huge batch."""


def last_step(path: Path) -> dict[str, Any]:
    """The last whole line of a ledger, by its end alone; {}: there is none."""
    try:
        with path.open("rb") as ledger:
            ledger.seek(max(0, ledger.seek(0, os.SEEK_END) - LINE_BYTES))
            lines = ledger.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return {}
    return next(iter(list(parsed_steps(lines[-1:]))), {})


class StepsTail:
    """Follows a ledger that another process writes."""

    def __init__(self, path: Path) -> None:
        self._lines = Growing(path, from_end=False)
        self._window: deque[tuple[float, int, int]] = deque()
        self._idle: tuple[float, int, int] | None = None
        """The last poll before the first new step."""
        self.steps = 0
        self.samples = 0
        self.last: dict[str, Any] = {}

    def poll(self, now_s: float) -> None:
        """Take in what was written since the last call."""
        for step in parsed_steps(self._lines.all_lines()):
            self.last = step
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


def samples_of(line: dict[str, Any]) -> int:
    """How many samples a step of the ledger has used."""
    return sum(_count(shard) for shard in line["samples"])


def _count(shard: object) -> int:
    if isinstance(shard, dict):
        count = shard.get("n", 0)  # not known for a stream's batch
        return count if isinstance(count, int) else 0
    return len(shard) if isinstance(shard, list) else 0
