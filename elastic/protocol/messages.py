"""The words that travel between workers, agents and the leader, as frozen values.

A *word* goes up (worker -> agent -> leader) and carries the generation it speaks of; an old word is ignored.
An *order* comes down and carries the term of the leader that gave it; an order of an older term is refused.
codec.py is the only translator between these and the wire.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeAlias

from elastic.protocol.reduction_tree import Node


class Kind(StrEnum):
    """Why a generation exists."""

    FORM = "form"
    LOSS = "loss"
    PLANNED = "planned"


@dataclass(frozen=True, slots=True)
class Member:
    """A worker as its ring peers need to know it. Older seniority is a smaller number; ranks follow it."""

    worker_id: str
    node: str
    host: str
    port: int
    seniority: int


@dataclass(frozen=True, slots=True)
class Share:
    """What one member contributes to the redone operation: roots it keeps, units it (still) computes."""

    worker_id: str
    keep: tuple[Node, ...]
    units: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Laggard:
    """A member without the result of operation ``Plan.op - 1``: copies it from source, or, if source is empty,
    computes all its units alone."""

    worker_id: str
    source: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What a generation does first. units == 0: nobody had begun op, default ownership holds.

    paces: how long each member takes for a unit, in microseconds and in rank order, 0 where that is not known; default
    ownership follows them. Empty: all own equally much.
    all_tasks: digest of everybody's shares and laggards, where those of one node's workers are all that is here.
    """

    op: int = 0
    units: int = 0
    shares: tuple[Share, ...] = ()
    laggards: tuple[Laggard, ...] = ()
    newcomers: tuple[str, ...] = ()
    paces: tuple[int, ...] = ()
    all_tasks: str = ""

    @property
    def tasks_digest(self) -> str:
        """The digest of what single members have to do; empty if nobody has anything."""
        if self.all_tasks or not (self.shares or self.laggards):
            return self.all_tasks
        shares = [(share.worker_id, share.keep, share.units) for share in self.shares]
        return _digest(shares, [(laggard.worker_id, laggard.source) for laggard in self.laggards])

    def share_of(self, worker_id: str) -> Share | None:
        return next((share for share in self.shares if share.worker_id == worker_id), None)

    def source_of(self, worker_id: str) -> str | None:
        """None: not a laggard. Empty: compute alone."""
        return next((lag.source for lag in self.laggards if lag.worker_id == worker_id), None)


ANEW = "anew."


