"""Events of a worker besides the leader's orders, and the actions that a step asks of its threads, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from elastic.protocol.messages import Generation, Publish, Quiesce, Word
from elastic.protocol.reduction_tree import Node
from elastic.protocol.worker_state.state import WorkerState


@dataclass(frozen=True, slots=True)
class Begin:
    """The user's thread enters its next operation of ``units`` leaves.

    parts: all members may leave for good after it: the state with which it begins need not be saved, or is on its way.
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
    """The exchange on the ring of ``generation`` is complete. carried: the generations in each member's header."""

    generation: int
    carried: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Fetched:
    """A laggard has copied, or computed alone, the result of the operation in progress."""

    op: int


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """The source is gone or has freed the result: the laggard computes it alone."""

    op: int


@dataclass(frozen=True, slots=True)
class RingBuilt:
    generation: int


@dataclass(frozen=True, slots=True)
class RingFailed:
    """because: why, if no peer is the cause."""

    generation: int
    unreachable: tuple[str, ...]
    because: str = ""


@dataclass(frozen=True, slots=True)
class LinksClosed:
    """These members, or their kernels, have closed their ends of the connections in the ring of ``generation``. It is
    noticed after the ring was left and before the next one is built."""

    generation: int
    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RingLost:
    generation: int
    because: str = ""


@dataclass(frozen=True, slots=True)
class HeadersHeld:
    """This worker holds the headers of operation ``op`` of every member of ``generation``."""

    generation: int
    op: int


@dataclass(frozen=True, slots=True)
class Used:
    """The user's thread no longer needs the result of operation ``op``, and it is not retained for members behind."""

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
    """A newcomer holds the complete state of operation ``op``, in that step; -1: it is about to overwrite its copy.

    Refused while quiesced, because the report promised a copy, or none: look at ``copied`` before overwriting.
    """

    op: int
    step: int = -1


@dataclass(frozen=True, slots=True)
class Joined:
    """For a newcomer: the planned generation took effect after operation ``op``, whose result it holds."""

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
    """Abort every ring: entered, pending or retired. This comes before any word to the leader."""


@dataclass(frozen=True, slots=True)
class BuildRing:
    generation: Generation


@dataclass(frozen=True, slots=True)
class RetireRing:
    """Keep the ring open until the headers of operation ``until`` have come, then close it."""

    generation: int
    until: int


@dataclass(frozen=True, slots=True)
class CloseRetired:
    """Close rings that were retired until operation ``op`` or an earlier one."""

    op: int


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Tell the leaving members, on the old ring, that this worker holds the result of op."""

    generation: int
    op: int
    to: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AwaitAcknowledgements:
    """Wait for acknowledgements. of: the members that stay; newcomers hold the state of op and need no result."""

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
    """End this process, because it is fenced."""

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
