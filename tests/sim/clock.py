"""Virtual time: one heap of things to happen, one seeded source of chance, and clocks that do not agree."""

from __future__ import annotations

import heapq
from collections import deque
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
        self._chance = self.random.random

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now_s + delay_s, next(self._ties), act))

    def at(self, moment_s: float, act: Callable[[], None]) -> None:
        """Exactly then: a difference to now and back may be rounded, and what has one moment would change places."""
        heapq.heappush(self._due, (moment_s, next(self._ties), act))

    def between(self, low_s: float, high_s: float) -> float:
        return low_s + (high_s - low_s) * self._chance()

    def chance(self, probability: float) -> bool:
        return self._chance() < probability

    def turn(self) -> bool:
        """Let one thing happen; False when nothing is left."""
        if not self._due:
            return False
        self.now_s, _, act = heapq.heappop(self._due)
        act()
        return True


class Timepiece:
    """The monotonic clock of one machine: it began at some time, and goes a little too fast or too slow."""

    def __init__(self, clock: Clock, begun_s: float, rate: float) -> None:
        self._clock, self._begun_s, self._rate = clock, begun_s, rate

    @property
    def now_s(self) -> float:
        return self._begun_s + self._rate * self._clock.now_s

    def until(self, moment_s: float) -> float:
        """How long it is, in truth, until this clock shows that."""
        return max(0.0, moment_s - self.now_s) / self._rate


class Lane:
    """Messages of one sender to one receiver, over TCP: in order, each delayed by chance. A lost packet holds up what
    is behind it, and so does a partition, until it is over or somebody closes the connection."""

    def __init__(self, clock: Clock, low_s: float, high_s: float, loss: float, is_blocked: Callable[[], bool]) -> None:
        """loss: how often a packet has to be sent again."""
        self.clock = clock
        self.low_s, self.high_s = low_s, high_s
        self._loss, self._is_blocked = loss, is_blocked
        self._last_s = 0.0
        self._cut = 0
        self._held: deque[Callable[[], None]] = deque()

    def send(self, deliver: Callable[[], None]) -> None:
        clock = self.clock
        delay_s = clock.between(self.low_s, self.high_s)
        if clock.chance(0.02):
            delay_s *= 20.0
        if self._loss and clock.chance(self._loss):
            delay_s += clock.between(0.2, 1.6)
        self._last_s = max(self._last_s, clock.now_s + delay_s)
        sent_before = self._cut
        clock.at(self._last_s, lambda: self._arrive(deliver) if sent_before == self._cut else None)

    def lose(self) -> None:
        """What is under way does not arrive."""
        self._cut += 1
        self._held.clear()

    def _arrive(self, deliver: Callable[[], None]) -> None:
        if not self._held and not self._is_blocked():
            deliver()
            return
        self._held.append(deliver)
        if len(self._held) == 1:
            self.clock.after(0.2, self._send_again)

    def _send_again(self) -> None:
        if not self._held:
            return
        if self._is_blocked():
            self.clock.after(0.2, self._send_again)
            return
        cut = self._cut
        while self._held and cut == self._cut:
            self._held.popleft()()
