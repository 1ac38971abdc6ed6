"""What a node does about the notices it has: ``step(stay, event, now_s) -> (stay, actions)``. Pure.

    STAYING --notice--> LEAVING --budget - 5 s--> LATE --budget--> OUT
       LEAVING, LATE, OUT --every notice is taken back, or has not come true for a minute--> STAYING

LEAVING asks the job to go on without this node, which happens between two steps and costs nothing. LATE: no such
moment came, so the ring is broken while there is time for the others to notice. OUT: what is left of the workers is
ended, as the machine would.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeAlias

from elastic.preemption.notice import Notice, NoticeKind

LATE_S = 5.0
"""Before the end of the budget; of a budget below twice as much, half."""

UNTRUE_S = 60.0
"""A machine that is still there this long after its end was not taken."""


class StayPhase(StrEnum):
    STAYING = "staying"
    LEAVING = "leaving"
    LATE = "late"
    OUT = "out"


@dataclass(frozen=True, slots=True)
class HeldNotice:
    """A notice that stands. ends_s: when the machine may be gone. source: who said it first."""

    ends_s: float
    late_s: float
    because: str
    kind: NoticeKind
    source: str

    @property
    def lasting(self) -> bool:
        """Whether it stands until it is taken back."""
        return self.kind is NoticeKind.ASKED


@dataclass(frozen=True, slots=True)
class Stay:
    """notices: by source, all of which make the node leave."""

    phase: StayPhase = StayPhase.STAYING
    notices: dict[str, HeldNotice] = field(default_factory=dict)

    @property
    def urgent(self) -> HeldNotice | None:
        """The notice whose end comes first."""
        return min(self.notices.values(), key=lambda held: held.ends_s, default=None)

    @property
    def deadline_s(self) -> float:
        """When to post the next StayTick."""
        untrue = [held.ends_s + UNTRUE_S for held in self.notices.values() if not held.lasting]
        match self.phase, self.urgent:
            case StayPhase.LEAVING, HeldNotice(late_s=next_s):
                return min(next_s, *untrue, math.inf)
            case StayPhase.LATE, HeldNotice(ends_s=next_s):
                return min(next_s, *untrue, math.inf)
        return min(untrue, default=math.inf)


# ------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Heard:
    """What a source says now; None: nothing any more."""

    source: str
    notice: Notice | None


@dataclass(frozen=True, slots=True)
class StayTick:
    """stay.deadline_s is over."""


Event: TypeAlias = Heard | StayTick


# ------------------------------------------------------------------------------------------------------ actions


@dataclass(frozen=True, slots=True)
class LeaveNode:
    """Ask for a job without this node by ends_s, start no worker here, and tell those that run."""

    ends_s: float
    because: str


@dataclass(frozen=True, slots=True)
class BreakRing:
    """End the workers that still take part, unless nobody else could go on."""

    because: str


@dataclass(frozen=True, slots=True)
class EndWorkers:
    """End all that are left."""

    because: str


@dataclass(frozen=True, slots=True)
class Return:
    """Start workers again."""

    because: str


@dataclass(frozen=True, slots=True)
class Advise:
    """Somebody may want to know."""

    because: str


Action: TypeAlias = LeaveNode | BreakRing | EndWorkers | Return | Advise


# -------------------------------------------------------------------------------------------------- transitions


def step(stay: Stay, event: Event, now_s: float) -> tuple[Stay, tuple[Action, ...]]:
    match event:
        case Heard(source, Notice(leaves=False, because=because)):
            # The advice is all that the source says now.
            stay, actions = _without(stay, {source}, "the notice was taken back")
            return stay, (*actions, Advise(because))
        case Heard(source, Notice() as notice):
            return _noticed(stay, source, notice, now_s)
        case Heard(source, None):
            return _without(stay, {source}, "the notice was taken back")
        case StayTick():
            return _tick(stay, now_s)
    return stay, ()


def _noticed(stay: Stay, source: str, notice: Notice, now_s: float) -> tuple[Stay, tuple[Action, ...]]:
    ends_s = now_s + notice.seconds_left
    late_s = max(ends_s - LATE_S, now_s + notice.seconds_left / 2)
    held = HeldNotice(ends_s, late_s, notice.because, notice.kind, notice.source or source)
    before = stay.urgent
    stay = replace(stay, notices={**stay.notices, source: held})
    if stay.phase is StayPhase.STAYING:
        stay = replace(stay, phase=StayPhase.LEAVING)
    elif stay.phase is not StayPhase.LEAVING or stay.urgent == before:
        return stay, ()
    assert stay.urgent is not None
    return stay, (LeaveNode(stay.urgent.ends_s, stay.urgent.because),)


def _without(stay: Stay, sources: set[str], because: str) -> tuple[Stay, tuple[Action, ...]]:
    if not sources & set(stay.notices):
        return stay, ()
    before = stay.urgent
    stay = replace(stay, notices={source: held for source, held in stay.notices.items() if source not in sources})
    if not stay.notices:
        return replace(stay, phase=StayPhase.STAYING), (Return(because),)
    if stay.phase is StayPhase.LEAVING and stay.urgent != before:
        assert stay.urgent is not None
        return stay, (LeaveNode(stay.urgent.ends_s, stay.urgent.because),)
    return stay, ()


def _tick(stay: Stay, now_s: float) -> tuple[Stay, tuple[Action, ...]]:
    actions: tuple[Action, ...] = ()
    held = stay.urgent
    if held is None:
        return stay, ()
    if stay.phase is StayPhase.LEAVING and now_s >= held.late_s:
        stay, actions = replace(stay, phase=StayPhase.LATE), (BreakRing(held.because),)
    if stay.phase is StayPhase.LATE and now_s >= held.ends_s:
        stay, actions = replace(stay, phase=StayPhase.OUT), (*actions, EndWorkers(held.because))
    untrue = {name for name, one in stay.notices.items() if not one.lasting and now_s >= one.ends_s + UNTRUE_S}
    stay, more = _without(stay, untrue, "the notice did not come true")
    return stay, (*actions, *more)
