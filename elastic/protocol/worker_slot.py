"""One slot of an agent: the worker in it, why it ended, and whether and when another one starts.

``step(slot, event, now_s) -> (slot, actions)``. Pure: the agent posts events and performs actions.

    WAITING --due--> STARTING --spawned--> RUNNING --exit--> WAITING (replaced) or OVER
    WAITING, RUNNING --node leaves, exit--> AWAY --node stays--> WAITING
    RUNNING --job over--> LEAVING --grace--> STOPPING (SIGTERM) --grace--> SIGKILL;  any of them --exit--> OVER

Whose fault was an exit?
    outside      a signal such as SIGKILL or SIGTERM, or exit 75 (it found itself fenced): replaced, never counted
    the script   a non-zero exit, an exception, a fault of its own code (SIGSEGV, SIGABRT, ...), or leaving with 0
                 while the job goes on: replaced at most `max_restarts` times, and not at all if the replacement
                 fails at the same place
    its device   an exception that says that the GPU has failed: counted with those of the script, which may have
                 written where it must not, but two at the same place prove nothing
    the program  an exception in a newcomer, before its first operation, while members with the same script train:
                 never counted; the next one starts after a wait that doubles each time
The first replacement after an outside end starts at once. The wait grows only while workers
die by their script, or before they took part in a ring.
"""

from __future__ import annotations

import math
import re
import signal
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

from elastic.config import JobSpec
from elastic.errors import ExitCode
from elastic.protocol.failures import FailureKind
from elastic.protocol.messages import SlotGivenUp, Word, WorkerDead

FAULTS = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}
)
"""Signals that a process causes by its own code."""

_FRAME = re.compile(r'^ +File "([^"\n]+)", line (\d+)', re.MULTILINE)
_LIBRARY = re.compile(r"^<|/(site|dist)-packages/|/lib(64)?/python3[^/]*/")


class SlotPhase(StrEnum):
    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    LEAVING = "leaving"
    STOPPING = "stopping"
    AWAY = "away"
    """The slot has no worker, because the node has to go; a worker starts again if the node stays after all."""
    OVER = "over"


# ------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Due:
    """The slot's deadline_s is over."""


@dataclass(frozen=True, slots=True)
class Spawned:
    pid: int


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    """The worker's program could not be started at all."""

    because: str


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """The worker announced itself. device: the UUID of its GPU, or ""."""

    device: str = ""


@dataclass(frozen=True, slots=True)
class Served:
    """The worker took part in a ring."""


@dataclass(frozen=True, slots=True)
class Raised:
    """The script raised. place: the same text for the same mistake. of_device, newcomer: as in messages.Failed."""

    place: str
    message: str
    exit_code: int = 1
    of_device: bool = False
    newcomer: bool = False


@dataclass(frozen=True, slots=True)
class MayLeave:
    """The worker has finished its loop, so it may exit now."""


@dataclass(frozen=True, slots=True)
class WorkerReleased:
    """The job goes on without this worker, because its node wanted to leave; the worker may exit now."""


@dataclass(frozen=True, slots=True)
class NodeLeaves:
    """The node has to go: no worker starts here any more, and the worker that runs is not replaced."""


@dataclass(frozen=True, slots=True)
class NodeStays:
    """The node does not have to go, or no longer."""


@dataclass(frozen=True, slots=True)
class FoundFrozen:
    pass


@dataclass(frozen=True, slots=True)
class FoundAlive:
    """The worker beats again."""


@dataclass(frozen=True, slots=True)
class KillOrdered:
    """The leader has ordered to kill the worker."""


@dataclass(frozen=True, slots=True)
class JobOver:
    """The leader ended the job, or this worker's part in it. complete: the exit code is 0, so a member's script may
    take its time for what follows its loop."""

    complete: bool


@dataclass(frozen=True, slots=True)
class StopSlot:
    """The agent has to stop."""


