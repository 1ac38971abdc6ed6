"""A script that was written for N ranks, in one worker: where it is, and what comes next.

All seams end here. The script asks for batches, calls backward() and steps its optimizers; this hands out turns, ends
passes and steps, and says what is silent.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from enum import StrEnum
from types import CodeType, FrameType
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import nn

from elastic.agent.worker.examination import EPOCH_STEPS
from elastic.errors import ConfigError, JoinMissed, UnknownBatches
from elastic.protocol.loop_state import LoopKind
from runtime.data.random_state import randomness_kept, seed_shard
from runtime.frontends.ddp import mistakes
from runtime.frontends.ddp.evaluation.evaluations import Evaluations
from runtime.frontends.ddp.frames.loop_shape import (
    CountingLoop,
    asked_by_head,
    counting_loop,
    inside,
    loop_around,
    would_leave,
)
from runtime.frontends.ddp.frames.loop_shape import Loop as LoopText
from runtime.frontends.ddp.frames.model_copies import ModelCopies
from runtime.frontends.ddp.frames.places import ScriptFrames
from runtime.frontends.ddp.frames.plain_values import FrameCounters, FrameValues
from runtime.frontends.ddp.frames.size_limits import SizeWatch
from runtime.frontends.ddp.rank_source import Position, RankSource
from runtime.frontends.ddp.rank_values import RankValue
from runtime.frontends.ddp.script_objects import ScriptObjects
from runtime.frontends.ddp.turns import Turns
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
        self.calls = 0
        """Collectives in the turn in progress; before the training loop, since the script has begun."""
        self.brought: dict[int, dict[int, torch.Tensor]] = {}
        """What turns of the pass in progress have brought to their n-th collective: n -> rank -> value."""
        self.results: dict[int, tuple[str, list[RankValue]]] = {}
        """What the n-th collective of the last real turn gave: n -> (call, value)."""
        self.evaluations = Evaluations(self)
        self.asked_for_rank_0 = False
        """The script has asked, since the last backward(), whether it is rank 0."""
        self.in_backward = False
        """In the outermost backward(); reentrant checkpointing calls others inside of it."""
        self.begun = False
        """The training loop has begun: a model has seen its first batch."""
        self.frames = ScriptFrames(below)
        self._position = Position()
        self._copies: ModelCopies | None = None
        self._epoch = -1
        """The epoch of the job that this worker is in, or passes by."""
        self._entry = 0
        """The epoch in which this worker came to the job."""
        self._began_with: int | None = None
        """The number that the script had given its sampler when the job began; None: not known."""
        self._asked: Callable[[Position], RankSource] | None = None
        """Makes the batches of the epoch that the script has asked for, until a model has seen the first one."""
        self._iterator: Callable[[], Any] = lambda: None
        self._loop: tuple[CodeType, LoopText] | None = None
        """The loop in which the script took the batch that it has."""
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
        self._gradient_versions: list[tuple[int, int] | None] | None = None
        """The gradients at the beginning of a backward() that came behind the turn's, and of no model's output."""
        self._weight_versions: list[int] = []
        """The weights when the last result came."""
        self._averages: dict[str, torch.Tensor] = {}
        """What a run that goes on has found in the script's own averages of the weights, until its first turn."""
        self._occasions = Counter[str]()
        """How often each call for all ranks has come since the last training batch."""
        self._counting: CountingLoop | None = None
        """The loop that has asked for the first batch of an epoch, if it counts what it asks for."""
        self._counters = FrameCounters()
        self._values = FrameValues(self.frames)
        """Plain values as they were when the first batch of the pass in progress was handed out."""
        self._at_forward = FrameValues(self.frames)
        """Plain values as they were when a model saw that batch."""
        self._sizes = SizeWatch(self.frames)

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
        self.begun, self.turn, self._epoch, self._entry = True, Turn.ELSEWHERE, loop, entry

    @property
    def training(self) -> Training:
        return self.job._training

    # What the script makes

    def made(self, kind: str, thing: object) -> None:
        """Raises ConfigError for what comes after the first batch: a newcomer would not have it."""
        if self.begun and self.turn is not Turn.ELSEWHERE:
            raise ConfigError(
                f"a {type(thing).__name__} was made after the first training batch. What is trained must be there "
                "before the loop, as a replacement that joins later copies it: make it before the first epoch"
            )
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
        return self.begun and self._epoch < self._entry

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

    @property
    def epochs(self) -> int:
        """Epochs whose training batches a model has seen, in this worker or in the job before it came."""
        return self._epoch + 1

    def iterate(self, iterator: Any, source: Callable[[Position], RankSource]) -> None:
        """The script begins to iterate over its training batches. Raises LeftPass."""
        self._end_epoch()
        self._asked, self._iterator = source, weakref.ref(iterator)

    def withdraw(self) -> bool:
        """Whether the first batch of an iteration has gone through a model without gradients alone, so that the loop is
        an evaluation. Then all is as if that batch had not been handed out."""
        if self.turn is not Turn.OFFERED or self._asked is None or not self.evaluations.without_gradients:
            return False
        self.release()
        self._values.put_back(objects=False)
        self._asked, self._source, self.turn = None, None, Turn.OUTSIDE
        return True

    @property
    def between(self) -> bool:
        """The script is between a batch and its backward(), where nothing can be done together."""
        if self.turn is Turn.OFFERED:  # unless the script has left the loop at its top
            return self._iterator() is not None and (self._loop is None or inside(self.frames.standing(), *self._loop))
        return self.turn in (Turn.OPEN, Turn.UNREDUCED) or (self.turn is Turn.ELSEWHERE and self.training.at.in_pass)

    def _offer(self, source: RankSource, number: int) -> Any:
        """The first batch of a step, of the rank whose turn will probably be the first. The step begins when a model
        sees it: scripts take a batch to look at, or leave the loop at its top."""
        self._source = source
        owned = self.training.session.owned(self.ranks)
        self._offered = (number, self._first_rank(owned))
        self._values = FrameValues.read(self.frames)
        self._counters.step(self._values)
        self._at_top.clear()
        standing = self.frames.standing()[::-1]
        self._loop = loop_around(standing)
        if self._asked is not None:
            self._counting = counting_loop(standing)
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
        self._at_forward = values = FrameValues.read(self.frames)
        if self._asked is not None:
            self._asked = None
            self._begin_epoch(source)
            if self.passing:
                self.turn = Turn.PASSING
                self.objects.keep_buffers()  # what a run goes on from is in them already
                return
        assert self._steps is not None and self._copies is not None
        self._copies.step(self.training.at.step)
        # A run that goes on has set its rates by the values of its beginning, and sets them once more by those that it
        # gets now. What it has set and averaged in the epochs that are over is in its checkpoint already.
        resumed = self._position.copied and not self.training.at.joining
        if resumed:
            self.objects.put_back_settings()
            self._copies.load_state_dict(self._averages)
        self._averages.clear()
        if not self._position.copied:
            self._position.values = self._counters.of(values, self._values)
            self._position.stale = self.objects.stale()
        if self.training.examiner is not None:
            self.training.examiner.sizes = self._sizes.step(self._copies)
        try:
            next(self._steps)
        except StopIteration:
            raise SystemExit(0) from None  # the job is stopped; the script would begin its next epoch
        self._turns = self._new_turns()
        self._turns.begin()
        self._turns.following()
        self.turn = Turn.OPEN
        needed = self._turns.batch_of
        self._void = needed is not None and (resumed or self._offered != (source.first, needed))
        if self._void:
            self._copies.keep()
            self.turned.append(None)
        else:
            self._at_top.clear()
            self.turned.append(self._turns.rank)

    def _begin_epoch(self, source: RankSource) -> None:
        if not self.begun:
            self._begin()
            self._epoch = self._first_epoch(source)
        else:
            self._epoch += 1
        if self.passing:
            return
        training = self.training
        if self._steps is not None:
            training.end_epoch(last=False)
        training.begin_epoch(self._epoch)
        if not training.at.elsewhere:
            self._position.batch = 0
        about = source.about()
        if about is not None and self._began_with is not None:
            about["began_with"] = self._began_with
        first = training.begin_steps(about)
        work = PassWork(self.ranks, source, "mean", ALLOW)
        self._steps = Steps(training, work, Extent(first, self._epoch, None, None, None))

    def _begin(self) -> None:
        self.begun = True
        named = self.objects.named()
        modules = [thing for thing in (*self.objects.wrapped, *named.values()) if isinstance(thing, nn.Module)]
        self._copies = ModelCopies(self.frames, modules, self.loaded)
        self.loaded.clear()
        if self._copies.found:
            named["averages"] = self._copies
        self.job.register(**named, position=self._position)
        self.training.carrier.leave_undigested("position")
        self.training.agreement.where = lambda: {"batch of the epoch": str(self._position.batch)}
        self.training.agreement.claim_shards(self.ranks)
        self.training.agreement.plan_steps(None, self.ranks)
        self.training.enter_loop(LoopKind.EPOCHS)
        self._entry = self.training.at.epoch
        self.objects.note_settings()
        if self._position.copied:
            self._averages = {name: tensor.clone() for name, tensor in self._copies.state_dict().items()}

    def _first_epoch(self, source: RankSource) -> int:
        """Which of the job's epochs the script begins with: the first, or, if it has found a snapshot of its own, the
        one whose number it has given its sampler."""
        there = self.training.newcomer.data
        self._began_with = source.epoch if there is None else cast("int | None", there.get("began_with"))
        # A script that begins as the job has begun comes to all epochs, however it numbers them: it may go through its
        # data twice under one number.
        if there is None or there.get("sampler_epoch") is None or source.epoch == self._began_with:
            return 0
        number = self._entry - (cast(int, there["sampler_epoch"]) - source.epoch)
        if number > self._entry:
            if self.training.at.joining:
                raise JoinMissed(f"this newcomer begins with epoch {number}, and the job is in epoch {self._entry}")
            raise mistakes.snapshot_ahead(number, self._entry)
        return max(0, number)

    def next_batch(self) -> Any:
        """Raises StopIteration when the epoch is over; what the guards say of the turn before."""
        batch = self._next_batch()
        self._reduces, self.calls = None, 0
        self.evaluations.training_goes_on()
        self._occasions.clear()
        self.batches += 1
        return batch

    def _next_batch(self) -> Any:
        match self.turn:
            case Turn.OUTSIDE:
                if self._asked is None:
                    raise mistakes.other_loop()
                if not dist.is_initialized():
                    raise ConfigError("the training loop began before dist.init_process_group(); call that first")
                wanted = self._asked(self._position)
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
            return self._more(turns, source)
        self._values.check_iterators()
        if self._counting != (counting := counting_loop(self.frames.standing()[::-1])) and counting is not None:
            raise mistakes.counted(counting.said)
        if not turns.over:
            self._undo()
            if self._void:
                self._void = False
                self.turned.pop()
        elif not self._stepped and source.left:
            if self._weight_versions != self.objects.versions_of_weights():
                raise mistakes.changed_by_hand()
            self._values = FrameValues.read(self.frames)
            self._turns = turns = self._new_turns()
            turns.begin()
        else:
            return self._next_step(source)
        batch = turns.following()
        self.turned.append(turns.rank)
        return batch

    def _undo(self) -> None:
        """Undo what the turn that ends here has done to what the script keeps itself."""
        assert self._copies is not None
        self._values.put_back(objects=True)
        self._copies.put_back()
        self.objects.put_back_settings()

    def _more(self, turns: Turns, source: RankSource) -> Any:
        try:
            return turns.more()
        except IndexError as end:
            raise mistakes.unreduced(source.left, len(source)) from end

    def _new_turns(self) -> Turns:
        """A pass begins."""
        assert self._steps is not None and self._steps.running is not None and self._source is not None
        self.turned.clear()
        self.brought.clear()
        return Turns(self.training, self._steps.running, self._source)

    def _next_step(self, source: RankSource) -> Any:
        assert self._steps is not None and self._steps.running is not None
        if not self._stepped and self._weight_versions != self.objects.versions_of_weights():
            raise mistakes.changed_by_hand()
        source.end_step()
        if source.left and not self._ends_early():
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

    def _ends_early(self) -> bool:
        """Whether this epoch ends behind this step in an examination, which is to see several epochs in few steps."""
        training = self.training
        if training.examiner is None or training.examiner.whole_epochs:
            return False
        steps = training.at.step + 1 - training.at.epoch_start
        return steps >= EPOCH_STEPS and asked_by_head(self.frames.standing()[::-1])

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
        return self.training.newcomer.data if self.begun and 0 < self._entry == self._epoch + 1 else None

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
            if self._position.copied and not self.training.at.joining:
                self._take_over(FrameValues.read(self.frames))
        self._reduces = None if self.turn is Turn.ELSEWHERE and self.between else reduces or bool(self._reduces)

    def before_backward(self) -> None:
        """Raises TwoBackwards, UnknownBatches, StrayGradient."""
        if self._void:
            return
        if self.turn is Turn.OPEN:
            if self._turns is not None and self._turns.fresh and self._reduces is not None:
                self._turns.set_gradients_aside()
        elif self.turn is Turn.ENDED and self._reduces is None:
            self._gradient_versions = self.objects.versions_of_gradients()
        elif self._reduces is not None and self.turn is not Turn.PASSING and not self.between:
            raise mistakes.two_backwards() if self.turn is Turn.ENDED else self._unknown_batches()

    def _unknown_batches(self) -> UnknownBatches:
        standing = self.frames.standing()
        return mistakes.unknown_batches(drawn_by_hand(standing[-1], self.objects.wrapped) if standing else ())

    def after_backward(self) -> None:
        """Ends the turn if it was asked for, and the pass if it was the last one."""
        if self._gradient_versions is not None:
            versions, self._gradient_versions = self._gradient_versions, None
            if versions != self.objects.versions_of_gradients():
                raise mistakes.two_backwards()
        if self._turns is None or self.turn is not Turn.OPEN or self._reduces is None:
            return
        assert self._copies is not None
        if not self._reduces:
            self.turn, self._reduces = Turn.UNREDUCED, None
            if not self._void:
                self._copies.keep()  # whether this turn is silent is not known yet
            return
        self.turn, self._reduces, self.asked_for_rank_0 = Turn.ENDED, None, False
        if not self._void:
            self._copies.check_unchanged()
            self._turns.backward_ended()
            if self._position.copied:
                self.objects.note_settings()
                self._take_over(self._at_forward)
            if self._turns.over:
                self._stepped = False
                self._weight_versions = self.objects.versions_of_weights()
                self._copies.done()
                return
            self._copies.keep()
        # What the script sets behind a silent turn is put back, and what it sets at the top of a turn comes once more.
        self.training.carrier.unsettle()
        # What the script counts behind a silent turn must not end its loop: the step is not over.
        earlier = self._counters.earlier
        counters = would_leave(self.frames.standing()[::-1], self._values.predicted(self._at_forward, earlier))
        if counters is not None:
            self._values.become_earlier(earlier, counters)

    def _take_over(self, values: FrameValues) -> None:
        """The state of others, or of an earlier run, has come. values: of this script when it was where they were."""
        others = self._position.values
        self._position.copied = False
        assert self._turns is not None
        for number, weight in enumerate(self.objects.weights()):
            if number in self._position.stale:
                self._turns.go_on_with(weight, torch.zeros_like(weight))
        self._counters.told(others)
        values.become(others)
        # The turns that follow in this pass begin with the values of others, too.
        for snapshot in (self._values, self._at_forward):
            snapshot.rebase(others, values)
        self._counters.earlier = {}

    # Evaluation

    def occasion(self, call: str) -> str:
        """A name for a call for all ranks, which a worker that passes by this epoch later gives it too."""
        name = f"behind epoch {self._epoch} {call} {[frame.f_lineno for frame in self.frames.standing()]}"
        self._occasions[name] += 1
        return f"{name} {self._occasions[name]}"

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
            raise JoinMissed(f"the script was over in epoch {self._epoch}, and the job is in epoch {self._entry}")
        if self._epoch + 1 < self._entry and self.turn is not Turn.ELSEWHERE:
            raise mistakes.over_before(self._epoch, self._entry)
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
