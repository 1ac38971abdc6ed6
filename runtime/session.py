"""The interface between the user's loop and the world: one operation after another, with units on any workers.

An *operation* is a task that all members do together: a pass over the shards of a step, an evaluation, a `once` block,
leaving the job. Operations are numbered 0, 1, 2, ... in the same order on every member. Each has *units* (shards of a
pass, parts of an evaluation), which are the leaves of the canonical tree. The loop is

    session.begin(op, fingerprint)
    while True:
        while (unit := session.next_unit()) is not None:
            session.unit_done(compute(unit))          # a leaf: Partial(unit, unit + 1, ...)
        if (result := session.finish()) is not None:
            break                                     # Partial(0, units): the same bits on every member

`finish` returns None when a member was lost and this worker gets more units. Two implementations: SingleSession
(single.py: a job of one) and WorkerSession (worker_session.py: a worker under an agent).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, Self

import torch

from elastic.agent.worker.node_notice import NodeNotice
from elastic.checkpoints.naming import EntryName
from elastic.config import Compression, OuterOption, Reduction
from elastic.errors import JoinMissed
from elastic.protocol import loop_state
from elastic.protocol.loop_state import LoopState, Miss, Move, ScriptEvent, Standing
from elastic.protocol.outer_round import Quorum
from elastic.protocol.worker_id import node_of
from runtime.allreduce.reduction.early_sums import EarlySums
from runtime.allreduce.reduction.partial_sum import Json, Partial
from runtime.allreduce.reduction.schedule import Cut
from runtime.recovery.state.training_state import Carrier
from runtime.recovery.state.verification import Verification


class OpKind(StrEnum):
    SYNC = "sync"
    """The first operation: members compare their initial states; a member that differs copies rank 0's."""
    PASS = "pass"
    EVALUATE = "evaluate"
    ONCE = "once"
    ALLREDUCE = "allreduce"
    """Every member brings a value of its own."""
    LEAVE = "leave"


@dataclass(frozen=True, slots=True)
class Op:
    """An operation of all members. If two members disagree about it, the job stops (LeftAlone, Disagree)."""

    kind: OpKind
    units: int
    epoch: int = 0
    step: int = 0
    pass_no: int = 0
    label: str = ""
    early: bool = False
    """Whether it comes between the hand-out of its step and the first pass."""

    @property
    def joinable(self) -> bool:
        """Whether newcomers may copy the state in it, and enter: in the first pass of each step, unless that is
        computed again."""
        return self.kind is OpKind.PASS and self.pass_no == 0 and not self.label


@dataclass(frozen=True, slots=True)
class Copy:
    """The state with which a step's first pass begins, as Carrier.capture returns it."""

    op: Op
    header: dict[str, Json]
    blobs: Sequence[torch.Tensor]
    values: dict[str, Json]
    """job.state without tensors, when the step was handed out."""
    early: dict[str, Json]
    """Key -> reply of each call between the hand-out of the step and the pass."""
    stop: str | None = None
    """As in JoinMeta."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One line of steps.jsonl: an applied step.

    samples: per shard in shard order, its dataset indices, or another description of its data. data: how the epoch's
    samples are planned (SamplePlan.about); None if the script draws its own.
    """

    step: int
    epoch: int
    generation: int
    world_size: int
    lr: tuple[float, ...]
    scalars: dict[str, float]
    samples: list[Json]
    data: dict[str, Json] | None = None

    @classmethod
    def from_line(cls, line: Mapping[str, Any]) -> Self:
        """The record of a line that the ledger has read."""
        scalars = {name: float(value) for name, value in line["scalars"].items()}
        return cls(**{**line, "lr": tuple(map(float, line["lr"])), "scalars": scalars})


@dataclass(frozen=True, slots=True)
class JoinMeta:
    """What a newcomer needs before it can enter the loop: where the job stands, and the script's own values."""

    epoch: int
    step: int
    epoch_start: int
    """First step of this epoch's loop over steps; a bare steps() loop is one epoch, number 0."""
    state: dict[str, Json]
    once: dict[str, Json]
    """Label -> result of each evaluation and `once` block of this epoch before its steps."""
    shared: dict[str, Json] = field(default_factory=dict)
    """Name -> value of each `shared` call before the loop."""
    data: dict[str, Json] | None = None
    """How the samples of this epoch are planned, as in StepRecord."""
    early: dict[str, list[Json]] = field(default_factory=dict)
    """Calls between the hand-out of a step and its first pass: key -> [the last such step, the reply]."""
    values: dict[str, Json] = field(default_factory=dict)
    """job.state when the epoch was handed out, also values with small tensors; `state` is that of the step."""
    stop: str | None = None
    """Why all workers leave after the reduction that comes next, as in ControlScalars.stopping."""

    def early_in(self, step: int) -> dict[str, Json]:
        """Key -> reply of the early calls in this step."""
        return {key: value for key, (called, value) in self.early.items() if called == step}


