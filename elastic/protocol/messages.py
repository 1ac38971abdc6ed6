"""The messages between workers, agents and the leader, as frozen values.

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
    """What ring peers know of a worker. A smaller seniority is older; ranks follow it.

    home: a number that no other living worker of the job has, the lowest that was free; -1: none was given yet. It
    stays for the life of the process. A script for torchrun sees it as RANK.
    """

    worker_id: str
    node: str
    host: str
    port: int
    seniority: int
    home: int = -1


@dataclass(frozen=True, slots=True)
class Share:
    """What one member contributes to the redone operation: the roots it keeps, the units it still computes."""

    worker_id: str
    keep: tuple[Node, ...]
    units: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Laggard:
    """A member without the result of operation ``Plan.op - 1``: it copies it from source, or computes it alone if
    source is ""."""

    worker_id: str
    source: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What a generation does first. units == 0: nobody had begun operation op, so default ownership holds.

    paces: microseconds that each member takes for a unit, in rank order, 0 if not known; default ownership follows
    them. Empty: all members own equally much. slack: percent that the slowest member may take longer than it must, for
    units that are sent as fewer partial sums. all_tasks: digest of all shares and laggards, if this copy of the plan
    holds only those of one node's workers; else "".
    """

    op: int = 0
    units: int = 0
    shares: tuple[Share, ...] = ()
    laggards: tuple[Laggard, ...] = ()
    newcomers: tuple[str, ...] = ()
    paces: tuple[int, ...] = ()
    slack: int = 0
    all_tasks: str = ""

    @property
    def tasks_digest(self) -> str:
        """The digest of all shares and laggards; "" if there are none."""
        if self.all_tasks or not (self.shares or self.laggards):
            return self.all_tasks
        shares = [(share.worker_id, share.keep, share.units) for share in self.shares]
        return _digest(shares, [(laggard.worker_id, laggard.source) for laggard in self.laggards])

    def share_of(self, worker_id: str) -> Share | None:
        return next((share for share in self.shares if share.worker_id == worker_id), None)

    def source_of(self, worker_id: str) -> str | None:
        """The source of a laggard; "": it computes alone; None: the worker is no laggard."""
        return next((lag.source for lag in self.laggards if lag.worker_id == worker_id), None)


ANEW = "anew."


@dataclass(frozen=True)
class Generation:
    """One committed member list with its whole plan; immutable. members are in rank order.

    base: number of the last loss or form generation; a planned generation is void once base moves on. hold: the members
    finish operation plan.op, then wait, because they are below quorum. early: this generation exists only so that
    draining members need not wait for the newcomers of the next one; it is never the list that the job aims at
    (worker_state/pending.py). token: proof for ring and copy connections of this generation. began: the snapshot or
    checkpoint from which the last form generation went on: its members read that state, and newcomers copy it from
    them. "": the form generation was the job's first. If all members died before a step was applied, the run begins
    again, and began is ANEW plus the number of that form generation.
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
        """The snapshot or checkpoint in `began`; "": the job has begun with its first generation only."""
        return "" if self.began.startswith(ANEW) else self.began

    # Cached, because the leader of a large job asks for them with every word that it hears.

    @cached_property
    def ids(self) -> tuple[str, ...]:
        return tuple(member.worker_id for member in self.members)

    @cached_property
    def _by_id(self) -> dict[str, Member]:
        return {member.worker_id: member for member in self.members}

    def member(self, worker_id: str) -> Member | None:
        return self._by_id.get(worker_id)

    def digest(self) -> str:
        """Hash of the whole record, equal for copies with one node's tasks only. Peers compare it before data flows."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        plan = self.plan
        head = {name: getattr(self, name) for name in _names(Generation) if name not in ("members", "plan")}
        members = [*map(attrgetter(*_names(Member)), self.members)]
        return _digest(head, members, plan.op, plan.units, plan.newcomers, plan.paces, plan.slack, plan.tasks_digest)


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
    """A worker exists, and where it stands. It is said at the start and again to every new leader.

    entered: the generation that the worker has entered; 0: it is a newcomer. numerics: fingerprint of what decides the
    bits (torch version, threads, capability); it ends with "ring:" and what carries the gradients. ready: the newcomer
    has rehearsed and asks to be admitted. invited: a leader had a place for the newcomer; until then it is a spare.
    snapshot: the newest whole snapshot in its machine's memory when the worker started, or "". home: as in Member.
    device: the UUID of its GPU, or "".
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
    home: int = -1
    device: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """Answer to a quiesce. The worker has left its ring, so the answer cannot change any more.

    promise: the worker enters no generation up to this number. reduced: number of operations whose complete result it
    has obtained. units: how many units operation ``reduced`` has if it was begun, else 0. kept: the operation whose
    result it holds, or -1. copied: the operation of a newcomer's complete copy of the state, or -1. copied_step: the
    step of that operation, or -1. began: `Generation.began` of the newest generation that the worker knows of;
    operations are counted from 0 for each value of it. closed: members of its last ring whose ends of the connections
    are closed. When more connections close later, the worker sends the same report again, with only `closed` changed.
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
    """The worker's ring is broken. The word accuses nobody: it only starts a quiesce."""

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
    """The script's own code runs between two operations."""
    DECLARED = "declared"
    """A task runs that the library knows to take its time: an evaluation, `once`, joining, the end of the script."""
    SHARD = "shard"
    """A shard of a pass is computed."""
    WAITING = "waiting"
    """The worker has done its part of an operation, and waits for the others."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a worker is; it is sent with each beat. reduced only grows within a generation.

    shards: number of shards of a pass. shard_us: microseconds that this worker takes for a shard. exchange_us:
    microseconds per pass that it takes to send, receive and add what is reduced. Each is 0 if not known yet. phase:
    where its script stands, in words. doing: the same for a machine. for_ms: how long the worker has been doing that.
    computes: whether its process, or one of its children, uses a processor meanwhile. usual_ms: its longest recent
    shard; 0: none yet. over: what carries the gradients, a value of --ring; "": there is no ring now. over_because: why
    this differs from what was asked for.
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
    """A newcomer has rehearsed and asks to be admitted; it repeats this after every loss generation it sees.

    outdated: number of copies of the state in a row that were out of date before the newcomer was done with them.
    """

    worker_id: str
    generation: int
    outdated: int = 0


@dataclass(frozen=True, slots=True)
class DrainWish:
    """A worker's own agent says: the worker's node may be gone in left_ms. While the wish stands, every new leader is
    told too, with the time that is left then."""

    worker_id: str
    because: str
    left_ms: int


@dataclass(frozen=True, slots=True)
class DrainOver:
    """The wish to drain is taken back. If a generation without the worker is decided by then, the worker still
    leaves."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class Left:
    """A drained member has every acknowledgement and may exit."""

    worker_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The script's loop is over in this worker, so every member has reached its end. digest: of the final state."""

    worker_id: str
    generation: int
    digest: str