@dataclass(frozen=True, slots=True)
class Dying:
    """The worker's main thread has ended, and its process will end soon. Fields: as in Exited; status 0: unknown."""

    status: int
    cause: str = ""
    starved: str = ""

    @property
    def because(self) -> str:
        return self.cause or _said(self.status, self.starved)


@dataclass(frozen=True, slots=True)
class Exited:
    """The worker's process has ended. status: its exit code, or minus the signal. last_words: the end of its log.
    cause: the process whose end has ended the worker, in words; "": there is none, and status says all. starved: what
    had no memory left when the kernel killed it for want of that, in words; "": it did not."""

    status: int
    last_words: str = ""
    cause: str = ""
    starved: str = ""

    @property
    def because(self) -> str:
        return self.cause or _said(self.status, self.starved)


Event: TypeAlias = (
    Due
    | Spawned
    | SpawnFailed
    | WorkerJoined
    | Served
    | Raised
    | MayLeave
    | WorkerReleased
    | NodeLeaves
    | NodeStays
    | FoundFrozen
    | FoundAlive
    | KillOrdered
    | JobOver
    | StopSlot
    | Dying
    | Exited
)


# ------------------------------------------------------------------------------------------------------ actions


@dataclass(frozen=True, slots=True)
class Spawn:
    """device: the UUID of the GPU that the slot's workers have had, or ""."""

    worker_id: str
    restarted: bool
    device: str = ""


@dataclass(frozen=True, slots=True)
class Signal:
    """Send a signal to the process group of the slot's worker."""

    number: signal.Signals


@dataclass(frozen=True, slots=True)
class SayTo:
    """Send a word to the leader. WorkerDead and SlotGivenUp stay true, so every later leader hears them too."""

    word: Word


@dataclass(frozen=True, slots=True)
class TellLeader:
    """Tell the operator that the script has ended this worker. replaced: its slot gets another worker; False: the job
    was complete before. words: a traceback, or the end of its log."""

    worker_id: str
    because: str
    words: str
    replaced: bool = True


Action: TypeAlias = Spawn | Signal | SayTo | TellLeader


# -------------------------------------------------------------------------------------------------------- state


@dataclass(frozen=True, slots=True)
class Slot:
    """What an agent knows of one slot, whose first worker is due at once.

    incarnation: above every incarnation that this slot ever had. quick_deaths: number of workers in a row that died
    without having taken part in a ring. script_exits: exits caused by the script, over the slot's life. refusals:
    newcomers in a row that raised. place: where the last of the exits raised, without those of its device. told_dead:
    WorkerDead was sent when the death began; a second word could be taken for the loss of a later ring. device: the
    UUID of the GPU of the last worker that has joined, or "".
    """

    node: str
    number: int
    spec: JobSpec
    incarnation: int
    phase: SlotPhase = SlotPhase.WAITING
    deadline_s: float = -math.inf
    pid: int = 0
    joined: bool = False
    served: bool = False
    may_leave: bool = False
    frozen: bool = False
    released: bool = False
    node_leaves: bool = False
    told_dead: bool = False
    raised: Raised | None = None
    quick_deaths: int = 0
    script_exits: int = 0
    refusals: int = 0
    place: str = ""
    device: str = ""

    @property
    def worker_id(self) -> str:
        return f"{self.node}.{self.number}.{self.incarnation}"

    @property
    def lives(self) -> bool:
        """Whether a process of this slot exists."""
        return self.pid != 0


