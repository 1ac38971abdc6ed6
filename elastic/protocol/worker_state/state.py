"""Where a worker stands: operations, roots, generations and rings."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elastic.protocol.messages import Generation, Member, Report, RingState
from elastic.protocol.reduction_tree import Node


class Phase(StrEnum):
    FRESH = "fresh"
    """The worker is a newcomer without the state."""
    READY = "ready"
    """The worker is between two operations: user code runs, parameters are undefined, and it cannot be a donor."""
    COLLECTING = "collecting"
    """The worker is inside operation ``reduced``."""
    GONE = "gone"
    """The worker was fenced, or drained and released."""


@dataclass(frozen=True, slots=True)
class WorkerState:
    me: str
    phase: Phase = Phase.READY
    reduced: int = 0
    """Number of operations whose complete result was obtained; the next operation has this number."""
    joined_at: int = -1
    """The value of `reduced` with which this worker became a member of a job that trained. -1: it is no member yet, or
    began with the job."""
    units: int = 0
    """How many units the operation in progress has; 0 when none is in progress."""
    joinable: bool = False
    """Whether the operation in progress is the first pass of a step: newcomers may enter after it."""
    parts: bool = True
    """Whether a generation without members may take effect after the operation in progress."""
    todo: tuple[int, ...] = ()
    running: int | None = None
    roots: tuple[Node, ...] = ()
    record: Generation | None = None
    """The generation entered; for a newcomer the latest one that it was told of."""
    entered: int = 0
    ring: RingState = RingState.NONE
    built: tuple[int, ...] = ()
    """Pending generations whose ring is already up."""
    pending: tuple[Generation, ...] = ()
    promise: int = 0
    quiesced: bool = False
    report: Report | None = None
    """The last report; while quiesced only its field `closed` changes."""
    closed: tuple[str, ...] = ()
    """Members that have closed their ends of the entered generation's ring: see LinksClosed."""
    carry: tuple[int, ...] | None = None
    """The pending generations in this attempt's header; None until the header is read."""
    laggard: str | None = None
    """Not None: the result of this operation exists. Copy it from this worker, or, if "", compute it alone."""
    kept: int = -1
    effect: tuple[int, int] = (-1, 0)
    """The last operation after which a planned generation took effect here, and that generation."""
    owed: int = -1
    """The last operation after which newcomers came in; they ask for its result."""
    copied: int = -1
    copied_step: int = -1
    copying: tuple[str, ...] = ()
    holders: tuple[str, ...] = ()
    """For the donor: newcomers that hold the complete state of the operation in progress."""
    lingered: bool = False
    leaving: int = 0
    """The planned generation that took effect without this worker, which waits for acknowledgements; 0: none."""
    because: str = ""

    @property
    def donor(self) -> bool:
        return self.record is not None and self.entered > 0 and self.record.ids[0] == self.me

    @property
    def newcomer(self) -> bool:
        """Whether this worker came to a job that trains, and has completed no operation with the others."""
        return self.phase is Phase.FRESH or self.reduced == self.joined_at

    @property
    def acquaintances(self) -> tuple[str, ...]:
        """All workers that a newcomer may ask for the state or for the outcome of an operation, newest lists first.

        One list is not enough: a pending generation can take effect and be followed by one without its donor.
        """
        known = [*sorted(self.pending, key=lambda g: -g.number), *([self.record] if self.record else [])]
        return tuple(dict.fromkeys(worker for g in known for worker in g.ids if worker != self.me))

    def known(self, worker_id: str) -> Member | None:
        """The address of a member or acquaintance."""
        lists = (*self.pending, *([self.record] if self.record else []))
        return next((member for g in lists if (member := g.member(worker_id))), None)

    @property
    def newest_pending(self) -> Generation | None:
        """The newest pending generation that is not early."""
        pending = (generation for generation in self.pending if not generation.early)
        return max(pending, key=lambda generation: generation.number, default=None)
