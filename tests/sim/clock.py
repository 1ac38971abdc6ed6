"""Virtual time: one heap of things to happen, one seeded source of chance."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from random import Random


class Clock:
    """Runs what is due, in order of time; ties in order of arrival."""

    def __init__(self, seed: int) -> None:
        self.now_s = 0.0
        self.random = Random(seed)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._ties = count()

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now_s + delay_s, next(self._ties), act))

    def between(self, low_s: float, high_s: float) -> float:
        return self.random.uniform(low_s, high_s)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def turn(self) -> bool:
        """Let one thing happen; False when nothing is left."""
        if not self._due:
            return False
        self.now_s, _, act = heapq.heappop(self._due)
        act()
        return True


class Lane:
    """Messages of one sender to one receiver: in order, each delayed by chance."""

    def __init__(self, clock: Clock, low_s: float, high_s: float) -> None:
        self.clock = clock
        self.low_s, self.high_s = low_s, high_s
        self._last_s = 0.0
        self._cut = 0

    def send(self, deliver: Callable[[], None]) -> None:
        clock = self.clock
        slow = 20.0 if clock.chance(0.02) else 1.0
        self._last_s = max(self._last_s, clock.now_s + slow * clock.between(self.low_s, self.high_s))
        sent_before = self._cut
        clock.after(self._last_s - clock.now_s, lambda: deliver() if sent_before == self._cut else None)

    def lose(self) -> None:
        """What is under way does not arrive."""
        self._cut += 1