def step(slot: Slot, event: Event, now_s: float) -> tuple[Slot, tuple[Action, ...]]:
    """Apply one event. The caller must drop events about a worker that is gone."""
    timing = slot.spec.timing
    match event:
        case Due():
            return _due(slot, now_s)
        case Spawned(pid) if slot.phase is SlotPhase.STARTING:
            return replace(slot, phase=SlotPhase.RUNNING, pid=pid, deadline_s=math.inf), ()
        case Spawned(pid):
            # The worker is not needed any more: the job ended while it was being started.
            return replace(slot, phase=SlotPhase.STOPPING, pid=pid), (Signal(signal.SIGKILL),)
        case SpawnFailed(because) if slot.phase is SlotPhase.STARTING:
            return _give_up(slot, f"the worker cannot be started: {because}", ExitCode.BAD_INPUT)
        case WorkerJoined(device):
            return replace(slot, joined=True, device=device), ()
        case Served():
            return replace(slot, served=True, quick_deaths=0), ()
        case Raised():
            return replace(slot, raised=event), ()
        case MayLeave():
            return replace(slot, may_leave=True), ()
        case WorkerReleased():
            return replace(slot, may_leave=True, released=True), ()
        case NodeLeaves():
            phase = SlotPhase.AWAY if slot.phase is SlotPhase.WAITING else slot.phase
            deadline_s = math.inf if phase is SlotPhase.AWAY else slot.deadline_s
            return replace(slot, node_leaves=True, phase=phase, deadline_s=deadline_s), ()
        case NodeStays() if slot.phase is SlotPhase.AWAY:
            return _replaced(slot, 0.0, now_s)
        case NodeStays():
            return replace(slot, node_leaves=False), ()
        case FoundFrozen() if slot.phase is SlotPhase.LEAVING:
            return _ask_to_stop(replace(slot, frozen=True), now_s)
        case FoundFrozen() if slot.phase is SlotPhase.RUNNING:
            # The leader decides about a frozen member; nobody waits for a newcomer, so its agent ends it.
            patience_s = math.inf if slot.served else timing.fence_grace_s
            return replace(slot, frozen=True, deadline_s=now_s + patience_s), ()
        case FoundAlive() if slot.phase is SlotPhase.RUNNING:
            return replace(slot, frozen=False, deadline_s=math.inf), ()
        case KillOrdered() if slot.lives:
            return slot, (Signal(signal.SIGKILL),)
        case JobOver(complete) if slot.phase is SlotPhase.RUNNING:
            own_time = complete and slot.served and not slot.frozen
            patience_s = math.inf if own_time else timing.stop_grace_s
            return replace(slot, phase=SlotPhase.LEAVING, deadline_s=now_s + patience_s), ()
        case JobOver() if not slot.lives:
            return replace(slot, phase=SlotPhase.OVER, deadline_s=math.inf), ()
        case StopSlot() if slot.phase in (SlotPhase.RUNNING, SlotPhase.LEAVING):
            return _ask_to_stop(slot, now_s)
        case StopSlot() if not slot.lives:
            return replace(slot, phase=SlotPhase.OVER, deadline_s=math.inf), ()
        case Dying() if slot.phase is SlotPhase.RUNNING and event.status and not slot.may_leave and not slot.told_dead:
            # The signal makes the word true if only the main thread has ended.
            dead = SayTo(_dead(slot, event))
            return replace(slot, told_dead=True), (dead, Signal(signal.SIGKILL))
        case Exited():
            return _exited(slot, event, now_s)
    return slot, ()


def _due(slot: Slot, now_s: float) -> tuple[Slot, tuple[Action, ...]]:
    if now_s < slot.deadline_s:
        return slot, ()
    match slot.phase:
        case SlotPhase.WAITING:
            started = replace(slot, phase=SlotPhase.STARTING, deadline_s=math.inf)
            return started, (Spawn(slot.worker_id, slot.incarnation > 0, slot.device),)
        case SlotPhase.RUNNING:
            return replace(slot, deadline_s=math.inf), (Signal(signal.SIGKILL),)
        case SlotPhase.LEAVING:
            return _ask_to_stop(slot, now_s)
        case SlotPhase.STOPPING:
            return replace(slot, deadline_s=math.inf), (Signal(signal.SIGKILL),)
    return slot, ()