@dataclass(frozen=True)
class Generation:
    """One committed member list with its whole plan; immutable. members are in rank order.

    base: number of the last loss (or form) generation; a planned generation is void once base moves on.
    hold: below quorum: finish operation plan.op, then wait.
    early: written down only for those who drain, so that they need not wait for who joins in the next one; it is never
    what the job is to be (worker_state/pending.py).
    token: proof for ring and copy connections of this generation.
    began: the snapshot or checkpoint from which the last form generation went on, if that was not the job's first: its
    members become that state, and whoever joins later copies it from them. "": there was none. Of a run that begins
    once more, because all members died before a step was applied: ANEW and the number of that form generation.
    """

    number: int
    kind: Kind
    base: int
    members: tuple[Member, ...]
    plan: Plan
    because: str
    hold: bool = False
    token: str = ""
    early: bool = False
    began: str = ""

    @property
    def entry(self) -> str:
        """The snapshot or checkpoint of `began`; "": what the run began with."""
        return "" if self.began.startswith(ANEW) else self.began

    # Kept, because a leader of thousands asks with every word that it hears.

    @cached_property
    def ids(self) -> tuple[str, ...]:
        return tuple(member.worker_id for member in self.members)

    @cached_property
    def _by_id(self) -> dict[str, Member]:
        return {member.worker_id: member for member in self.members}

    def member(self, worker_id: str) -> Member | None:
        return self._by_id.get(worker_id)

    def digest(self) -> str:
        """Hash of the whole record, also of one that holds the tasks of few: peers compare it before any data flows."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        plan = self.plan
        head = {name: getattr(self, name) for name in _names(Generation) if name not in ("members", "plan")}
        members = [*map(attrgetter(*_names(Member)), self.members)]
        return _digest(head, members, plan.op, plan.units, plan.newcomers, plan.paces, plan.tasks_digest)


def _names(kind: Any) -> list[str]:
    return [field.name for field in fields(kind)]


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


class RingState(StrEnum):
    NONE = "none"
    BUILDING = "building"
    LIVE = "live"
    ABORTED = "aborted"


# ---------------------------------------------------------------------------------------------- words (up)


@dataclass(frozen=True, slots=True)
class Announce:
    """A worker exists and where it stands; said at start and again to every new leader.

    entered 0: a newcomer. numerics: fingerprint of what decides the bits (torch version, threads, capability), with
    "ring:" and what carries the gradients at its end.
    ready: a newcomer that has rehearsed and wants to be admitted. invited: a leader had a place for it; until then it
    is a spare. snapshot: the newest whole snapshot in its machine's memory when it started, or "".
    """

    worker_id: str
    node: str
    slot: int
    pid: int
    host: str
    port: int
    numerics: str
    entered: int = 0
    ring: RingState = RingState.NONE
    reduced: int = 0
    ready: bool = False
    invited: bool = False
    snapshot: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """Answer to a quiesce, after the ring was left, so it cannot change any more.

    promise: enters no generation up to this number. reduced: operations whose complete result was obtained.
    units: of operation ``reduced`` if it was begun, else 0. kept: the operation whose result is held, or -1.
    copied: a newcomer's complete state copy is that of this operation, or -1. copied_step: which is part of this step.
    began: of the newest generation that it knows of; operations are counted anew from each that differs.
    closed: members of its last ring that have closed their ends of the connections, or whose kernels have. Whoever does
    so after this report was said is told with the same report once more, which differs from it in nothing else.
    """

    worker_id: str
    round: int
    promise: int
    entered: int
    has_state: bool
    reduced: int
    units: int = 0
    roots: tuple[Node, ...] = ()
    running: int | None = None
    kept: int = -1
    copied: int = -1
    copied_step: int = -1
    began: str = ""
    closed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RingUp:
    worker_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class RingBrokenReport:
    """Accuses nobody: it only starts a quiesce."""

    worker_id: str
    generation: int
    because: str = ""


@dataclass(frozen=True, slots=True)
class BuildFailedReport:
    worker_id: str
    generation: int
    unreachable: tuple[str, ...]


class Doing(StrEnum):
    """What the script's thread of a worker does."""

    ELSEWHERE = "elsewhere"
    """The script's own code between two operations."""
    DECLARED = "declared"
    """What the library knows to take its time: an evaluation, `once`, joining, the end of the script."""
    SHARD = "shard"
    """It computes a shard of a pass."""
    WAITING = "waiting"
    """It has done its part of an operation, and waits for the others."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Rides on beats. reduced only grows within a generation.

    shards: of a pass; shard_us: how long this worker takes for one, in microseconds; exchange_us: how long it takes to
    send, receive and add what is to be reduced, per pass. 0: not known yet.
    phase: where its script stands, in words. doing: the same for a machine; for_ms: for how long; computes: whether its
    process, or one of its children, uses a processor meanwhile. usual_ms: its longest shard of late; 0: none yet.
    over: what carries the gradients, as of --ring; over_because: why that is not what was asked for; empty: there
    is no ring just now.
    """

    worker_id: str
    generation: int
    reduced: int
    applied: int = 0
    phase: str = ""
    shards: int = 0
    shard_us: int = 0
    exchange_us: int = 0
    doing: Doing = Doing.ELSEWHERE
    for_ms: int = 0
    usual_ms: int = 0
    computes: bool = True
    over: str = ""
    over_because: str = ""


@dataclass(frozen=True, slots=True)
class Ready:
    """A newcomer has rehearsed and asks to be admitted; said again after every loss generation it sees.

    outdated: so many copies of the state in a row were out of date before it was through with them.
    """

    worker_id: str
    generation: int
    outdated: int = 0


