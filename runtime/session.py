"""What the user's loop needs from the world: one operation after another, whoever computes its units.

An *operation* is everything that all members do together: a pass over the shards of a step, an evaluation, a
`once` block, leaving the job. Operations are numbered 0, 1, 2, ... in the same order on every member. Each has
*units* (shards of a pass, parts of an evaluation), which are the leaves of the canonical tree. The loop is

    session.begin(op, fingerprint)
    while True:
        while (unit := session.next_unit()) is not None:
            session.unit_done(compute(unit))          # a leaf: Partial(unit, unit + 1, ...)
        if (result := session.finish()) is not None:
            break                                     # Partial(0, units): the same bits on every member

`finish` returns None when a member was lost and this worker inherits more units. Two implementations:
SingleSession (single.py: a job of one) and WorkerSession (worker_session.py: a worker under an agent).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, Self

import torch

from elastic.checkpoints.naming import EntryName
from runtime.reduction.partial_sum import Json, Partial
from runtime.state.training_state import Carrier


class OpKind(StrEnum):
    SYNC = "sync"
    """The first operation: members compare their initial state; those that differ copy rank 0's."""
    PASS = "pass"
    EVALUATE = "evaluate"
    ONCE = "once"
    ALLREDUCE = "allreduce"
    """Every member brings a value of its own."""
    LEAVE = "leave"


@dataclass(frozen=True, slots=True)
class Op:
    """What is done together. Two members that disagree about it stop the job (LeftAlone, Disagree)."""

    kind: OpKind
    units: int
    epoch: int = 0
    step: int = 0
    pass_no: int = 0
    label: str = ""
    early: bool = False
    """Between the hand-out of its step and the first pass."""


@dataclass(frozen=True, slots=True)
class Copy:
    """The state with which a step's first pass begins, as Carrier.capture gives it."""

    op: Op
    header: dict[str, Json]
    blobs: Sequence[torch.Tensor]
    values: dict[str, Json]
    """job.state without tensors as it was when the step was handed out."""
    early: dict[str, Json]
    """What was called between that and the pass, and what it gave, by its key."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One line of steps.jsonl: an applied step.

    samples: per shard in shard order, the dataset indices, or what else says what it was given. data: what the epoch's
    samples are planned from (Plan.about); None if the script draws its own.
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
        """As the ledger has read it."""
        scalars = {name: float(value) for name, value in line["scalars"].items()}
        return cls(**{**line, "lr": tuple(map(float, line["lr"])), "scalars": scalars})


@dataclass(frozen=True, slots=True)
class JoinMeta:
    """What a newcomer needs before it can enter the loop: where the job stands and the script's own values."""

    epoch: int
    step: int
    epoch_start: int
    """Step with which the loop over this epoch's steps began; a bare steps() loop is one epoch, number 0."""
    state: dict[str, Json]
    once: dict[str, Json]
    """Results of the evaluations and `once` blocks of this epoch that came before its steps, by their label."""
    shared: dict[str, Json] = field(default_factory=dict)
    """What `shared` calls before the loop gave, by name."""
    data: dict[str, Json] | None = None
    """What the samples of this epoch are planned from, as in StepRecord."""
    early: dict[str, list[Json]] = field(default_factory=dict)
    """What was called between the hand-out of a step and its first pass: key -> [the last such step, what it gave]."""
    values: dict[str, Json] = field(default_factory=dict)
    """job.state as it was when the epoch was handed out, with the tensors of values that hold few; `state` is that of
    the step."""

    def early_in(self, step: int) -> dict[str, Json]:
        """What was called so in this step, and what it gave."""
        return {key: value for key, (called, value) in self.early.items() if called == step}


@dataclass(frozen=True, slots=True)
class LoopPlace:
    """One generation as this worker sees it. rank == world: it is no member of it."""

    generation: int
    rank: int
    members: tuple[str, ...]
    """Worker ids in rank order."""
    token: str
    """Hexadecimal digits that no other generation has, also none of another run of the job."""

    @property
    def world(self) -> int:
        return len(self.members)


@dataclass(frozen=True, slots=True)
class DrainNotice:
    """This worker's node has to go by then, of time.monotonic(). signalled: its agent was told so by SIGTERM."""

    until_s: float
    because: str
    signalled: bool = False