def _ask_to_stop(slot: Slot, now_s: float) -> tuple[Slot, tuple[Action, ...]]:
    stopping = replace(slot, phase=SlotPhase.STOPPING, deadline_s=now_s + slot.spec.timing.stop_grace_s)
    return stopping, (Signal(signal.SIGTERM),)


def _exited(slot: Slot, exit_: Exited, now_s: float) -> tuple[Slot, tuple[Action, ...]]:
    because = exit_.because
    dead = () if slot.told_dead else (SayTo(_dead(slot, exit_)),)
    gone = replace(slot, pid=0, told_dead=False)
    if slot.phase in (SlotPhase.LEAVING, SlotPhase.STOPPING):
        # A released worker may hear of the job's end before it has exited, and then exits with the job's own code.
        failed = exit_.status not in (ExitCode.DONE, ExitCode.DRAINED) and not is_from_outside(exit_.status)
        late = slot.phase is SlotPhase.LEAVING and slot.may_leave and failed
        told = (
            (TellLeader(slot.worker_id, _at(because, exit_.last_words), exit_.last_words, replaced=False),)
            if late
            else ()
        )
        return replace(gone, phase=SlotPhase.OVER, deadline_s=math.inf), (*dead, *told)
    if slot.node_leaves:
        return replace(gone, phase=SlotPhase.AWAY, deadline_s=math.inf), dead
    if exit_.status == 0 and slot.released:
        return _replaced(gone, 0.0, now_s)[0], dead
    if exit_.status == 0 and slot.may_leave:
        return replace(gone, phase=SlotPhase.OVER, deadline_s=math.inf), dead
    if exit_.status == 0 and not slot.joined:
        ended, said = _give_up(gone, "the script never called elastic.join(); call it first", ExitCode.BAD_INPUT)
    elif is_from_outside(exit_.status):
        ended, said = _after_outside_end(gone, because, now_s)
    else:
        ended, said = _after_script_exit(gone, exit_, because, now_s)
    return ended, (*dead, *said)


def _after_outside_end(slot: Slot, because: str, now_s: float) -> tuple[Slot, tuple[Action, ...]]:
    if not slot.spec.replace:
        return _give_up(slot, f"{slot.worker_id} {because}, and replacing is off", ExitCode.BELOW_QUORUM)
    raised = slot.raised
    told = (TellLeader(slot.worker_id, f"{because} at {raised.place}", raised.message),) if raised is not None else ()
    quick, refusals = (0, 0) if slot.served else (slot.quick_deaths + 1, slot.refusals)
    slot = replace(slot, quick_deaths=quick, refusals=refusals)
    return _replaced(slot, _back_off_s(slot.spec, quick - 1), now_s)[0], told


def _after_script_exit(slot: Slot, exit_: Exited, because: str, now_s: float) -> tuple[Slot, tuple[Action, ...]]:
    raised = slot.raised
    if raised is not None and raised.newcomer and slot.spec.replace:
        return _after_refusal(slot, f"{because} at {raised.place}", raised.message, now_s)
    of_device = raised is not None and raised.of_device
    place = slot.place if of_device else raised.place if raised else _place_before_join(slot, exit_)
    words = raised.message if raised else exit_.last_words
    code = raised.exit_code if raised else ExitCode.SCRIPT_FAILED
    because = f"{because} at {raised.place}" if raised else _at(because, words) if place else because
    exits = slot.script_exits + 1
    last = ""
    if place and place == slot.place and not of_device:
        last = "so did the one before it, at the same place"
    elif exits > slot.spec.max_restarts:
        blamed = "the script or its device" if of_device else "the script"
        last = f"it was exit {exits} by {blamed}, max_restarts={slot.spec.max_restarts}"
    elif not slot.spec.replace:
        last = "replacing is off"
    if last:
        return _give_up(slot, f"{slot.worker_id} {because}; {last}" + (f"\n{words}" if words else ""), code)
    quick = 0 if slot.served else slot.quick_deaths + 1
    told = TellLeader(slot.worker_id, because, words)
    slot = replace(slot, script_exits=exits, quick_deaths=quick, place=place)
    return _replaced(slot, _back_off_s(slot.spec, max(exits, quick)), now_s)[0], (told,)


