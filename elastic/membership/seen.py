"""Every worker as its latest words describe it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from elastic.messages import Doing, Member, RingState


@dataclass(frozen=True, slots=True)
class Seen:
    """A worker as its latest words describe it."""

    member: Member
    slot: int
    pid: int
    numerics: str
    entered: int = 0
    ring: RingState = RingState.NONE
    reduced: int = 0
    applied: int = 0
    phase: str = ""
    moved_s: float = 0.0
    """When its phase changed last."""
    worked_s: float = -math.inf
    """When it last said that it does something else than wait for others."""
    heard_s: float = -math.inf
    """When it last said where it stands."""
    heard_from_s: float = -math.inf
    """Since when it says so without a break of suspect_s."""
    doing: Doing = Doing.ELSEWHERE
    for_s: float = 0.0
    usual_s: float = 0.0
    computes: bool = True
    over: str = ""
    over_because: str = ""
    ready: bool = False
    invited: bool = False
    finished: bool = False
    left: bool = False
    refused: bool = False
    snapshot: str = ""
    """The newest whole one in its machine's memory when it started."""
    shard_us: int = 0
    """Microseconds that it takes for a shard; 0: not known yet."""
    exchange_us: int = 0
    """And for the reduction of a pass, once all are there."""


class Roster(dict[str, Seen]):
    """By worker. With nearly every word it is asked who has entered no generation yet, and whether anybody has entered
    a certain one; of thousands nobody can be looked at for that. Changed by item, and by `discard`."""

    def __init__(self, workers: Roster | None = None) -> None:
        super().__init__(workers if workers is not None else {})
        self.outside: set[str] = set(workers.outside) if workers is not None else set()
        """Who has entered none."""
        self._inside: Counter[int] = Counter(workers._inside) if workers is not None else Counter()

    def __setitem__(self, worker: str, seen: Seen) -> None:
        before = self.get(worker)
        if before is None or before.entered != seen.entered:
            self._leave(worker, before)
            if seen.entered:
                self._inside[seen.entered] += 1
            else:
                self.outside.add(worker)
        super().__setitem__(worker, seen)

    def __delitem__(self, worker: str) -> None:
        self._leave(worker, self.get(worker))
        super().__delitem__(worker)

    def discard(self, worker: str) -> None:
        """If it is there."""
        if worker in self:
            del self[worker]

    def has_entered(self, generation: int) -> bool:
        """Whether that is the last one that somebody here has entered."""
        return self._inside[generation] > 0

    def _leave(self, worker: str, before: Seen | None) -> None:
        if before is not None and before.entered:
            self._inside[before.entered] -= 1
        self.outside.discard(worker)
