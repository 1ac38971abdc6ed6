"""A script that was written for N ranks, in one worker: where it is, and what comes next.

All seams end here. The script asks for batches, calls backward() and steps its optimizers; this hands out turns, ends
passes and steps, and says what is silent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from enum import StrEnum
from types import FrameType
from typing import Any, ClassVar

import torch.distributed as dist

from elastic.errors import ConfigError, JoinMissed
from elastic.protocol.loop_state import LoopKind
from runtime.data.random_state import randomness_kept, seed_shard
from runtime.frontends.ddp import mistakes
from runtime.frontends.ddp.evaluation.evaluations import Evaluations
from runtime.frontends.ddp.frames.places import ScriptFrames
from runtime.frontends.ddp.rank_source import Position, RankSource
from runtime.frontends.ddp.script.calls import CollectiveCalls
from runtime.frontends.ddp.script.epochs import ScriptEpochs
from runtime.frontends.ddp.script.kept_values import KeptValues
from runtime.frontends.ddp.script.loop import BatchLoop
from runtime.frontends.ddp.script.objects import ScriptObjects
from runtime.frontends.ddp.script.turns import Turns
from runtime.guards.checks import OPTIONAL
from runtime.loop.job import Job
from runtime.loop.loops import Extent, Steps
from runtime.loop.passes import PassWork
from runtime.loop.training import Training
from runtime.script_files import drawn_by_hand

ALLOW = OPTIONAL - {"StateChanged"}
"""Guards that logical ranks do without: everything that is trained is seen when it is made, accumulation divides its
losses, and zero_grad() may stand at the top of a turn."""


class Turn(StrEnum):
    """Where the script is in its training loop."""

    OUTSIDE = "outside"
    OFFERED = "offered"
    """It has the first batch of an iteration over its loader, which no model has seen yet."""
    OPEN = "open"
    """It has a batch, and its backward() is still to come."""
    UNREDUCED = "unreduced"
    """Its backward() came under no_sync(): this rank's gradients are added up."""
    ENDED = "ended"
    """Its backward() has asked for the gradients of all ranks."""
    PASSING = "passing"
    """The epoch is over: a newcomer runs one batch of it, of which nothing stays."""
    ELSEWHERE = "elsewhere"
    """A framework's own loop trains: see frontends/frameworks."""


