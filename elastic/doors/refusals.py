"""Who was turned away and why, as lines of the journal: at once, and then now and then how often."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elastic.doors.callers import Pace
from elastic.journal import Journal

AGAIN_S = 10.0
"""Before the same is said again, with how often it was so meanwhile."""

KINDS_KEPT = 256

LINES_A_SECOND = 10.0
LINES_AT_ONCE = 200.0
"""Of all kinds together: whoever has many names, or words, does not have the disk for that."""


@dataclass(slots=True)
class _Kind:
    next_s: float
    unsaid: int = 0


class Refusals:
    """From any thread. Whoever knocks may do so ten thousand times a second; the disk is not his."""

    def __init__(self, journal: Journal, clock: Callable[[], float] = time.monotonic) -> None:
        self._journal = journal
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: OrderedDict[tuple[str, ...], _Kind] = OrderedDict()
        self._pace = Pace(LINES_A_SECOND, LINES_AT_ONCE, clock)

    def say(
        self, because: str, *, at: str, caller: str = "", peer: str = "", event: str = "refused", job: str = ""
    ) -> None:
        """A line `event`. at: what he came for. caller: as his certificate says; peer: his address, where known. job:
        where he came for one."""
        now_s, key = self._clock(), (event, because, at, caller, peer.rpartition(":")[0], job)
        with self._lock:
            kind = self._kinds.setdefault(key, _Kind(now_s))
            self._kinds.move_to_end(key)
            if len(self._kinds) > KINDS_KEPT:
                self._kinds.popitem(last=False)
            if now_s < kind.next_s or not self._pace.allows():
                kind.unsaid += 1
                return
            times, kind.next_s, kind.unsaid = kind.unsaid + 1, now_s + AGAIN_S, 0
        about: dict[str, Any] = {"job": job} if job else {}  # a worker's journal names its own
        self._journal.write(event, because=because, at=at, caller=caller, peer=peer, times=times, **about)
