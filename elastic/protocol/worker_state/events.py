"""What happens to a worker, beside the leader's orders, and what a step asks the worker's threads to do, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from elastic.protocol.messages import Generation, Publish, Quiesce, Word
from elastic.protocol.reduction_tree import Node
from elastic.protocol.worker_state.state import WorkerState


@dataclass(frozen=True, slots=True)
class Begin:
    """The user's thread enters its next operation of ``units`` leaves.

    parts: everybody may leave for good after it, because the state with which it begins is on its way to the disk, or
    need not be.
    """

    units: int
    joinable: bool = False
    parts: bool = True


@dataclass(frozen=True, slots=True)
class Started:
    unit: int


@dataclass(frozen=True, slots=True)
class Done:
    """A unit was computed and folded with the held roots ``consumed`` into ``root``."""

    unit: int
    root: Node
    consumed: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadHeader:
    """The header of this attempt is about to be sent."""


@dataclass(frozen=True, slots=True)
class Obtained:
    """The exchange on the ring of ``generation`` is complete. carried: the numbers in each member's header."""

    generation: int
    carried: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Fetched:
    """A laggard has copied the result of the operation it is in, or has computed it alone."""

    op: int


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """The source is gone or has freed the result: fall back to computing alone."""

    op: int


@dataclass(frozen=True, slots=True)
class RingBuilt:
    generation: int


@dataclass(frozen=True, slots=True)
class RingFailed:
    generation: int
    unreachable: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LinksClosed:
    """These members, or their kernels, have closed their ends of the connections in the ring of ``generation``. Seen
    when that ring is left, and until the next one is built."""

    generation: int
    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RingLost:
    generation: int
    because: str = ""


@dataclass(frozen=True, slots=True)
class HeadersHeld:
    """Headers of operation ``op`` from every member of ``generation`` are in hand."""

    generation: int
    op: int


@dataclass(frozen=True, slots=True)
class Used:
    """The user's thread needs the result of operation ``op`` no more, and it is not retained for members behind."""

    op: int


@dataclass(frozen=True, slots=True)
class CopyBegun:
    newcomer: str


@dataclass(frozen=True, slots=True)
class CopyEnded:
    """complete: the newcomer has verified the whole state of operation ``op``."""

    newcomer: str
    op: int
    complete: bool


@dataclass(frozen=True, slots=True)
class GraceOver:
    """join_grace is over: the donor goes on without the newcomers that are still copying."""


@dataclass(frozen=True, slots=True)
class Copied:
    """Newcomer: holds the complete state of operation ``op`` of that step; -1: is about to overwrite the one it holds.

    Refused while quiesced, because the report promised a copy, or none: look at ``copied`` before overwriting.
    """

    op: int
    step: int = -1


@dataclass(frozen=True, slots=True)
class Joined:
    """Newcomer: the planned generation took effect after operation ``op``, whose result is held."""

    generation: int
    op: int


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Every member of the new list has the result after which this worker leaves."""


Event: TypeAlias = (
    Begin
    | Started
    | Done
    | ReadHeader
    | Obtained
    | Fetched
    | FetchFailed
    | RingBuilt
    | RingFailed
    | LinksClosed
    | RingLost
    | HeadersHeld
    | Used
    | CopyBegun
    | CopyEnded
    | GraceOver
    | Copied
    | Joined
    | Acknowledged
    | Quiesce
    | Publish
)


@dataclass(frozen=True, slots=True)
class AbortRings:
    """Every ring, entered, pending or retired. Done before anything is said."""


@dataclass(frozen=True, slots=True)
class BuildRing:
    generation: Generation


@dataclass(frozen=True, slots=True)
class RetireRing:
    """Keep it open until the headers of operation ``until`` have come, then close it."""

    generation: int
    until: int


@dataclass(frozen=True, slots=True)
class CloseRetired:
    """Rings retired until an operation up to ``op`` may be closed."""

    op: int


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Tell the leaving members, on the old ring, that the result of op is held here."""

    generation: int
    op: int
    to: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AwaitAcknowledgements:
    """of: members of the ring that stay; whoever joins holds the state of op and needs nothing from this one."""

    generation: int
    op: int
    of: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FreeResult:
    op: int


@dataclass(frozen=True, slots=True)
class DropRoots:
    """Free every partial sum that is not one of ``keep``."""

    keep: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Say:
    word: Word


@dataclass(frozen=True, slots=True)
class Leave:
    """Stop this process: fenced."""

    because: str


Action: TypeAlias = (
    AbortRings
    | BuildRing
    | RetireRing
    | CloseRetired
    | Acknowledge
    | AwaitAcknowledgements
    | FreeResult
    | DropRoots
    | Say
    | Leave
)


Outcome: TypeAlias = tuple[WorkerState, tuple[Action, ...]]
