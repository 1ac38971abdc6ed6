"""What the script's thread does and for how long: it tells a worker that hangs from one that works."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from elastic.protocol.messages import Doing

MEASURED = (Doing.SHARD, Doing.EVALUATION)
"""What recurs, so that its usual time is known."""

RECENT = 256
"""The number of recent ones whose longest is remembered: long shards, such as those of long sequences, recur."""

CPU_CHECK_S = 2.0
"""Seconds in one activity after which the use of processors is measured; nothing is decided earlier."""

PAUSE_S = 5.0
"""A process that has not run its beats for this many seconds was stopped or could not run: that time does not count."""

COMPUTES = 0.1
"""A process computes if it uses more than this share of one processor. Beats and the ring's threads use far less."""


@dataclass(frozen=True, slots=True)
class ActivitySeen:
    """An activity. what: in words. The other fields are as in elastic.protocol.messages.Progress, in seconds."""

    what: str
    doing: Doing
    for_s: float
    usual_s: float
    computes: bool


class Activity:
    """Written by the script's thread, read by the beat thread, both without a lock: each write is one assignment."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, used_s: Callable[[], float] | None = None) -> None:
        """clock: seconds. used_s: processor time used so far, in seconds; None: `cpu_s`."""
        self._clock = clock
        self._used_s = used_s or cpu_s
        self._now = ("", Doing.ELSEWHERE, clock())
        self._recent: dict[Doing, deque[float]] = {doing: deque(maxlen=RECENT) for doing in MEASURED}
        self._seen_s = self._from_s = clock()
        """When `see` was last called; and from when on time counts."""
        self._looked: tuple[float, float, float] | None = None
        """(beginning of the activity, time, processor time) of the first measurement in it."""

    def enter(self, what: str, doing: Doing) -> None:
        now_s = self._clock()
        _, before, since_s = self._now
        if before in MEASURED:
            self._recent[before].append(now_s - max(since_s, self._from_s))
        self._now = (what, doing, now_s)

    def again(self) -> None:
        """The present activity, once more from the beginning."""
        what, doing, _ = self._now
        self.enter(what, doing)

    def see(self) -> ActivitySeen:
        """The present activity. To be called several times a second. computes is true until it has been measured."""
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
        alike = self._recent[doing if doing in MEASURED else Doing.SHARD]
        return ActivitySeen(what, doing, now_s - since_s, max(tuple(alike), default=0.0), computes)


def cpu_s(pid: int = 0) -> float:
    """Processor time of a process and all below it, in seconds: a script may wait for a compiler or a data reader.
    pid: 0: this process."""
    # User and system time, also of children that have been waited for.
    ticks = sum(int(number) for process in below(pid or os.getpid()) for number in stat_of(process)[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def below(pid: int) -> Iterator[int]:
    """The pids of a process and of all that it and they have started, parents first."""
    yield pid
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:  # the process has ended
        return
    for thread in threads:
        try:
            children = Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
        except OSError:
            continue
        for child in children:
            yield from below(int(child))


def stat_of(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat behind the name; []: the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