@dataclass(frozen=True, slots=True)
class CheckpointComplete:
    """The manifest of this entry, written by this worker, is durable. The worker asks to move the pointer to it."""

    worker_id: str
    series: str
    entry: str


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The worker cannot read the snapshot or checkpoint to go on from. It ends, and its successor reads another one.

    memory: the entry is a snapshot in its machine's memory, now removed; else a checkpoint, and instead: the one
    before, or "".
    """

    worker_id: str
    entry: str
    because: str
    memory: bool = False
    instead: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The script raised. place: "type file:line step shard", equal for the same mistake in another worker. of_device:
    what failed is the worker's GPU, its driver or NCCL, so that equal places prove nothing."""

    worker_id: str
    generation: int
    place: str
    message: str
    exit_code: int = 1
    of_device: bool = False


@dataclass(frozen=True, slots=True)
class WorkerDead:
    """A worker's own agent says: its process is gone. snapshot: the newest whole one in its machine's memory, or ""."""

    worker_id: str
    because: str
    snapshot: str = ""


@dataclass(frozen=True, slots=True)
class WorkerFrozen:
    """A worker's own agent says: it lives, but is silent and uses no CPU. This is no proof of death."""

    worker_id: str
    because: str


@dataclass(frozen=True, slots=True)
class SlotGivenUp:
    """The agent will start no worker in this slot again."""

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
    """Leave the ring, then report; promise to enter no generation up to ``up_to``."""

    term: int
    round: int
    up_to: int


@dataclass(frozen=True, slots=True)
class Publish:
    term: int
    generation: Generation


@dataclass(frozen=True, slots=True)
class Fence:
    """The worker is expelled: a later generation exists without it. It exits by itself, or its agent ends it."""

    term: int
    worker_id: str
    because: str


@dataclass(frozen=True, slots=True)
class Kill:
    """The agent must end the process: fence_grace is over, and a later generation has completed a step. What an
    operator asks of a worker is no order of a leader, but a WorkerSignal of the wire."""

    term: int
    worker_id: str


@dataclass(frozen=True, slots=True)
class Release:
    """A drained member may exit."""

    term: int
    worker_id: str


@dataclass(frozen=True, slots=True)
class Close:
    """The job is over for this worker: what it still waits for is complete, or the job failed."""

    term: int
    because: str
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class Drain:
    """An agent tells its worker that the node may be gone in left_ms, so that the worker can prepare to leave.
    signalled: SIGTERM is one of the reasons, and the script may have a handler for that signal."""

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
class Home:
    """The number that a newcomer has from now on; see Member. Members find theirs in the list of members."""

    term: int
    worker_id: str
    home: int


@dataclass(frozen=True, slots=True)
class Pointed:
    """Answer to CheckpointComplete. holds: the pointer names that entry, written by this worker, which may now remove
    older entries. Else a newer checkpoint is known, or another worker has completed this one."""

    term: int
    worker_id: str
    series: str
    entry: str
    holds: bool


Order: TypeAlias = Quiesce | Publish | Fence | Kill | Release | Close | Drain | Invite | Home | Pointed