class RankScript:
    """Used by the thread that made it only: `current` is None in all others."""

    _here: ClassVar[threading.local] = threading.local()

    job: Job
    home: int
    """The rank that the script sees in its environment, 0..ranks-1."""

    def __init__(self, ranks: int, below: FrameType | None = None) -> None:
        """below: of the frames that stand when the script begins, the innermost one that is not the script's."""
        self.ranks = ranks
        self.objects = ScriptObjects()
        self.turn = Turn.OUTSIDE
        self.loaded: list[dict[Any, Any]] = []
        """What torch.load() has given before the training loop."""
        self.batches = 0
        """Training batches that were handed out."""
        self.turned: list[int | None] = []
        """The ranks of this worker's turns in the pass in progress, the current turn included; None: of no rank."""
        self.calls = CollectiveCalls()
        self.evaluations = Evaluations(self)
        self.asked_for_rank_0 = False
        """The script has asked, since the last backward(), whether it is rank 0."""
        self.in_backward = False
        """In the outermost backward(); reentrant checkpointing calls others inside of it."""
        self.begun = False
        """The training loop has begun: a model has seen its first batch."""
        self.frames = ScriptFrames(below)
        self.epochs = ScriptEpochs()
        self._kept = KeptValues(self.frames, self.objects)
        self._asked: Callable[[Position], RankSource] | None = None
        """Makes the batches of the epoch that the script has asked for, until a model has seen the first one."""
        self._loop = BatchLoop(self.frames)
        self._source: RankSource | None = None
        self._offered = (0, 0)
        """Number and rank of the batch that the script took last."""
        self._steps: Steps | None = None
        self._turns: Turns | None = None
        self._stepped = True
        """An optimizer has stepped since the last result."""
        self._void = False
        """The batch that was offered is not of the rank that is to be computed: the turn is for nobody. It goes on to
        its last backward() as any other, as a loop over accumulated batches cannot be begun anew in its middle."""
        self._at_top: set[tuple[int, str]] = set()
        """What acted after a batch was offered and before a model saw it: (id, method)."""
        self._reduces: bool | None = None
        """Whether the next backward() reduces, as the forward()s since the last backward() ask; None: none came."""

    @classmethod
    def current(cls) -> RankScript | None:
        """The script that this thread runs, or None."""
        found: RankScript | None = getattr(cls._here, "script", None)
        return found

    @classmethod
    def running(cls) -> RankScript:
        """The script that this thread runs; the caller knows that there is one."""
        found = cls.current()
        assert found is not None
        return found

    def enter(self) -> None:
        """Become the current script of this thread."""
        self._here.script = self

    def connect(self, job: Job) -> None:
        """Become the script of this job's worker."""
        self.job = job
        self.home = min(self.training.session.home.rank, self.ranks - 1)

    def hand_over(self, loop: int, entry: int) -> None:
        """A framework's own loop trains now. loop: its number. entry: that of the loop in which this worker came."""
        self.begun, self.turn, self.epochs.now, self.epochs.entry = True, Turn.ELSEWHERE, loop, entry

    @property
    def training(self) -> Training:
        return self.job._training

    # What the script makes

    def made(self, kind: str, thing: object) -> None:
        """Raises ConfigError for what comes after the first batch: a newcomer would not have it."""
        if self.begun and self.turn is not Turn.ELSEWHERE:
            raise mistakes.made_late(f"a {type(thing).__name__}")
        self.objects.add(kind, thing)

    @property
    def rank_now(self) -> int:
        """Which rank the script is for what one rank alone does: 0 in the leader, never in a silent turn or in an epoch
        that is over in the job."""
        return self.ranks if self.mute or self.training.at.joining else self.job.rank

    @property
    def mute(self) -> bool:
        """Whether what the script says now is said once too often: in a silent turn, or in an epoch that is over."""
        loop = self.evaluations.loop
        return self.silent or self.passing or (loop is not None and loop.silent)

    @property
    def silent(self) -> bool:
        """Whether what the script does to its state now would be done once too often."""
        if self.turn is Turn.PASSING or self._void:
            return True
        if self._turns is None or self._turns.over:
            return False
        return self.turn is Turn.ENDED or len(self.turned) > 1

    @property
    def passing(self) -> bool:
        """Whether the script is in an epoch that is over in the job, or behind such an epoch: nothing of it counts."""
        return self.begun and self.epochs.passed_by

    def stepped(self) -> None:
        """An optimizer has stepped, or a GradScaler has decided that it does not."""
        self._stepped = True

    def holds_back(self, thing: object, method: str) -> bool:
        """Whether a method that changes the state of something is to do nothing: in a silent turn, in an epoch that is
        over in the job, or if it repeats the top of a turn that was for nobody."""
        at_top = (id(thing), method)
        if self.turn is Turn.OFFERED:
            self._at_top.add(at_top)
        over = self.passing and self.turn is not Turn.ELSEWHERE  # a framework's loop that is over is not gone through
        return self.silent or over or (self.turn is Turn.OPEN and at_top in self._at_top)

    # Epochs and steps

    def iterate(self, iterator: Any, source: Callable[[Position], RankSource]) -> None:
        """The script begins to iterate over its training batches. Raises LeftPass."""
        self._end_epoch()
        self._asked = source
        self._loop.begin(iterator)

    def withdraw(self) -> bool:
        """Whether the first batch of an iteration has gone through a model without gradients alone, so that the loop is
        an evaluation. Then all is as if that batch had not been handed out."""
        if self.turn is not Turn.OFFERED or self._asked is None or not self.evaluations.without_gradients:
            return False
        self.release()
        self._kept.withdraw()
        self._asked, self._source, self.turn = None, None, Turn.OUTSIDE
        return True

    @property
    def between(self) -> bool:
        """The script is between a batch and its backward(), where nothing can be done together."""
        if self.turn is Turn.OFFERED:  # unless the script has left the loop at its top
            return not self._loop.left
        return self.turn in (Turn.OPEN, Turn.UNREDUCED) or (self.turn is Turn.ELSEWHERE and self.training.at.in_pass)

    def _offer(self, source: RankSource, number: int) -> Any:
        """The first batch of a step, of the rank whose turn will probably be the first. The step begins when a model
        sees it: scripts take a batch to look at, or leave the loop at its top."""
        self._source = source
        owned = self.training.session.owned(self.ranks)
        self._offered = (number, self._first_rank(owned))
        self._kept.step_offered()
        self._at_top.clear()
        self._loop.offered(first=self._asked is not None)
        batch = source.offer(*self._offered, owned)
        at = self.training.at
        seed_shard(self.training.seed, at.step + int(at.in_step), 0, self._offered[1])  # also behind a `break`
        self.turn = Turn.OFFERED
        return batch

    def _first_rank(self, owned: tuple[int, ...] | None) -> int:
        """Whose turn will probably be the first. A loss or a join until the step begins makes it another one."""
        return owned[0] if owned else 0

    def _begin_step(self) -> None:
        """The model is about to see the batch that was offered."""
        source = self._source
        assert source is not None
        self.objects.end_undone()
        if self.evaluations.running:
            raise mistakes.in_evaluation("a training step")
        self._loop.check_asked()
        self._kept.model_sees()
        if self._asked is not None:
            self._asked = None
            self._begin_epoch(source)
            if self.passing:
                self.turn = Turn.PASSING
                self.objects.keep_buffers()  # what a run goes on from is in them already
                return
        assert self._steps is not None
        resumed = self._kept.position.copied and not self.training.at.joining
        self._kept.step(self.training.at.step, resumed=resumed)
        if self.training.examiner is not None:
            self.training.examiner.sizes = self._kept.sizes()
        try:
            next(self._steps)
        except StopIteration:
            raise SystemExit(0) from None  # the job is stopped; the script would begin its next epoch
        self._turns = self._new_turns()
        self._turns.begin()
        self._turns.following()
        self.turn = Turn.OPEN
        needed = self._turns.batch_of
        self._void = resumed or (needed is not None and self._offered != (source.first, needed))
        if self._void:
            self._kept.copies.keep()
        else:
            self._at_top.clear()
        self.turned.append(None if self._void else self._turns.rank)

    def _begin_epoch(self, source: RankSource) -> None:
        if not self.begun:
            self._begin()
            self.epochs.begin(source, self.training.newcomer.data, joining=self.training.at.joining)
        else:
            self.epochs.now += 1
        if self.passing:
            return
        training = self.training
        if self._steps is not None:
            training.end_epoch(last=False)
        training.begin_epoch(self.epochs.now)
        if not training.at.elsewhere:
            self._kept.position.batch = 0
        first = training.begin_steps(self.epochs.about(source))
        work = PassWork(self.ranks, source, "mean", ALLOW)
        self._steps = Steps(training, work, Extent(first, self.epochs.now, None, None, None))

    def _begin(self) -> None:
        self.begun = True
        named = self._kept.named(self.loaded)
        self.loaded.clear()
        self.job.register(**named)
        self.training.carrier.leave_undigested("position")
        self.training.agreement.where = lambda: {"batch of the epoch": str(self._kept.position.batch)}
        self.training.agreement.claim_shards(self.ranks)
        self.training.agreement.plan_steps(None, self.ranks)
        self.training.enter_loop(LoopKind.EPOCHS)
        self.epochs.entry = self.training.at.epoch
        self._kept.loop_begins()

    def next_batch(self) -> Any:
        """Raises StopIteration when the epoch is over; what the guards say of the turn before."""
        batch = self._next_batch()
        self._reduces = None
        self.evaluations.training_goes_on()
        self.calls.batch_handed_out()
        self.batches += 1
        return batch

    def _next_batch(self) -> Any:
        match self.turn:
            case Turn.OUTSIDE:
                if self._asked is None:
                    raise mistakes.other_loop()
                if not dist.is_initialized():
                    raise ConfigError("the training loop began before dist.init_process_group(); call that first")
                wanted = self._asked(self._kept.position)
                if len(wanted) == 0:
                    self._asked = None
                    raise StopIteration
                return self._offer(wanted, 0)
            case Turn.OFFERED | Turn.OPEN:
                raise mistakes.read_ahead()
            case Turn.PASSING:
                self.objects.undo_backward()
                self._end_epoch()
                raise StopIteration
        turns, source = self._turns, self._source
        assert turns is not None and source is not None
        reduced, self.turn = self.turn is Turn.ENDED, Turn.OPEN
        if not reduced:
            return turns.more(void=self._void)
        self._kept.check_iterators()
        self._loop.check_counting()
        if not turns.over:
            self._kept.undo()
            if self._void:
                self._void = False
                self.turned.pop()
        else:
            if not self._stepped and self.objects.weights_changed():
                raise mistakes.changed_by_hand()
            if self._stepped or not source.left:
                return self._next_step(source)
            self._kept.pass_begins()
            self._turns = turns = self._new_turns()
            turns.begin()
        batch = turns.following()
        self.turned.append(turns.rank)
        return batch

    def _new_turns(self) -> Turns:
        """A pass begins."""
        assert self._steps is not None and self._steps.running is not None and self._source is not None
        self.turned.clear()
        self.calls.brought.clear()
        return Turns(self.training, self._steps.running, self._source)

    def _next_step(self, source: RankSource) -> Any:
        assert self._steps is not None and self._steps.running is not None
        source.end_step()
        if source.left and not self._loop.ends_early(self.training):
            return self._offer(source, source.first)
        self._steps.running.ended = True
        self._end_epoch()
        try:
            next(self._steps)
        except StopIteration:
            if self.training.riders.stopped is not None:
                raise SystemExit(0) from None
            raise
        raise AssertionError("an epoch that has ended has no further step")

    def _end_epoch(self) -> None:
        """The script has left its loop: by `break`, or because the epoch has no more batches."""
        if self._turns is not None and not self._turns.over:
            raise mistakes.left_turn()
        self._turns, self.turn = None, Turn.OUTSIDE
        self.turned.clear()
        self.release()
        self._source = None

    @property
    def number(self) -> int:
        """The number in its epoch, from 0, of the batch that was handed out last, as a rank counts its batches."""
        if self.turn is Turn.OFFERED or self._turns is None:
            return self._offered[0]
        return self._turns.number

    @property
    def data_of_others(self) -> Mapping[str, Any] | None:
        """What others, or the run from which this one goes on, say of the data of their epoch, where this worker comes
        to it; None elsewhere."""
        return self.training.newcomer.data if self.begun and 0 < self.epochs.entry == self.epochs.now + 1 else None

    @property
    def handed_out(self) -> int:
        """Batches that loops were handed out, as far as their numbers are known."""
        return self.batches + self.evaluations.batches

    @property
    def place_in_loop(self) -> int | None:
        """The number of the batch that was handed out last, as a rank counts the batches of its loop; None: a loop in
        which that is not known."""
        if self.evaluations.loop is not None:
            return self.evaluations.loop.place
        return self.number if self.turn in (Turn.OFFERED, Turn.OPEN) else None

    # Forward and backward

    def forward(self, *, reduces: bool) -> None:
        """A DistributedDataParallel model runs, and its backward() is to reduce or not, as DDP's own."""
        if self.turn is Turn.OFFERED:
            if self.in_backward:
                raise mistakes.forward_in_backward()
            with randomness_kept():
                self._begin_step()
        if self.turn is Turn.UNREDUCED:
            self.turn = Turn.OPEN  # once more with the same batch
        if self.turn is Turn.OPEN and self._turns is not None and self._turns.fresh and self._reduces is None:
            self._turns.settle_rates()
            self.objects.note_settings()
            self.training.carrier.settle()
            if not self.training.at.joining:
                self._kept.settle(self._turns)
        self._reduces = None if self.turn is Turn.ELSEWHERE and self.between else reduces or bool(self._reduces)

    def before_backward(self) -> None:
        """Raises TwoBackwards, UnknownBatches, StrayGradient."""
        if self._void:
            return
        if self.turn is Turn.OPEN:
            if self._turns is not None and self._turns.fresh and self._reduces is not None:
                self._turns.set_gradients_aside()
        elif self.turn is Turn.ENDED and self._reduces is None:
            self.objects.note_gradients()  # this backward() is of no model's output
        elif self._reduces is not None and self.turn is not Turn.PASSING and not self.between:
            if self.turn is Turn.ENDED:
                raise mistakes.two_backwards()
            standing = self.frames.standing()
            raise mistakes.unknown_batches(drawn_by_hand(standing[-1], self.objects.wrapped) if standing else ())

    def after_backward(self) -> None:
        """Ends the turn if it was asked for, and the pass if it was the last one."""
        if self.objects.gradients_changed():
            raise mistakes.two_backwards()
        if self._turns is None or self.turn is not Turn.OPEN or self._reduces is None:
            return
        if not self._reduces:
            self.turn, self._reduces = Turn.UNREDUCED, None
            if not self._void:
                self._kept.copies.keep()  # whether this turn is silent is not known yet
            return
        self.turn, self._reduces, self.asked_for_rank_0 = Turn.ENDED, None, False
        if not self._void:
            self._kept.copies.check_unchanged()
            self._turns.backward_ended()
            self._kept.backward_ended(self._turns)
            if self._turns.over:
                self._stepped = False
                self.objects.note_weights()
                self._kept.copies.done()
                return
            self._kept.copies.keep()
        # What the script sets behind a silent turn is put back, and what it sets at the top of a turn comes once more.
        self.training.carrier.unsettle()
        self._kept.keep_loop()

    # Evaluation

    def occasion(self, call: str) -> str:
        """A name for a call for all ranks, which a worker that passes by this epoch later gives it too."""
        lines = [frame.f_lineno for frame in self.frames.standing()]
        return self.calls.occasion(f"behind epoch {self.epochs.now} {call} {lines}")

    # The end

    def release(self) -> None:
        """End the processes that fetch batches ahead."""
        if self._source is not None:
            self._source.close()

    def leave(self) -> None:
        """The script's process group is destroyed, or the script has ended: there are no more steps."""
        if not self.begun or self.training.at.is_over:
            return
        if self.training.at.joining:
            now, entry = self.epochs.now, self.epochs.entry
            raise JoinMissed(f"the script was over in epoch {now}, and the job is in epoch {entry}")
        if self.epochs.now + 1 < self.epochs.entry and self.turn is not Turn.ELSEWHERE:
            raise mistakes.over_before(self.epochs.now, self.epochs.entry)
        if self.evaluations.running:
            raise mistakes.in_evaluation("the end of the script")
        self._end_epoch()
        self.training.end_loop()

    def close(self) -> None:
        """The script has ended. Raises UnknownBatches if it has trained nothing: what a job leaves is trained."""
        if not self.begun:
            raise mistakes.never_trained()
        self.leave()
        self.job.close()
