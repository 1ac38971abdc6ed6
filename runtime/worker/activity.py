"""What the script's thread does and for how long, so that a worker that hangs is told from one that works."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from elastic.protocol.messages import Doing

RECENT = 256
"""So many shards back a long one is remembered: shards that are long by nature, such as those of long sequences,
come again and again."""

CPU_CHECK_S = 2.0
"""From when on it is measured whether processors are used: nothing is decided earlier."""

PAUSE_S = 5.0
"""Whoever beats and has not for so long was stopped, or could not run: that time is nobody's who is to be judged."""

COMPUTES = 0.1
"""A share of one processor. Beats and the ring's own threads take far less."""


@dataclass(frozen=True, slots=True)
class ActivitySeen:
    """what: in words; the rest as in elastic.protocol.messages.Progress, in seconds."""

    what: str
    doing: Doing
    for_s: float
    usual_s: float
    computes: bool


class Activity:
    """Written by the script's thread, read by the one that beats, both without a lock: each is one assignment."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, used_s: Callable[[], float] | None = None) -> None:
        """clock: seconds. used_s: processor time used so far, in seconds; None: `cpu_s`."""
        self._clock = clock
        self._used_s = used_s or cpu_s
        self._now = ("", Doing.ELSEWHERE, clock())
        self._shards: deque[float] = deque(maxlen=RECENT)
        self._seen_s = self._from_s = clock()
        """When it was looked at last; from when on it counts."""
        self._looked: tuple[float, float, float] | None = None
        """(begin of the activity, time, processor time) of the first look at it."""

    def enter(self, what: str, doing: Doing) -> None:
        now_s = self._clock()
        _, before, since_s = self._now
        if before is Doing.SHARD:
            self._shards.append(now_s - max(since_s, self._from_s))
        self._now = (what, doing, now_s)

    def see(self) -> ActivitySeen:
        """To be called several times a second. computes is true as long as nobody can say."""
        what, doing, since_s = self._now
        now_s = self._clock()
        if now_s - self._seen_s >= PAUSE_S:
            self._from_s = now_s
        self._seen_s = now_s
        since_s = max(since_s, self._from_s)
        computes = True
        if now_s - since_s >= CPU_CHECK_S:
            used_s = self._used_s()
            if self._looked is None or self._looked[0] != since_s:
                self._looked = (since_s, now_s, used_s)
            _, looked_s, used_then_s = self._looked
            if now_s - looked_s >= CPU_CHECK_S:
                computes = used_s - used_then_s >= COMPUTES * (now_s - looked_s)
        return ActivitySeen(what, doing, now_s - since_s, max(tuple(self._shards), default=0.0), computes)


def cpu_s() -> float:
    """Processor time of this process and those below it, in seconds: compilers and readers of data are children that a
    script waits for."""
    ticks = sum(_ticks(pid) for pid in _below(os.getpid()))
    return ticks / os.sysconf("SC_CLK_TCK")


def _below(pid: int) -> Iterator[int]:
    yield pid
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:  # it has ended
        return
    for thread in threads:
        try:
            children = Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
        except OSError:
            continue
        for child in children:
            yield from _below(int(child))


def _ticks(pid: int) -> int:
    """User and system time, with that of children that have been waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return 0
    return sum(map(int, fields[11:15]))
