"""Orders: what the leader tells workers and agents. Each carries the leader's term."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from elastic.protocol.messages.generation import Generation


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
    signalled: SIGTERM is one of the reasons, and the script may have a handler for that signal. kind: a NoticeKind.
    said_by: the source. over: the notice was taken back; to a worker that does not know this field it is a repetition.
    """

    term: int
    worker_id: str
    left_ms: int
    because: str
    signalled: bool = False
    kind: str = ""
    said_by: str = ""
    over: bool = False


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


@dataclass(frozen=True, slots=True)
class EndRound:
    """Enough replicas are there (outer_round.py): if this worker is in this generation and still computes in operation
    `op`, its replica stops after the inner step that it is in. Said again with each beat in which it has not."""

    term: int
    worker_id: str
    generation: int
    op: int


Order: TypeAlias = Quiesce | Publish | Fence | Kill | Release | Close | Drain | Invite | Home | Pointed | EndRound
