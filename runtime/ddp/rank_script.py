"""A script that was written for N ranks, in one worker: what it has made, and where it is.

All seams end here. The script asks for batches, calls backward() and steps its optimizers; this hands out turns, ends
passes and steps, and says what is silent.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator
from enum import StrEnum
from types import FrameType
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from elastic.errors import ConfigError, JoinMissed
from runtime.data.random_state import randomness_kept, seed_all, seed_shard
from runtime.ddp import mistakes
from runtime.ddp.frame_values import FrameCounters, FrameValues, frames
from runtime.ddp.loop_shape import counting_loop, would_leave
from runtime.ddp.sampler_source import Position, SamplerSource
from runtime.ddp.turns import Turns
from runtime.guards.checks import OPTIONAL
from runtime.job.job import Job, begin
from runtime.job.loops import Extent, Steps
from runtime.job.passes import PassWork
from runtime.job.training import Loop, Training
from runtime.session import Op, OpKind

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
    VOID = "void"
    """The batch that was offered is not that of the rank to be computed: this turn is for nobody."""
    PASSING = "passing"
    """The epoch is over: a newcomer runs one batch of it, of which nothing stays."""


class RankScript:
    """Used by the thread that made it only: `current` is None in all others."""

    _here: ClassVar[threading.local] = threading.local()

    def __init__(self, ranks: int, home: int) -> None:
        """home: the rank that the script sees in its environment, 0..ranks-1."""
        self.ranks = ranks
        self.home = home
        self.job: Job | None = None
        self.seen: dict[str, list[Any]] = {}
        """What the script has made, by kind ("model", "optimizer", ...), in the order in which it was made."""
        self.modules: list[nn.Module] = []
        """Its DistributedDataParallel models, as it holds them."""
        self.turn = Turn.OUTSIDE
        self.turned: list[int | None] = []
        """The ranks of this worker's turns in the pass in progress, also of the one in progress; None: of no rank."""
        self.calls = 0
        """Collectives in the turn in progress; before the training loop, since the script has begun."""
        self.brought: dict[int, dict[int, torch.Tensor]] = {}
        """What turns of the pass in progress have brought to their n-th collective: n -> rank -> value."""
        self.evaluated = False
        """One has come since the last training batch: what it has collected in lists is not that of one rank."""
        self.evaluating = False
        """One is in progress."""
        self._position = Position()
        self.begun = False
        """The training loop has."""
        self._epoch = -1
        """Which of the job's epochs this worker is in, or passes by."""
        self._entry = 0
        """The epoch in which this worker came to the job."""
        self._loader: tuple[DataLoader[Any], DistributedSampler[Any]] | None = None
        """Over which the script iterates, until a model has seen the first batch."""
        self._iterator: Callable[[], Any] = lambda: None
        self._source: SamplerSource | None = None
        self._offered = (0, 0)
        """Number and rank of the batch that was."""
        self._steps: Steps | None = None
        self._turns: Turns | None = None
        self._stepped = True
        """An optimizer has stepped since the last result."""
        self._reduces: bool | None = None
        """What a forward() since the last backward() has asked for: True: that this backward() reduces; None: none."""
        self._marks: list[tuple[int, int] | None] | None = None
        """Of the gradients, before a backward() of what no model has made in this turn since it ended."""
        self._evaluations = 0
        self._counting: str | None = None
        """The loop that has asked for the first batch of an epoch, if it counts turns."""
        self._outside: set[int] = set()
        self._counters = FrameCounters()
        self._values = FrameValues()
        """As they were when the first batch of the pass in progress was handed out."""
        self._at_forward = FrameValues()
        """As they were when a model saw it."""

    @classmethod
    def current(cls) -> RankScript | None:
        """That of this thread."""
        found: RankScript | None = getattr(cls._here, "script", None)
        return found

    @classmethod
    def running(cls) -> RankScript:
        """That of this thread, which there is."""
        found = cls.current()
        assert found is not None
        return found

    def enter(self, below: FrameType | None = None) -> None:
        """Become the current script of this thread. below: of the frames that stand now, the innermost one that is not
        the script's."""
        self._here.script = self
        while below is not None:
            self._outside.add(id(below))
            below = below.f_back

    def connect(self) -> None:
        """Become a worker of the job."""
        self.job = begin(close=self.close)

    @property
    def training(self) -> Training:
        assert self.job is not None
        return self.job._training

    # What the script makes

    def made(self, kind: str, thing: object) -> None:
        """Raises ConfigError for what comes after the first batch: a newcomer would not have it."""
        if self.begun:
            raise ConfigError(
                f"a {type(thing).__name__} was made after the first training batch. What is trained must be there "
                "before the loop, as a replacement that joins later copies it: make it before the first epoch"
            )
        self.seen.setdefault(kind, []).append(thing)

    @property
    def rank_now(self) -> int:
        """Which rank the script is for what one rank alone does: 0 in the leader, never in a silent turn."""
        if self.job is None:
            return self.home
        return self.ranks if self.silent or self.training.session.joining else self.job.rank

    @property
    def silent(self) -> bool:
        """What the script does to its state now would be done once too often."""
        if self.turn in (Turn.PASSING, Turn.VOID):
            return True
        if self._turns is None or self._turns.over:
            return False
        return self.turn is Turn.ENDED or len(self.turned) > 1

    @property
    def passing(self) -> bool:
        """The script is in an epoch, or behind one, that is over in the job: nothing of it counts."""
        return self.begun and self._epoch < self._entry

    def stepped(self) -> None:
        """An optimizer has stepped, or a GradScaler has decided that it does not."""
        self._stepped = True

    # Epochs and steps

    def iterate(self, iterator: Any, loader: DataLoader[Any], sampler: DistributedSampler[Any]) -> None:
        """The script begins to iterate over its training loader. Raises LeftPass."""
        self._end_epoch()
        self._loader, self._iterator = (loader, sampler), weakref.ref(iterator)

    @property
    def between(self) -> bool:
        """The script is between a batch and its backward(), where nothing can be done together."""
        if self.turn is Turn.OFFERED:
            return self._iterator() is not None  # or it has left the loop at its top
        return self.turn in (Turn.OPEN, Turn.UNREDUCED, Turn.VOID)

    def _offer(self, source: SamplerSource, number: int) -> Any:
        """The first batch of a step, of the rank whose turn will probably be the first. The step begins when a model
        sees it: scripts take a batch to look at, or leave the loop at its top."""
        self._source = source
        owned = self.training.session.owned(self.ranks)
        self._offered = (number, owned[0] if owned else 0)
        self._values = FrameValues.read(self._outside)
        self._counters.step(self._values)
        if self._loader is not None:
            self._counting = counting_loop(reversed(frames(self._outside)))
        batch = source.offer(*self._offered, owned)
        seed_shard(self.training.seed, self.training.next_step + (self._turns is not None), 0, self._offered[1])
        self.turn = Turn.OFFERED
        return batch

    def _begin_step(self) -> None:
        """The model is about to see the batch that was offered."""
        source = self._source
        assert source is not None
        if self.evaluating:
            raise mistakes.in_evaluation("a training step")
        self._at_forward = values = FrameValues.read(self._outside)
        if self._loader is not None:
            if self._counting is not None:
                raise mistakes.counted(self._counting)
            (_, sampler), self._loader = self._loader, None
            self._begin_epoch(source, sampler)
            if self.passing:
                self.turn = Turn.PASSING
                return
        assert self._steps is not None
        if not self._position.copied:
            self._position.values = self._counters.of(values)
        try:
            next(self._steps)
        except StopIteration:
            raise SystemExit(0) from None  # the job is stopped; the script would begin its next epoch
        self._turns = self._new_turns()
        self._turns.begin()
        self._turns.following()
        self.turned.append(self._turns.rank)
        fits = self._turns.rank is None or self._offered == (source.first, self._turns.rank)
        self.turn = Turn.OPEN if fits else Turn.VOID

    def _begin_epoch(self, source: SamplerSource, sampler: DistributedSampler[Any]) -> None:
        if not self.begun:
            self._begin()
            self._epoch = self._first_epoch(sampler)
        else:
            self._epoch += 1
        self._evaluations = 0
        if self.passing:
            return
        training = self.training
        if self._steps is not None:
            training.end_epoch(last=False)
        training.begin_epoch(self._epoch)
        if not training.elsewhere:
            self._position.batch = 0
        first = training.begin_steps(source.about())
        work = PassWork(self.ranks, source, "mean", ALLOW)
        self._steps = Steps(training, work, Extent(first, self._epoch, None, None, None))

    def _begin(self) -> None:
        assert self.job is not None
        self.begun = True
        if not self.seen.get("model"):
            raise ConfigError("the training loop began without a DistributedDataParallel model; wrap the model before")
        if not self.seen.get("optimizer"):
            raise mistakes.not_in_place(
                "A script without an optimizer of torch.optim", "Weights are changed by its step()."
            )
        named = {
            kind if number == 0 else f"{kind}{number + 1}": thing
            for kind, things in self.seen.items()
            for number, thing in enumerate(things)
        }
        self.job.register(**named, position=self._position)
        self.training.carrier.leave_undigested("position")
        self.training.where = lambda: {"batch of the epoch": str(self._position.batch)}
        self.training.claim_shards(self.ranks)
        self.training.plan_steps(None, self.ranks)
        self._entry = self.training.enter_loop(Loop.EPOCHS).epoch
        if self.training.next_step == 0:
            self.job.print(
                f"elastic: {self.ranks} ranks in place, computed by {self.job.world_size} workers; the ranks of a lost "
                "worker go to the others, and no bit changes"
            )

    def _first_epoch(self, sampler: DistributedSampler[Any]) -> int:
        """Which of the job's epochs the script begins with: the first, or, if it has found a snapshot of its own, the
        one whose number it has given the sampler."""
        there = self.training.data_elsewhere
        if there is None or not there.get("sampler_epoch"):
            return 0
        number = self._entry - (cast(int, there["sampler_epoch"]) - int(getattr(sampler, "epoch", 0)))
        if number > self._entry:
            raise JoinMissed(f"this newcomer begins with epoch {number}, and the job is in epoch {self._entry}")
        return max(0, number)

    def next_batch(self) -> Any:
        """Raises StopIteration when the epoch is over; what the guards say of the turn before."""
        batch = self._next_batch()
        self.evaluated, self._reduces, self.calls = False, None, 0
        return batch

    def _next_batch(self) -> Any:
        match self.turn:
            case Turn.OUTSIDE:
                assert self._loader is not None
                if self.job is None:
                    raise ConfigError("the training loop began before dist.init_process_group(); call that first")
                return self._offer(SamplerSource(*self._loader, self.ranks, self._position), 0)
            case Turn.OFFERED | Turn.OPEN:
                raise mistakes.read_ahead()
            case Turn.PASSING:
                for model in self.seen["model"]:
                    model.zero_grad()
                self._end_epoch()
                raise StopIteration
        turns, source, turn = self._turns, self._source, self.turn
        assert turns is not None and source is not None
        self.turn = Turn.OPEN
        if turn is Turn.UNREDUCED:
            return self._more(turns, source)
        if not turns.over:
            self._values.put_back()
            if turn is Turn.VOID:
                self.turned.pop()
        elif not self._stepped and source.left:
            self._values = FrameValues.read(self._outside)
            self._turns = turns = self._new_turns()
            turns.begin()
        else:
            return self._next_step(source)
        batch = turns.following()
        self.turned.append(turns.rank)
        return batch

    def _more(self, turns: Turns, source: SamplerSource) -> Any:
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

    def _next_step(self, source: SamplerSource) -> Any:
        assert self._steps is not None and self._steps.running is not None
        source.end_step()
        if source.left:
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
        """The script has left its loop, by itself or as its data is used up."""
        if self._turns is not None and not self._turns.over:
            raise mistakes.left_turn()
        self._turns, self.turn = None, Turn.OUTSIDE
        self.turned.clear()
        self.release()
        self._source = None

    @property
    def number(self) -> int:
        """Of the batch in the epoch that was handed out last, as the script's rank counts it."""
        if self.turn is Turn.OFFERED or self._turns is None:
            return self._offered[0]
        return self._turns.number

    # Forward and backward

    def forward(self, *, reduces: bool) -> None:
        """A DistributedDataParallel model runs, and its backward() is to reduce or not, as DDP's own."""
        if self.turn is Turn.OFFERED:
            with randomness_kept():
                self._begin_step()
        if self.turn is Turn.UNREDUCED:
            self.turn = Turn.OPEN  # once more with the same batch
        if self.turn is Turn.OPEN and self._turns is not None and self._turns.fresh and self._reduces is None:
            self._turns.settle_rates()
            if self._position.copied and not self.training.session.joining:
                self._take_over(FrameValues.read(self._outside))
        self._reduces = reduces or bool(self._reduces)

    def before_backward(self) -> None:
        """Raises TwoBackwards, UnknownBatches, StrayGradient."""
        if self.turn is Turn.OPEN:
            if self._turns is not None and self._turns.fresh and self._reduces is not None:
                self._turns.set_gradients_aside()
        elif self.turn is Turn.ENDED and self._reduces is None:
            self._marks = self._gradient_marks()
        elif self._reduces is not None and self.turn not in (Turn.PASSING, Turn.VOID):
            raise mistakes.two_backwards() if self.turn is Turn.ENDED else mistakes.unknown_batches()

    def after_backward(self) -> None:
        """Ends the turn if it was asked for, and the pass if it was the last one."""
        if self._marks is not None:
            marks, self._marks = self._marks, None
            if marks != self._gradient_marks():
                raise mistakes.two_backwards()
        if self._turns is None or self.turn is not Turn.OPEN or self._reduces is None:
            return
        if not self._reduces:
            self.turn, self._reduces = Turn.UNREDUCED, None
            return
        self.turn, self._reduces = Turn.ENDED, None
        self._turns.backward_ended()
        if self._position.copied:
            self._take_over(self._at_forward)
        if self._turns.over:
            self._stepped = False
        else:
            # What the script counts behind a silent turn must not end its loop: the step is not over.
            earlier = self._counters.earlier
            predicted = self._values.predicted(self._at_forward, earlier)
            if would_leave(reversed(frames(self._outside)), predicted):
                self._values.become_earlier(earlier)

    def _gradient_marks(self) -> list[tuple[int, int] | None]:
        """What differs when a backward() has added to a gradient."""
        return [
            None if parameter.grad is None else (id(parameter.grad), parameter.grad._version)
            for module in self.seen["model"]
            for parameter in module.parameters()
        ]

    def _take_over(self, values: FrameValues) -> None:
        """The state of others, or of an earlier run, has come. values: of this script when it was where they were."""
        self._position.copied = False
        self._counters.told(self._position.values)
        values.become(self._position.values)

    # Evaluation

    def evaluation(self, loader: DataLoader[Any], sampler: DistributedSampler[Any]) -> Generator[Any, None, None]:
        """The batches of this worker's ranks, one rank after another; those of a lost worker's ranks by another one.

        What the loop adds up is what each rank would have on the average: sums and counts of all ranks, divided by
        their number. Then a sum over ranks is that of all batches, and each worker has the same, also if one is lost.
        """
        source = SamplerSource(loader, sampler, self.ranks, Position())
        if self.between:
            raise mistakes.in_turn("an evaluation")
        if self.evaluating:
            raise mistakes.in_evaluation("another evaluation")
        start = FrameValues.read(self._outside)
        if self.passing or self.silent or (self.begun and self.training.session.joining):
            yield source.fetch(0, 0, 0)  # so that the names are bound which the loop binds
            start.put_back()
            return
        self.evaluated = True
        found: list[dict[str, float]] = []
        if self.job is None or not self.begun:
            for rank in range(self.ranks):
                start.put_back()
                yield from source.of_rank(rank)
                found.append(start.added())
        else:
            training, label = self.training, f"evaluation {self._evaluations}"
            self._evaluations += 1
            op = Op(OpKind.EVALUATE, self.ranks, training.epoch, training.next_step, label=label)
            self.evaluating = True
            for rank in training.in_turns(op, training.fingerprint(), start.added, found):
                start.put_back()
                yield from source.of_rank(rank)
            self.evaluating = False
            seed_all(training.seed, training.next_step, label)
        start.put_back()
        start.add(_totals(found), self.ranks)

    # The end

    def release(self) -> None:
        """End the processes that fetch batches ahead."""
        if self._source is not None:
            self._source.close()

    def leave(self) -> None:
        """The script's process group is destroyed, or the script has ended: there are no more steps."""
        if self.job is None or not self.begun or self.training.loop is Loop.OVER:
            return
        if self.training.session.joining:
            raise JoinMissed(f"the script was over in epoch {self._epoch}, and the job is in epoch {self._entry}")
        self._end_epoch()
        self.training.end_loop()

    def close(self) -> None:
        """The script has ended."""
        assert self.job is not None
        if not self.begun and self.job.world_size > 1:
            raise mistakes.never_trained()
        self.leave()
        self.job.close()


def _totals(found: list[dict[str, float]]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for added in found:
        for name, value in added.items():
            totals[name] = totals.get(name, 0.0) + value
    return totals


def watched_backward(original: Any) -> Any:
    """torch.autograd.backward, to which every spelling comes; also the nested ones of reentrant checkpointing, which
    end no turn."""
    depth = threading.local()

    def backward(*args: Any, **kwargs: Any) -> None:
        script = RankScript.current()
        if script is None or script.job is None or getattr(depth, "inside", False):
            original(*args, **kwargs)
            return
        script.before_backward()
        depth.inside = True
        try:
            original(*args, **kwargs)
        finally:
            depth.inside = False
        script.after_backward()

    backward.__wrapped__ = original  # type: ignore[attr-defined]
    return backward
