"""How long a step takes, which limits the wait for the end of a newcomer's copy; and how long this worker takes for a
shard, by which the leader gives out shards and finds stragglers."""

from __future__ import annotations

from collections import deque
from statistics import median

SPEED_STEPS = 16
"""A worker's speed is the median over this many steps: a few steps in which it compiles, waits for a disk or shares its
core with a checkpoint do not make it slow."""

SPEED_STEPS_LEAST = 4
"""With fewer steps the speed is not known."""


class ShardPace:
    """Measures the time of steps. It is told when each step begins, in seconds of one clock."""

    def __init__(self) -> None:
        self.step_s = 0.0
        """The shorter of the last two steps, in seconds, without waits for copies: so an occasional evaluation or
        checkpoint between two steps does not count. 0: not known yet."""
        self._begun_s: float | None = None
        self._took_s = 0.0

    def begin(self, now_s: float) -> None:
        """A step begins."""
        before_s, self._took_s = self._took_s, now_s - self._begun_s if self._begun_s is not None else 0.0
        self.step_s, self._begun_s = min(before_s, self._took_s), now_s

    def waited(self, seconds: float) -> None:
        """Note seconds of the step in progress that were spent on the wait for a copy."""
        if self._begun_s is not None:
            self._begun_s += seconds


class Speed:
    """Measures shards and reductions. It is told when a shard is handed out and when its gradient is here, when all
    members have come to the end of a pass and when it is reduced, in seconds of one clock."""

    def __init__(self, *, on_host: bool = True) -> None:
        """on_host: whether gradients are in host memory. A GPU goes on after the host has queued its work, so it is not
        known when gradients that stay there are done, and shards are not measured."""
        self._on_host = on_host
        self.shard_us = 0
        """Microseconds for a shard, at least 1; 0: not known yet. Any thread may read it."""
        self.exchange_us = 0
        """Microseconds for the reduction of a pass, at least 1; 0: not known yet. Any thread may read it."""
        self._exchanges_s: deque[float] = deque(maxlen=SPEED_STEPS)
        self._gathered_s = 0.0
        self._overlaps = False
        """Whether the reduction in progress counts from `rest_left` on."""
        self._exchanging_s = 0.0
        self._passes = 0
        self._means_s: deque[float] = deque(maxlen=SPEED_STEPS)
        self._handed_out_s: float | None = None
        self._busy_s = 0.0
        self._shards = 0

    def begin_step(self) -> None:
        """A step begins. The mean of the last one counts, because its passes may differ in the cost of a shard."""
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

    def rest_left(self, now_s: float) -> None:
        """This member sends the rest of a pass, of which much is summed before all members say that they are there. So
        the reduction counts from here, and is as long as it says for the last member to come only."""
        self._gathered_s, self._overlaps = now_s, True

    def gathered(self, now_s: float) -> None:
        """All members have come to the end of the pass."""
        if not self._overlaps:
            self._gathered_s = now_s

    def broken(self) -> None:
        """The reduction was broken off."""
        self._overlaps = False

    def reduced(self, now_s: float) -> None:
        self._exchanging_s += now_s - self._gathered_s
        self._passes += 1
        self._overlaps = False

    def done(self, now_s: float) -> None:
        if self._handed_out_s is not None:
            self._busy_s += now_s - self._handed_out_s
            self._shards += 1
            self._handed_out_s = None