class Session(Protocol):
    """See the module's docstring. Called by the user's thread only."""

    @property
    def worker_id(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def generation(self) -> int: ...
    def owned(self, units: int) -> tuple[int, ...] | None:
        """The units that this member computes of an operation with so many, while nobody is lost; None: no member."""
        ...

    @property
    def because(self) -> str:
        """Why the current generation exists."""
        ...

    @property
    def began(self) -> str:
        """The snapshot or checkpoint from which the job went on when every copy of the state had been lost, or ""."""
        ...

    @property
    def pauses(self) -> bool:
        """The current generation is below quorum: the next step waits for more members."""
        ...

    @property
    def parting(self) -> bool:
        """A generation without anybody is planned: all stop after a step, as soon as each of them may."""
        ...

    may_part: bool
    """Set before an operation begins: whether all may stop after it."""

    @property
    def going(self) -> DrainNotice | None:
        """What was last said of this worker's node having to go."""
        ...

    def before_leaving(self, call: Callable[[], None]) -> None:
        """Called when a generation without this worker has taken effect, before the others may forget it."""
        ...

    def place(self) -> LoopPlace:
        """Generation, rank and members of one moment. Any thread."""
        ...

    def note(self, event: str, **fields: object) -> None:
        """A line of the journal. Any thread; never waits."""
        ...

    def point(self, series: str, name: EntryName, answer: Callable[[bool], None]) -> None:
        """A checkpoint of that series is complete: ask for the pointer to it. Any thread; never waits.

        answer: called, on any thread, with whether it is the newest that the job knows and this worker may remove
        older ones; never called if nobody leads the job now.
        """
        ...

    def unreadable(self, entry: EntryName, because: str, *, memory: bool, instead: EntryName | None) -> None:
        """What the job was to go on from cannot be read here. This process ends, and a new one takes its place, which
        copies the state from those who can read it, or goes on from something else. Returns only where nobody would.

        memory, instead: as in messages.Unreadable.
        """
        ...

    @property
    def restarted(self) -> bool:
        """This process replaces an earlier incarnation of its slot."""
        ...

    @property
    def reduction(self) -> str:
        """ "exact" or "allreduce"."""
        ...

    @property
    def sums_on(self) -> torch.device:
        """Where the tensors of leaves and results are: what carries them takes and gives them there."""
        ...

    @property
    def joining(self) -> bool:
        """A newcomer that has not copied the state yet."""
        ...

    @property
    def behind(self) -> bool:
        """A newcomer whose copy is older than the step in progress: `join` in the first pass of each step, and every
        other operation, give it the result that the members have got, until it has caught up and is one of them."""
        ...

    def attach(self, carrier: Carrier) -> None:
        """The registered state, once, before the first operation; served to newcomers, compared in SYNC."""
        ...

    def publish(self, meta: JoinMeta) -> None:
        """Called at every step hand-out, and with what was called since, before the pass: what a newcomer's `meta` gets
        meanwhile."""
        ...

    def await_invitation(self) -> None:
        """Newcomer only, with everything set up that does not depend on where the loop stands: block until the world
        has a place for it. Ends the process if the job is over first."""
        ...

    def meta(self, until: Callable[[JoinMeta], bool] = bool) -> JoinMeta:
        """Newcomer only: ask a member. Blocks until one answers so that `until` is true of it."""
        ...

    def join(self, here: Op, fingerprint: dict[str, str], *, bound: bool = False) -> tuple[Op, Partial | None]:
        """Newcomer only, inside the first pass of a step: hold the state of a pass, and return it with its result.

        The first time, after the rehearsal, the state is copied into the carrier. It is that of the pass in progress,
        and the result comes when the planned generation takes effect; or it is older, and this worker is `behind`
        afterwards, and in its next step calls this again. None instead of the result: every member was lost and this
        copy is the state; this worker goes on by beginning that pass.

        here, fingerprint: as in `begin`, what this worker is at; the pass returned is another one if the state was
        copied, also when a worker that was behind has to copy anew. bound: what the script did before the inner loop of
        that step holds for that step only. If the members are in another step, this worker goes through theirs without
        effect (`astray`), and then calls `copy_anew`; also where they have made collective calls before that pass.
        Raises JoinMissed if the epoch is over of which `here` is part, or `meta` told: this process must be replaced;
        and what disagreeing members raise, if it was behind.
        """
        ...

    @property
    def astray(self) -> bool:
        """The last `join` entered another step than that of `here`, for which this worker was bound."""
        ...

    def copy_anew(self) -> Copy:
        """Newcomer only, between two steps, where it is `astray`: the state of the pass in progress. What the script
        has made of the copy before is worth nothing, and no other worker sees it.

        Raises JoinMissed if there is none in this epoch.
        """
        ...

    def begin(
        self, op: Op, fingerprint: dict[str, str], groups: dict[str, int] | None = None, own: Json = None
    ) -> None:
        """Start the next operation. fingerprint: name -> short value; all members must carry the same.

        groups: elements of a leaf's tensor by dtype group (see Partial.flats); none for scalar operations.
        own: of ALLREDUCE, this worker's value; the note of the result has {worker_id: value} of all members then.
        """
        ...

    def next_unit(self) -> int | None: ...
    def unit_done(self, leaf: Partial) -> None: ...
    def finish(self) -> Partial | None: ...

    def loop_over(self) -> None:
        """The script's loop is over: what it does from now on may take its time."""
        ...

    def used(self) -> None:
        """The tensors of the last result are not read here any more."""
        ...

    def applied(self, record: StepRecord) -> None:
        """The step counts: its user asked for the next one or left the loop. Goes to the ledger, never waits."""
        ...

    def history(self, first: int, end: int) -> list[StepRecord]:
        """Applied steps first..end-1 as the ledger has them: an unbroken row from `first` on, as far as it is here."""
        ...

    def failed(self, error: BaseException, step: int, shard: int | None) -> None:
        """The script raised: tell the agent where, so that a replacement failing alike ends the job."""
        ...

    def close(self, digest: str) -> None:
        """After the LEAVE operation: say goodbye and stop the session's threads."""
        ...