@dataclass(frozen=True, slots=True)
class DrainWish:
    """The word of its own agent: this worker's node may be gone in left_ms. Said again to every leader, while it
    stands, with what is left then."""

    worker_id: str
    because: str
    left_ms: int


@dataclass(frozen=True, slots=True)
class DrainOver:
    """The wish is taken back. A generation without the worker may be decided by then; it leaves all the same."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class Left:
    """A drained member has every acknowledgement and is no longer needed."""

    worker_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The script's loop is over here, and every member has reached the end. digest: of the final state."""

    worker_id: str
    generation: int
    digest: str


@dataclass(frozen=True, slots=True)
class CheckpointComplete:
    """The manifest of this entry is durable, written by this worker: it asks for the pointer to it."""

    worker_id: str
    series: str
    entry: str


@dataclass(frozen=True, slots=True)
class Unreadable:
    """What this worker was to go on from cannot be read: it ends, and the next one of its slot reads something else.

    memory: a snapshot on its machine, which is removed now; else a checkpoint, and instead: the one before, or "".
    """

    worker_id: str
    entry: str
    because: str
    memory: bool = False
    instead: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The script raised. place: "type file:line step shard", the same for the same mistake in another worker."""

    worker_id: str
    generation: int
    place: str
    message: str
    exit_code: int = 1


@dataclass(frozen=True, slots=True)
class WorkerDead:
    """The word of its own agent: the process is gone. snapshot: the newest whole one in its machine's memory then, or
    ""."""

    worker_id: str
    because: str
    snapshot: str = ""


@dataclass(frozen=True, slots=True)
class WorkerFrozen:
    """The word of its own agent: alive, but silent and using no CPU. Not a proof of death."""

    worker_id: str
    because: str


@dataclass(frozen=True, slots=True)
class SlotGivenUp:
    """The agent will not start this slot again."""

    node: str
    slot: int
    because: str
    exit_code: int = 1


Word: TypeAlias = (
    Announce
    | Report
    | RingUp
    | RingBrokenReport
    | BuildFailedReport
    | Progress
    | Ready
    | DrainWish
    | DrainOver
    | Left
    | Finished
    | Failed
    | WorkerDead
    | WorkerFrozen
    | SlotGivenUp
    | CheckpointComplete
    | Unreadable
)


# -------------------------------------------------------------------------------------------- orders (down)


@dataclass(frozen=True, slots=True)
class Quiesce:
    """Leave the ring, then report; promise to enter nothing up to ``up_to``."""

    term: int
    round: int
    up_to: int


@dataclass(frozen=True, slots=True)
class Publish:
    term: int
    generation: Generation


@dataclass(frozen=True, slots=True)
class Fence:
    """Expelled: a later generation exists without this worker. It exits by itself, or its agent ends it."""

    term: int
    worker_id: str
    because: str


@dataclass(frozen=True, slots=True)
class Kill:
    """fence_grace is over and a later generation has stepped: the agent ends the process."""

    term: int
    worker_id: str


@dataclass(frozen=True, slots=True)
class Release:
    """A drained member may exit."""

    term: int
    worker_id: str


@dataclass(frozen=True, slots=True)
class Close:
    """The job is over for this worker: what it still waits for is complete (or the job failed)."""

    term: int
    because: str
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class Drain:
    """An agent tells its worker that the node may be gone in left_ms, so that a generation without the worker is wished
    for. signalled: SIGTERM is one of the reasons, and the script may have a handler for that signal."""

    term: int
    worker_id: str
    left_ms: int
    because: str
    signalled: bool = False


@dataclass(frozen=True, slots=True)
class Invite:
    """The world has a place for this newcomer: it learns where the loop stands, rehearses, and asks to be admitted."""

    term: int
    worker_id: str


@dataclass(frozen=True, slots=True)
class Pointed:
    """Answer to CheckpointComplete. holds: the pointer is at that entry and this worker's, so it may remove what is
    older; else a newer checkpoint is known, or another worker has completed this one."""

    term: int
    worker_id: str
    series: str
    entry: str
    holds: bool


Order: TypeAlias = Quiesce | Publish | Fence | Kill | Release | Close | Drain | Invite | Pointed