@dataclass(frozen=True, slots=True)
class LoopPlace:
    """This worker's place in one generation. rank == world: it is not a member."""

    generation: int
    rank: int
    members: tuple[str, ...]
    """Worker ids in rank order."""
    token: str
    """Hexadecimal digits that no other generation has, of this or another run of the job."""

    @property
    def world(self) -> int:
        return len(self.members)

    def beside(self, worker_id: str) -> tuple[str, ...]:
        """The members on this worker's machine, in rank order; also the worker itself, if it is one."""
        return tuple(member for member in self.members if node_of(member) == node_of(worker_id))


@dataclass(frozen=True, slots=True)
class HomeRank:
    """What the environment of a script for torchrun says of this worker; it stays for the life of the process.

    rank: a number that no other living worker of the job has. node: the same of the node, among nodes: the node whose
    workers have the lowest number is 0.
    """

    rank: int
    node: int
    nodes: int


class ScriptLoop:
    """Where this worker's script is: the one place that changes it. Used by the user's thread only."""

    def __init__(self, *, newcomer: bool = False) -> None:
        self.at = LoopState(standing=Standing.NEWCOMER if newcomer else Standing.MEMBER)
        self.stop: str | None = None
        """Why all workers leave, as JoinMeta.stop says it, in the state that this newcomer has copied last."""

    def post(self, event: ScriptEvent) -> Move:
        """What follows from what has happened. Raises JoinMissed if this newcomer cannot become a member any more."""
        self.at, move = loop_state.step(self.at, event)
        if isinstance(move, Miss):
            raise JoinMissed(move.because)
        return move


