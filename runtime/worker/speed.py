"""How long a step of this job takes, to know how long the end of a newcomer's copy may be waited for; and how long this
worker takes for a shard, by which the leader gives out shards and finds stragglers."""

from __future__ import annotations

from collections import deque
from statistics import median

SPEED_STEPS = 16
"""A worker is as fast as in the median of so many steps: one that compiles, waits for a disk or shares its core with a
checkpoint for a few of them has not become slow."""

SPEED_STEPS_LEAST = 4
"""Before so many nothing is said."""


class ShardPace:
    """Told when each step begins, in seconds of one clock."""

    def __init__(self) -> None:
        self.step_s = 0.0
        """The shorter one of the last two steps, without waiting for copies: an evaluation or a checkpoint between two
        steps now and then does not count. 0: not known yet."""
        self._begun_s: float | None = None
        self._took_s = 0.0

    def begin(self, now_s: float) -> None:
        """A step begins."""
        before_s, self._took_s = self._took_s, now_s - self._begun_s if self._begun_s is not None else 0.0
        self.step_s, self._begun_s = min(before_s, self._took_s), now_s

    def waited(self, seconds: float) -> None:
        """In the step that is in progress, for the end of a copy."""
        if self._begun_s is not None:
            self._begun_s += seconds


class Speed:
    """Told when a shard is handed out and when its gradient is here, when all have come to the end of a pass and when
    it is reduced, in seconds of one clock. What happens in between does not count."""

    def __init__(self, *, on_host: bool = True) -> None:
        """on_host: where gradients are when they are here. A GPU goes on after the host was told that it has all it
        needs, so of gradients that stay there it is not known when they are done, and nothing is said."""
        self._on_host = on_host
        self.shard_us = 0
        """Microseconds for a shard, at least 1; 0: not known yet. Any thread may read it."""
        self.exchange_us = 0
        """The same for the reduction of a pass."""
        self._exchanges_s: deque[float] = deque(maxlen=SPEED_STEPS)
        self._gathered_s = 0.0
        self._exchanging_s = 0.0
        self._passes = 0
        self._means_s: deque[float] = deque(maxlen=SPEED_STEPS)
        self._handed_out_s: float | None = None
        self._busy_s = 0.0
        self._shards = 0

    def begin_step(self) -> None:
        """A step begins. Its mean counts, because its passes may differ in what a shard of them costs."""
        if self._shards:
            self._means_s.append(self._busy_s / self._shards)
            if len(self._means_s) >= SPEED_STEPS_LEAST:
                self.shard_us = max(1, round(1e6 * median(self._means_s)))
        if self._passes:
            self._exchanges_s.append(self._exchanging_s / self._passes)
            self.exchange_us = max(1, round(1e6 * median(self._exchanges_s)))
        self._busy_s, self._shards, self._handed_out_s = 0.0, 0, None
        self._exchanging_s, self._passes = 0.0, 0

    def handed_out(self, now_s: float) -> None:
        self._handed_out_s = now_s if self._on_host else None

    def gathered(self, now_s: float) -> None:
        """Nobody is waited for any more."""
        self._gathered_s = now_s

    def reduced(self, now_s: float) -> None:
        self._exchanging_s += now_s - self._gathered_s
        self._passes += 1

    def done(self, now_s: float) -> None:
        if self._handed_out_s is not None:
            self._busy_s += now_s - self._handed_out_s
            self._shards += 1
            self._handed_out_s = None