def _after_refusal(slot: Slot, because: str, words: str, now_s: float) -> tuple[Slot, tuple[Action, ...]]:
    """The members prove that the script trains, so it is no mistake of the script if a newcomer cannot."""
    slot = replace(slot, refusals=slot.refusals + 1)
    wait_s = _back_off_s(slot.spec, slot.refusals)
    because += f", before its first step; members train on with this script, so the next one is tried in {wait_s:g} s"
    return _replaced(slot, wait_s, now_s)[0], (TellLeader(slot.worker_id, because, words),)


def _dead(slot: Slot, end: Dying | Exited) -> WorkerDead:
    """The word of its death, with the kind of its failure: none if it may or has to leave, has raised, or was ended
    from outside."""
    kind, leaves = "", slot.may_leave or slot.node_leaves or slot.phase is not SlotPhase.RUNNING
    if end.status and not end.cause and not leaves and slot.raised is None:
        kind = FailureKind.STARVED if end.starved else "" if is_from_outside(end.status) else FailureKind.CRASHED
    return WorkerDead(slot.worker_id, end.because, failure=str(kind))


def _said(status: int, starved: str) -> str:
    return f"{describe(status)}: {starved}" if starved else describe(status)


def _at(because: str, traceback: str) -> str:
    """The reason, with FILE:LINE of the traceback's last frame outside the libraries, if there is one."""
    own = [frame for frame in _FRAME.findall(traceback) if not _LIBRARY.search(frame[0])]
    return f"{because} at {':'.join(own[-1])}" if own else because


def _place_before_join(slot: Slot, exit_: Exited) -> str:
    """Where a script failed that never reached join(): the exit code and the last line of its traceback; else ""."""
    lines = exit_.last_words.strip().splitlines()
    return f"exit {exit_.status}: {lines[-1]}" if lines and not slot.joined else ""


def _back_off_s(spec: JobSpec, times: int) -> float:
    """Seconds to wait: 0 if times is below 1, else backoff_min_s, doubled with each time, up to backoff_max_s."""
    timing = spec.timing
    return 0.0 if times < 1 else min(timing.backoff_max_s, timing.backoff_min_s * 2.0 ** min(times - 1, 60))


def _replaced(slot: Slot, wait_s: float, now_s: float) -> tuple[Slot, tuple[Action, ...]]:
    successor = Slot(
        slot.node,
        slot.number,
        slot.spec,
        slot.incarnation + 1,
        deadline_s=now_s + wait_s,
        quick_deaths=slot.quick_deaths,
        script_exits=slot.script_exits,
        refusals=slot.refusals,
        place=slot.place,
        device=slot.device,
    )
    return successor, ()


def _give_up(slot: Slot, because: str, exit_code: int) -> tuple[Slot, tuple[Action, ...]]:
    given_up = SlotGivenUp(slot.node, slot.number, because, int(exit_code))
    return replace(slot, phase=SlotPhase.OVER, pid=0, deadline_s=math.inf), (SayTo(given_up),)


def is_from_outside(status: int) -> bool:
    """Whether the process was ended from outside, or the worker found itself fenced."""
    return status == ExitCode.FENCED or (status < 0 and -status not in FAULTS)


def describe(status: int) -> str:
    """An exit in words: 'exited with 1', 'killed by SIGKILL', 'found itself fenced'."""
    if status == ExitCode.FENCED:
        return "found itself fenced"
    if status >= 0:
        return f"exited with {status}"
    known = {int(number): number.name for number in signal.Signals}
    return f"killed by {known.get(-status, f'signal {-status}')}"
