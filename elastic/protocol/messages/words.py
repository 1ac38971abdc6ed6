"""Words: what workers, and their agents, tell the leader."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from elastic.protocol.reduction_tree import Node


class RingState(StrEnum):
    NONE = "none"
    BUILDING = "building"
    LIVE = "live"
    ABORTED = "aborted"


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
    """The worker has not built its ring. because: why, if it names nobody."""

    worker_id: str
    generation: int
    unreachable: tuple[str, ...]
    because: str = ""


class Doing(StrEnum):
    """What the script's thread of a worker does."""

    ELSEWHERE = "elsewhere"
    """The script's own code runs between two operations."""
    DECLARED = "declared"
    """A task runs that the library knows to take its time: `once`, joining, the end of the script."""
    EVALUATION = "evaluation"
    """A part of an evaluation is computed."""
    SHARD = "shard"
    """A shard of a pass is computed."""
    WAITING = "waiting"
    """The worker has done its part of an operation, and waits for the others."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a worker is; it is sent with each beat. reduced only grows within a generation.

        shards: number of shards of a pass. shard_us: microseconds that this worker takes for a shard. exchange_us:
        microseconds per pass that it takes to send, receive and add what is reduced. Each is 0 if not known yet. phase:
        where its script stands, in words. doing: the same for a machine. for_ms: how long it has been doing that.
    computes: whether its process, or one of its children, uses a processor meanwhile. usual_ms: its longest recent
        shard or, while it evaluates, part of an evaluation; 0: none yet. over: what carries the gradients, a value of
        --ring; "": there is no ring now. over_because: why this differs from what was asked for. min_replicas,
        grace_ms: of the quorum, if operation `reduced` is a round with one (outer_round.py); 0: it is none. replicas:
        how many of that round have made all their inner steps on this worker.
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
    min_replicas: int = 0
    grace_ms: int = 0
    replicas: int = 0


@dataclass(frozen=True, slots=True)
class Ready:
    """A newcomer has rehearsed and asks to be admitted; it repeats this after every loss generation it sees.

    outdated: how many signs there were that the members train faster than this newcomer copies and catches up: copies
    of the state that were out of date before it was done with them, and answers after which it was no nearer. hold:
    whether a step is to wait for its copy from the first one on, as its script cannot follow members to a later step.
    """

    worker_id: str
    generation: int
    outdated: int = 0
    hold: bool = False


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
    what failed is the worker's GPU, its driver or NCCL, so that equal places prove nothing. newcomer: this worker came
    to a job that trains, and has completed no operation with the others. samples: those of the shard, in words."""

    worker_id: str
    generation: int
    place: str
    message: str
    exit_code: int = 1
    of_device: bool = False
    newcomer: bool = False
    samples: str = ""


@dataclass(frozen=True, slots=True)
class WorkerDead:
    """A worker's own agent says: its process is gone. snapshot: the newest whole one in its machine's memory, or "".

    failure: a FailureKind (failures.py), if the end has its cause in the worker; "": it came from outside. where: the
    shard that it computed then, "shard 3 in pass 0 of step 5: samples 1, 2", or "".
    """

    worker_id: str
    because: str
    snapshot: str = ""
    failure: str = ""
    where: str = ""


@dataclass(frozen=True, slots=True)
class WorkerFrozen:
    """A worker's own agent says: it lives, but is silent and uses no CPU. This is no proof of death."""

    worker_id: str
    because: str


@dataclass(frozen=True, slots=True)
class Corrupted:
    """The worker's ring is broken on purpose: the member `suspect` has other values than the others, by `because`. All
    members that have heard the same say so."""

    worker_id: str
    generation: int
    suspect: str
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
    | Corrupted
    | CheckpointComplete
    | Unreadable
)