class WorkerPlace(Protocol):
    """Which worker this is, and in which world. Properties may be read between two steps, and change there."""

    @property
    def worker_id(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def home(self) -> HomeRank: ...
    @property
    def generation(self) -> int: ...

    @property
    def alone(self) -> bool:
        """Whether there never is another worker: fingerprints are compared with nobody's."""

    @property
    def restarted(self) -> bool:
        """Whether this process replaces an earlier incarnation of its slot."""

    def place(self) -> LoopPlace:
        """Generation, rank and members at one moment. Any thread."""

    def owned(self, units: int) -> tuple[int, ...] | None:
        """The units of so many that this member computes while no member is lost; None: not a member."""

    @property
    def because(self) -> str:
        """Why the current generation exists."""

    @property
    def began(self) -> str:
        """The snapshot or checkpoint from which the job went on after every copy of the state was lost, or ""."""

    @property
    def pauses(self) -> bool:
        """Whether the current generation is below quorum, so that the next step waits for more members."""

    @property
    def parting(self) -> bool:
        """Whether a generation without members is planned: all stop after a step, as soon as each of them may."""

    @property
    def due(self) -> bool:
        """Whether workers come or go after the next operation, for which nobody waits yet."""

    def leave_if_over(self) -> None:
        """End this process if its part in the job is over. For a script that makes no operation for a while."""

    @property
    def going(self) -> NodeNotice | None:
        """The notice that this worker's node has to go, or None: there is none, or it was taken back."""


class Operations(Protocol):
    """One operation after another, as the module's docstring describes; what they carry, and what becomes of it."""

    @property
    def reduction(self) -> Reduction:
        """How gradients are summed."""

    @property
    def compression(self) -> Compression:
        """What gradients are rounded to."""

    @property
    def outer(self) -> OuterOption | None:
        """How replicas average, if the command of the job says it; None: the script does, or all steps are summed."""

    @property
    def sums_on(self) -> torch.device:
        """The device of the tensors of leaves and results."""

    may_part: bool
    """Whether all may stop after the next operation; set before it begins."""

    def begin(
        self,
        op: Op,
        fingerprint: dict[str, str],
        groups: dict[str, int] | None = None,
        own: Json = None,
        cuts: Sequence[Cut] = (),
    ) -> None:
        """Start the next operation. fingerprint: name -> short value; all members must carry the same.

        groups: elements of a leaf's tensor by dtype group (see Partial.flats); none for scalar operations. own: for
        ALLREDUCE, this worker's value; the note of the result has {worker_id: value} of all members. cuts: parts of
        these tensors that may be summed one by one, while the last unit is computed.
        """

    def next_unit(self) -> int | None: ...

    @property
    def units_left(self) -> int:
        """How many units this member has still to compute now, after the one that was handed out last."""

    def draws(self, shard: int, samples: Callable[[], str]) -> None:
        """Say how to name the samples of a shard, before they are loaded: one that ends worker after worker is told
        with them."""

    @property
    def verification(self) -> Verification: ...

    def vouch(self, shard: int, digest: str) -> None:
        """Tell the other members what this one has computed for a shard of this operation, as digest_of has it."""

    def send_early(self) -> EarlySums | None:
        """Begin to send the unit that was handed out last while it is computed, if it is this member's last one.
        Returns what takes its values as they come; None: nothing is sent early. Called at most once a unit."""

    def advanced(self) -> None:
        """The unit that was handed out last has come on by one of several parts: whoever judges how long a unit may
        take begins anew."""

    def seek(self, quorum: Quorum) -> None:
        """The operation that has begun is a round of replicas with this quorum."""

    def replica_done(self) -> None:
        """The unit that is delivered next is a replica that has made all inner steps of the round."""

    @property
    def round_over(self) -> bool:
        """Whether this worker's replica is to stop, because there are enough others (outer_round.py). Any thread."""

    def unit_done(self, leaf: Partial) -> None: ...
    def finish(self) -> Partial | None: ...

    def used(self) -> None:
        """The tensors of the last result are no longer read here."""


class JoinCalls(Protocol):
    """How a newcomer becomes a member, and what members do for that."""

    def attach(self, carrier: Carrier) -> None:
        """Set the registered state, once, before the first operation; newcomers copy it, SYNC compares it."""

    def publish(self, meta: JoinMeta | None) -> None:
        """Set what `meta` of a newcomer returns; called when a step is handed out, and after each early call. None: a
        newcomer cannot enter before the next step is handed out, and waits."""

    def await_invitation(self) -> None:
        """For a newcomer that has set up everything independent of the loop's place: block until the world has a place
        for it. Ends the process if the job is over first."""

    def meta(self, until: Callable[[JoinMeta], bool] = bool) -> JoinMeta:
        """For a newcomer: ask members, until one gives an answer for which `until` is true."""

    def registered_by_members(self, name: str) -> tuple[dict[str, Json], Sequence[torch.Tensor]]:
        """For a newcomer: a copy, as Carrier.capture returns it, of a registered object of the members that does not
        change any more, perhaps beside others. Asks until one has it."""

    def hold_to_join(self) -> None:
        """For a newcomer, before `join`: have a step of the members wait until the state of that very step is copied,
        so that the script need not follow them. The wait may end without it, see docs/protocol.md."""

    def join(self, here: Op, fingerprint: dict[str, str]) -> tuple[Op, Partial | None]:
        """After the move `Join`: hold the state of a pass; return the pass and its result.

        The first time the state is copied into the carrier. If it is that of the pass in progress, the result comes
        when the planned generation takes effect; if it is older, the script is BEHIND or ASTRAY afterwards: every
        operation gives the members' result then. None instead of the result: every member was lost and this copy is the
        state; this worker goes on by beginning that pass.

        here, fingerprint: as in `begin`, for this worker's own place; the returned pass is another one if the state was
        copied, also when a worker that was behind has to copy again. Raises JoinMissed: this process must be replaced.
        If it was behind, also raises what disagreeing members raise.
        """

    @property
    def state_given(self) -> bool:
        """Whether a newcomer may have copied from this member the state with which the last joinable operation began;
        final when that operation is over."""

    def copy_anew(self) -> Copy:
        """After the move `CopyAnew`: the state of the pass in progress. What the script has made of the last copy is
        worthless, and no other worker sees it.

        Raises JoinMissed if there is no such pass in this epoch.
        """


class Reports(Protocol):
    """What this worker tells its agent, its leader and the operator; and its end."""

    def note(self, event: str, **fields: object) -> None:
        """Write a line of the journal. Any thread; never waits."""

    def point(self, series: str, name: EntryName, answer: Callable[[bool], None]) -> None:
        """A checkpoint of that series is complete: ask to move the pointer to it. Any thread; never waits.

        answer: called, on any thread, with whether it is the newest that the job knows, so that this worker may remove
        older ones; never called if the job has no leader now.
        """

    def unreadable(self, entry: EntryName, because: str, *, memory: bool, instead: EntryName | None) -> None:
        """The entry that the job was to go on from cannot be read here. This process ends and is replaced; the new one
        copies the state from a worker that could read it, or goes on from another entry. Returns only in a job of one.

        memory, instead: as in messages.Unreadable.
        """

    def waits(self, what: str) -> None:
        """The script waits for the others outside of operations: it is not judged by how long that takes, up to the
        next operation. what: for what, in words."""

    def takes_time(self, what: str) -> None:
        """The script waits for something that is no worker, such as the storage: it is not judged by how long that
        takes, up to the next operation. what: where it is, in words."""

    def loop_over(self) -> None:
        """The script's loop is over: what follows, up to the first pass of another one, may take any time."""

    def applied(self, record: StepRecord) -> None:
        """A step is applied: its user asked for the next one or left the loop. Queue it for the ledger; never waits."""

    def history(self, first: int, end: int) -> list[StepRecord]:
        """Applied steps from `first` on, below `end`, without a gap, as far as the ledger here has them."""

    def failed(self, error: BaseException, step: int, shard: int | None) -> None:
        """The script raised: tell the agent where, so that a replacement that fails alike ends the job."""

    def before_leaving(self, call: Callable[[], None]) -> None:
        """Have `call` called when a generation without this worker took effect, before others may forget it."""

    def close(self, digest: str) -> None:
        """After the LEAVE operation: say goodbye and stop the session's threads."""


class Session(WorkerPlace, Operations, JoinCalls, Reports, Protocol):
    """All of a worker that its script uses. Called by the user's thread only."""

    script: ScriptLoop
    """Where the script is. Who calls the session tells it of the loop; the session itself, of copies and results."""
