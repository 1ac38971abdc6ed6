"""Where a worker stands: operations, roots, generations and rings."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elastic.protocol.messages import Generation, Member, Report, RingState
from elastic.protocol.reduction_tree import Node


class Phase(StrEnum):
    FRESH = "fresh"
    """A newcomer without the state."""
    READY = "ready"
    """Between two operations: user code runs, parameters undefined, never a donor."""
    COLLECTING = "collecting"
    """Inside operation ``reduced``."""
    GONE = "gone"
    """Fenced, or drained and released."""


@dataclass(frozen=True, slots=True)
class WorkerState:
    me: str
    phase: Phase = Phase.READY
    reduced: int = 0
    """Operations whose complete result was obtained; the next operation has this number."""
    units: int = 0
    """How many units the operation in progress has; 0 when none is in progress."""
    joinable: bool = False
    """The operation in progress is the first pass of a step: newcomers may enter after it."""
    parts: bool = True
    """A generation without anybody may take effect after the operation in progress."""
    todo: tuple[int, ...] = ()
    running: int | None = None
    roots: tuple[Node, ...] = ()
    record: Generation | None = None
    """The generation entered; for a newcomer the latest one it was told of."""
    entered: int = 0
    ring: RingState = RingState.NONE
    built: tuple[int, ...] = ()
    """Pending generations whose ring is already up."""
    pending: tuple[Generation, ...] = ()
    promise: int = 0
    quiesced: bool = False
    report: Report | None = None
    """The last one; while quiesced nothing in it changes but `closed`."""
    closed: tuple[str, ...] = ()
    """Members that have closed their ends of the ring of the generation entered: see LinksClosed."""
    carry: tuple[int, ...] | None = None
    """The pending generations in this attempt's header; None until read."""
    laggard: str | None = None
    """Not None: the result of this operation exists; copy it from this worker, or compute alone if empty."""
    kept: int = -1
    effect: tuple[int, int] = (-1, 0)
    """The last operation after which a planned generation took effect here, and that generation."""
    owed: int = -1
    """The last operation after which newcomers came in, which ask for its result."""
    copied: int = -1
    copied_step: int = -1
    copying: tuple[str, ...] = ()
    holders: tuple[str, ...] = ()
    """Newcomers that hold the complete state of the operation in progress (donor's view)."""
    lingered: bool = False
    leaving: int = 0
    """A planned generation without this worker took effect; waiting for acknowledgements."""
    because: str = ""

    @property
    def donor(self) -> bool:
        return self.record is not None and self.entered > 0 and self.record.ids[0] == self.me

    @property
    def acquaintances(self) -> tuple[str, ...]:
        """Everybody a newcomer may ask for the state or for what became of an operation, newest lists first.

        A pending generation can take effect and be followed by one without its donor before the newcomer knows, so
        no single list is enough.
        """
        known = [*sorted(self.pending, key=lambda g: -g.number), *([self.record] if self.record else [])]
        return tuple(dict.fromkeys(worker for g in known for worker in g.ids if worker != self.me))

    def known(self, worker_id: str) -> Member | None:
        """The address of a member or acquaintance."""
        lists = (*self.pending, *([self.record] if self.record else []))
        return next((member for g in lists if (member := g.member(worker_id))), None)

    @property
    def newest_pending(self) -> Generation | None:
        """Apart from early ones."""
        pending = (generation for generation in self.pending if not generation.early)
        return max(pending, key=lambda generation: generation.number, default=None)
