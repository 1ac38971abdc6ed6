"""A round: a generation of the job in which every worker runs the script once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Self, TypeAlias

from elastic.protocol.worker_id import node_of
from runtime.allreduce.reduction.partial_sum import Json
from runtime.frontends.restart.script_failure import Failure
from runtime.recovery.kept.choice import (
    NO_ROUND,
    HeldSegment,
    KeptStep,
    KnownStep,
    RoundNumber,
    ThinPart,
    awaited,
    newest_whole,
    thin_parts,
)
from runtime.recovery.kept.digest import combined
from runtime.recovery.kept.step_log import LoggedStep

LACKING_S = 30.0
"""Seconds for which a round waits for nodes whose memory has what lacks, or for room in the memory of its machines,
before it begins with less."""
IDLE_SHOWN_S = 10.0
"""After so many seconds without a processor `elastic status` says that a script is idle."""


class ScriptState(StrEnum):
    """What a worker's script does in the round in progress."""

    WAITING = "waiting"
    """It has not been started."""
    RUNNING = "running"
    DONE = "done"
    """It has ended with status 0."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ScriptReport:
    """What a worker says to the others in each exchange."""

    generation: int
    """The round that it is in."""
    world: int
    """The number of members of that round."""
    state: ScriptState
    store: tuple[str, int] | None = None
    """Address and port of the TCPStore that the worker with rank 0 has for this round, as soon as it listens."""
    failure: Failure | None = None
    idle_s: float = 0.0
    """Seconds for which neither the running script nor a process below it has used a processor, see script_watch.py."""
    held: tuple[HeldSegment, ...] | None = None
    """The segments that the worker has found (runtime/recovery/kept) before its script starts, or of the newest step
    when its script is done; None: it has not looked."""
    copied: bool = False
    """Whether the worker has tried to copy what too few machines have."""
    kept: int = -1
    """The newest step that its script has kept in this round; -1: none."""
    memory: bool | None = True
    """Whether the worker has a directory in memory, in a round of several machines with room in it. None: it has the
    directory, and no room now."""
    known: KnownStep | None = None
    """The newest step of which the worker, or its machine, knows that a round has kept it."""
    lacking_s: float = 0.0
    """Seconds for which it has waited for the memory of a node."""
    logged: tuple[LoggedStep, ...] = ()
    """What its scripts have said of their steps since the exchange before."""
    hashed: bool = False
    """Whether it has tried to digest its share of the last step, when all scripts were done."""
    digests: Mapping[str, str] | None = None
    """Name -> digest of each tensor of this worker's share, see runtime/recovery/kept/digest.py. None: the worker has
    not read them, or could not read all."""
    before: int = -1
    """An earlier step that its script has kept in this round, also on other machines: its mirror was waited for before
    the newest step was kept. -1: none."""
    first: int = -1
    """The first step that its script has kept in this round; -1: none. It may have changed its weights while an earlier
    one was copied, which others have kept."""
    recorded: int = -1
    """How many steps the worker knows to be in the ledger; -1: it is new, and no other worker has told it yet."""
    tells: bool = False
    """Whether it tells new workers: `logged` has all that it has heard of steps that are not in the ledger."""
    off: RoundNumber = NO_ROUND
    """The newest round of which it knows that a script kept nothing any more: what is older is void on all machines."""

    def said(self, hang_s: float, kept: str = "", ranks: Sequence[int] = ()) -> str:
        """What `elastic status` shows of the script. hang_s: as of `decide`. kept: what is kept of the round. ranks: of
        the script, with --ranks."""
        idle = f", idle for {self.idle_s:.0f} s of {hang_s:.0f} s" if self.idle_s >= IDLE_SHOWN_S else ""
        of = f" with {'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))}" if ranks else ""
        return f"script{of} {self.state}{idle}" + (f", {kept}" if kept else "")

    def to_json(self) -> dict[str, Json]:
        held: Json = None if self.held is None else [list[Json](one.to_json()) for one in self.held]
        known: Json = None if self.known is None else self.known.to_json()
        logged: list[Json] = [one.to_json() for one in self.logged]
        plain = asdict(replace(self, held=None, known=None, logged=()))
        return {**plain, "held": held, "known": known, "logged": logged, "off": list[Json](self.off)}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Self:
        store, failure, held = said["store"], said["failure"], said["held"]
        return cls(
            said["generation"],
            said["world"],
            ScriptState(said["state"]),
            (str(store[0]), int(store[1])) if store else None,
            Failure(**failure) if failure else None,
            float(said["idle_s"]),
            None if held is None else tuple(map(HeldSegment.from_json, held)),
            said["copied"],
            said["kept"],
            said["memory"],
            None if said["known"] is None else KnownStep.from_json(said["known"]),
            float(said["lacking_s"]),
            tuple(map(LoggedStep.from_json, said["logged"])),
            said["hashed"],
            said["digests"],
            said["before"],
            said["first"],
            said["recorded"],
            said["tells"],
            RoundNumber(*said.get("off", NO_ROUND)),
        )


@dataclass(frozen=True, slots=True)
class LookAtKept:
    """Look at the segments of this machine: no script of an earlier round runs any more."""


@dataclass(frozen=True, slots=True)
class AwaitNodes:
    """No script starts yet: a worker of another node may join, whose memory has this step, which is newer than what is
    there. lacking.nodes: (): nobody knows which nodes they are."""

    lacking: KnownStep


@dataclass(frozen=True, slots=True)
class AwaitRoom:
    """No script starts yet: the memory of machines is full, perhaps for a moment only. workers: of these machines."""

    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CopyThin:
    """Copy parts that too few machines have, each to others, before any script starts."""

    parts: tuple[ThinPart, ...]


@dataclass(frozen=True, slots=True)
class StartScript:
    """Start the script: all workers are ready for the round, and its store listens.

    source: what the script loads if it calls elastic.keep. held: the segments that each worker has found. thin: parts
    of the source that one machine alone still has. without: workers whose report says that they have no
    memory, or no room in it, so that no script keeps or loads anything.
    """

    store: tuple[str, int]
    source: KeptStep | None = None
    held: Mapping[str, tuple[HeldSegment, ...]] = field(default_factory=dict)
    thin: tuple[ThinPart, ...] = ()
    without: tuple[str, ...] = ()

    @property
    def incomplete(self) -> bool:
        """Whether there are segments, and no step is whole."""
        return self.source is None and not self.without and any(self.held.values())


@dataclass(frozen=True, slots=True)
class Blame:
    """The script of this worker has failed first; the others had to fail too."""

    worker: str
    failure: Failure


@dataclass(frozen=True, slots=True)
class HashKept:
    """All scripts have ended with status 0, and have kept a last step: each worker digests a share of it. source: the
    step; None: it is not whole. held: as of StartScript."""

    source: KeptStep | None
    held: Mapping[str, tuple[HeldSegment, ...]]


@dataclass(frozen=True, slots=True)
class AllDone:
    """All scripts have ended with status 0: the job is done. digest: of the last step; "": it is not known."""

    digest: str = ""


@dataclass(frozen=True, slots=True)
class Hang:
    """No script of the round gets anywhere: each worker shows where its script is, and the round ends.

    worker: the one that fails for all. A slot counts its own failures, so it is of the same slot each time.
    hanging: workers whose scripts run. idle_s: seconds for which none of them has used a processor.
    """

    worker: str
    hanging: tuple[str, ...]
    idle_s: float

    @property
    def said(self) -> str:
        return f"no script used a processor for {self.idle_s:.0f} s: {', '.join(self.hanging)}"


@dataclass(frozen=True, slots=True)
class GoOn:
    """Nothing is to be done. failing: a script has failed, and others may have failed before it."""

    failing: bool = False


Begun: TypeAlias = LookAtKept | AwaitRoom | AwaitNodes | CopyThin | StartScript
Decision: TypeAlias = Begun | Blame | HashKept | AllDone | Hang | GoOn


def decide(
    reports: Mapping[str, ScriptReport],
    members: Sequence[str],
    generation: int,
    *,
    failing: bool,
    hang_s: float = math.inf,
) -> Decision:
    """What all workers do after an exchange; they have the same reports, so they decide alike.

    reports: by worker id. members: of this worker's generation, in rank order. failing: a failure was in the reports
    before these, so a worker is blamed; SIGKILL is blamed at once. hang_s: seconds for which all scripts may use no
    processor.

    A member may be lost between the exchange and this decision, and only some survivors know of it yet. So the one
    decision after which nobody comes to another exchange, AllDone, follows from the reports alone.
    """
    if (over := _all_done(reports)) is not None:
        return over
    found = [(worker, reports[worker]) for worker in members if worker in reports]
    if len(found) < len(members) or any(report.generation != generation for _, report in found):
        return GoOn()
    failures = [(worker, report.failure) for worker, report in found if report.failure is not None]
    if failures:
        first = min(failures, key=lambda entry: (*entry[1].order, entry[0]))
        return Blame(*first) if failing or first[1].is_cause else GoOn(failing=True)
    hanging = {worker: report.idle_s for worker, report in found if report.state is ScriptState.RUNNING}
    states = {report.state for _, report in found}
    if hanging and states <= {ScriptState.RUNNING, ScriptState.DONE} and min(hanging.values()) >= hang_s:
        return Hang(min(hanging, key=_slot), tuple(hanging), min(hanging.values()))
    if states == {ScriptState.DONE}:
        held = {worker: report.held or () for worker, report in found}
        return HashKept(newest_whole(one for segments in held.values() for one in segments), held)
    store = found[0][1].store
    return _begin(store, dict(found), members) if states == {ScriptState.WAITING} and store else GoOn()


def _begin(store: tuple[str, int], waiting: Mapping[str, ScriptReport], members: Sequence[str]) -> Begun:
    """All wait. What scripts have kept is looked at when none of them runs any more, on any machine.

    In a round in which a script kept nothing any more it has gone on, and its own files are newer than what earlier
    rounds have kept. Of that round a machine may have newer steps, where each machine has all; nobody is waited for."""
    off = max(report.off for report in waiting.values())
    held: dict[str, tuple[HeldSegment, ...]] = {}
    for worker, report in waiting.items():
        if report.held is None:
            return LookAtKept()
        held[worker] = tuple(one for one in report.held if one.round >= off)
    may_wait = max(report.lacking_s for report in waiting.values()) < LACKING_S
    if without := tuple(worker for worker, report in waiting.items() if not report.memory):
        # To begin without what is kept makes it void on all machines, which a moment without room is not worth.
        full = all(waiting[worker].memory is None for worker in without)
        lost = any(held.values()) or any(report.known is not None for report in waiting.values())
        return AwaitRoom(without) if full and lost and may_wait else StartScript(store, without=without)
    every = [one for segments in held.values() for one in segments]
    source = newest_whole(every)
    said = [report.known for report in waiting.values() if report.known is not None and report.known.round > off]
    known = max(said, key=lambda one: (bool(one.nodes), one), default=None)
    lacking = awaited(known, [one for one in every if one.round > off], source, members)
    if lacking is not None and may_wait:
        return AwaitNodes(lacking)
    thin = () if source is None else tuple(thin_parts(held, source, members))
    if thin and not all(report.copied for report in waiting.values()):
        return CopyThin(thin)
    return StartScript(store, source, held, tuple(part for part in thin if part.machines == 1))


def is_settled(reports: Mapping[str, ScriptReport], members: Sequence[str], generation: int, begun: int) -> bool:
    """Whether what earlier rounds have kept is not needed any more: each script has kept two steps of this round, of
    which all have the first one. On one machine both are whole, so one may be damaged; on several machines the first
    one is mirrored, and a script is at most one ahead of another. begun: the step with which the round has begun."""
    found = of_round(reports, members, generation)
    return _common(found, [report.before for report in found]) > begun


def safe_step(reports: Mapping[str, ScriptReport], members: Sequence[str], generation: int) -> int:
    """The step of the round in progress before which no later round goes back, whichever machine is lost; 0 or less:
    there is none yet."""
    alone = len(set(map(node_of, members))) == 1
    found = of_round(reports, members, generation)
    return _common(found, [report.kept if alone else report.before for report in found])


def _common(found: Sequence[ScriptReport], steps: Sequence[int]) -> int:
    """The least of these steps, one of each script; -1: there is none, or a script has not kept it."""
    least = min(steps, default=-1)
    return least if all(report.first <= least for report in found) else -1


def tells_new_ones(worker: str, reports: Mapping[str, ScriptReport], members: Sequence[str]) -> bool:
    """Whether this worker is to tell new ones what is not in the ledger yet: the first one that knows. reports: of all
    members."""
    know = [member for member in members if reports[member].recorded >= 0]
    return len(know) < len(members) and know[:1] == [worker]


def of_round(reports: Mapping[str, ScriptReport], members: Sequence[str], generation: int) -> Sequence[ScriptReport]:
    """The reports of all members, if all are in the round of this generation; otherwise none. A worker that knows of a
    loss already has the survivors as members, while their reports are of the round before: these are not all."""
    found = [reports[worker] for worker in members if worker in reports]
    alike = all((one.generation, one.world) == (generation, len(members)) for one in found)
    return found if alike and len(found) == len(members) else []


@dataclass(slots=True)
class RoundState:
    """Where one worker stands: the round that it is in, and what its script does there."""

    generation: int = 0
    """The generation whose round this is; 0: none yet."""
    world: int = 0
    """The number of its members."""
    script: ScriptState = ScriptState.WAITING
    failure: Failure | None = None
    failing: bool = False
    over: bool = False
    """Whether a worker is to blame: the round ends when that worker has left. The next exchange begins at once; it
    cannot be complete before."""
    held: tuple[HeldSegment, ...] | None = None
    """What this worker has found when it looked at segments in this round."""
    copied: bool = False
    kept: int = -1
    before: int = -1
    first: int = -1
    memory: bool | None = True
    known: KnownStep | None = None
    logged: tuple[LoggedStep, ...] = ()
    tells: bool = False
    hashed: bool = False
    digests: Mapping[str, str] | None = None
    off: RoundNumber = NO_ROUND
    """See ScriptReport."""
    begun: int = 0
    """The step with which the script has begun."""

    def enter(self, generation: int, world: int) -> None:
        """Enter the round of a generation. The caller has ended the script of the round before."""
        self.generation, self.world = generation, world
        self.script, self.failure, self.failing, self.over = ScriptState.WAITING, None, False, False
        self.held, self.copied, self.kept, self.before, self.first, self.begun = None, False, -1, -1, -1, 0
        self.hashed, self.digests = False, None

    def ended(self, failure: Failure | None, *, last: bool = True) -> None:
        """A process of the script has ended by itself. failure: None: with status 0. last: no other one runs here."""
        if failure is not None:
            self.script, self.failure = (
                ScriptState.FAILED,
                min(failure, self.failure or failure, key=lambda one: one.order),
            )
        elif last and self.failure is None:
            self.script = ScriptState.DONE

    def keeps(self, step: int) -> None:
        """The script has kept this step, the newest that is found; -1: none."""
        self.before = self.kept if step > self.kept else self.before
        self.kept = step
        self.first = step if self.first < 0 else self.first

    def starts(self, start: StartScript, number: RoundNumber) -> None:
        """The scripts of all workers begin. number: of the round."""
        self.begun = start.source.step if start.source is not None else 0
        self.known = KnownStep(number, self.begun, tuple(sorted(set(map(node_of, start.held)))))

    def learn(self, reports: Mapping[str, ScriptReport], members: Sequence[str], number: RoundNumber) -> None:
        """From the reports of an exchange: what all scripts of this worker's round have kept, and mirrored, and which
        round is the newest in which a script of any worker keeps nothing."""
        self.off = max(self.off, *(report.off for report in reports.values()))
        step = safe_step(reports, members, self.generation)
        if step >= 0 and self.script is not ScriptState.WAITING:
            self.known = KnownStep(number, step, tuple(sorted(set(map(node_of, members)))))

    def report(
        self, store: tuple[str, int] | None, idle_s: float = 0.0, lacking_s: float = 0.0, recorded: int = -1
    ) -> ScriptReport:
        """store: where this worker has rank 0. idle_s: of a script that runs. lacking_s, recorded: see ScriptReport."""
        idle_s = idle_s if self.script is ScriptState.RUNNING else 0.0
        held = self.held if self.script in (ScriptState.WAITING, ScriptState.DONE) else None
        said = ScriptReport(self.generation, self.world, self.script, store, self.failure, idle_s)
        said = replace(said, held=held, copied=self.copied, kept=self.kept, memory=self.memory)
        said = replace(said, known=self.known, lacking_s=lacking_s)
        said = replace(said, logged=self.logged, hashed=self.hashed, digests=self.digests)
        said = replace(said, before=self.before, first=self.first, recorded=recorded)
        return replace(said, tells=self.tells, off=self.off)

    def decide(
        self, reports: Mapping[str, ScriptReport], members: Sequence[str], generation: int, hang_s: float
    ) -> Decision:
        """See the function `decide`. generation, members: those that this worker knows now."""
        decision = decide(reports, members, generation, failing=self.failing, hang_s=hang_s)
        self.failing = isinstance(decision, GoOn) and decision.failing
        self.over = isinstance(decision, Blame)
        return decision


def _all_done(reports: Mapping[str, ScriptReport]) -> AllDone | None:
    """None: these are not the reports of all members of one round, or a script has not ended with status 0, or the last
    step has no digest yet."""
    every = reports.values()
    rounds = {(report.generation, report.world) for report in every}
    done = all(report.state is ScriptState.DONE for report in every)
    if not done or len(rounds) != 1 or len(reports) != next(iter(rounds))[1]:
        return None
    if len({report.kept for report in every}) > 1 or min(report.kept for report in every) < 0:
        return AllDone()
    if not all(report.hashed for report in every):
        return None
    shares = [report.digests for report in every if report.digests is not None]
    return AllDone(combined(shares) if len(shares) == len(reports) else "")


def _slot(worker: str) -> tuple[str, int, int]:
    node, slot, incarnation = worker.rsplit(".", 2)
    return node, int(slot), int(incarnation)
