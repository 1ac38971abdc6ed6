"""The limits of each caller of a server: calls at once, and messages a second."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

WORDS_A_SECOND = 5000.0
"""Most messages a second of one caller, over all its calls. Honest callers send a few per worker; more would fill a
replica's core."""

BURST = 10000.0

CALLS_AT_ONCE = 2048
"""Most calls at once of one caller. A node has a stream of its own and one for each of its jobs, 1025 at most, and
twice that for a moment when it looks for another leader. Each costs a server some 45 kB."""

CALLERS_KEPT = 4096
"""How many callers without an open call are remembered."""


class CallRate:
    """A rate limit: so many messages a second, and `burst` at once after a rest."""

    def __init__(self, a_second: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._a_second, self._burst, self._clock = a_second, burst, clock
        self._left, self._at_s = burst, clock()

    def due_s(self) -> float:
        """Count a message. Returns the seconds to wait before it may pass."""
        self._refill()
        self._left -= 1
        return max(0.0, -self._left / self._a_second)

    def allows(self) -> bool:
        """Count a message if it may pass at once. Returns whether it may."""
        self._refill()
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def _refill(self) -> None:
        now_s = self._clock()
        self._left = min(self._burst, self._left + (now_s - self._at_s) * self._a_second)
        self._at_s = now_s


@dataclass(slots=True)
class CallerBudget:
    """The use of a server by one caller. calls: how many are open now."""

    pace: CallRate = field(default_factory=lambda: CallRate(WORDS_A_SECOND, BURST))
    calls: int = 0


class CallerLimits:
    """The limits of all callers, on the event loop."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, CallerBudget] = OrderedDict()

    @contextmanager
    def call(self, name: str) -> Iterator[CallerBudget | None]:
        """Count a call of this caller while the block lasts. Yields None if the caller has as many calls open as it
        may."""
        caller = self._known.setdefault(name, CallerBudget())
        self._known.move_to_end(name)
        if caller.calls >= CALLS_AT_ONCE:
            yield None
            return
        caller.calls += 1
        try:
            yield caller
        finally:
            caller.calls -= 1
            if not caller.calls and len(self._known) > CALLERS_KEPT:
                self._forget()

    def _forget(self) -> None:
        """Forget the callers that have been idle for longest."""
        idle = [name for name, caller in self._known.items() if not caller.calls]
        for name in idle[: len(self._known) - CALLERS_KEPT]:
            del self._known[name]
