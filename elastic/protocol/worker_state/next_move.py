"""What the user's thread does next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from elastic.protocol.messages import RingState
from elastic.protocol.worker_state.pending import missing, newcomers_in, to_carry
from elastic.protocol.worker_state.state import Phase, WorkerState


@dataclass(frozen=True, slots=True)
class Compute:
    unit: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """Exchange on the ring of the entered generation; post ReadHeader first."""

    generation: int


@dataclass(frozen=True, slots=True)
class CopyResult:
    source: str
    op: int


@dataclass(frozen=True, slots=True)
class Deliver:
    """Deliver the one root as the result: a laggard has computed everything alone."""


@dataclass(frozen=True, slots=True)
class Linger:
    """For the donor: give these newcomers up to join_grace to finish their copy."""

    newcomers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    because: str


@dataclass(frozen=True, slots=True)
class Released:
    """Go back to the user's code: the operation is complete, or none is in progress."""


@dataclass(frozen=True, slots=True)
class Stop:
    because: str


@dataclass(frozen=True, slots=True)
class CopyState:
    """For a newcomer: ask these workers for the state of their operation; the donor answers."""

    of: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AskOutcome:
    """For a newcomer: ask these workers which generation took effect after ``op``, if any, and for the result.

    `Joined` follows, or `Copied(-1)` if none did. The newcomer asks until a worker knows, over as many connections as
    it takes: if a generation took effect, the ring waits for this newcomer, whatever has been planned since.
    """

    op: int
    of: tuple[str, ...]


Move: TypeAlias = Compute | Exchange | CopyResult | Deliver | Linger | Wait | Released | Stop


def next_move(p: WorkerState) -> Move:
    """What the user's thread does next."""
    if p.phase is Phase.GONE:
        return Stop(p.because)
    if p.leaving:
        return Wait("leaving: waiting until every member has the last result")
    if p.phase is not Phase.COLLECTING:
        return Released()
    if p.quiesced:
        return Wait("the ring is being rebuilt")
    if p.laggard:
        return CopyResult(p.laggard, p.reduced)
    if p.todo:
        return Compute(p.todo[0])
    if p.laggard == "":
        return Deliver() if p.roots == ((0, p.units),) else Wait("a unit is running")
    if p.ring is not RingState.LIVE:
        return Wait("the ring is being built")
    copying = missing(p)
    if _held_back(p):
        return Wait("below quorum")
    if copying and not p.lingered and set(copying) <= set(p.copying):
        return Linger(copying)
    return Exchange(p.entered)


def seek(p: WorkerState) -> CopyState | AskOutcome | Wait:
    """What the user's thread of a newcomer does next; to be asked while ``phase`` is FRESH."""
    if p.quiesced:
        return Wait("what was reported must stay as it is")
    if p.copied >= 0 and any(g.member(p.me) for g in p.pending):
        return AskOutcome(p.copied, p.acquaintances)
    if p.newest_pending is not None and p.newest_pending.member(p.me):
        return CopyState(p.acquaintances)
    return Wait("not admitted yet")


def _held_back(p: WorkerState) -> bool:
    """Whether the operation waits below quorum: a new step starts only with the missing newcomers, or to let a worker
    leave.

    An operation whose header has been sent is under way, whatever is planned since.
    """
    record = p.record
    assert record is not None
    interrupted = p.reduced == record.plan.op and record.plan.units > 0
    if not (record.hold and p.joinable) or interrupted or p.carry is not None:
        return False
    return all(pending.hold and newcomers_in(pending, record) for pending in to_carry(p))
