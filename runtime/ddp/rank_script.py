"""A script that was written for N ranks, in one worker: what it has made, and where it is.

All seams end here. The script asks for batches, calls backward() and steps its optimizers; this hands out turns, ends
passes and steps, and says what is silent.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from enum import StrEnum
from types import FrameType
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from elastic.errors import ConfigError, JoinMissed
from runtime.data.random_state import seed_all
from runtime.ddp import mistakes
from runtime.ddp.frame_values import Counters, FrameValues
from runtime.ddp.rank_values import Standing
from runtime.ddp.sampler_source import Position, SamplerSource
from runtime.ddp.turns import Turns
from runtime.guards.checks import OPTIONAL
from runtime.job.job import Job, begin
from runtime.job.loops import Extent, Steps
from runtime.job.passes import PassWork
from runtime.job.training import Loop, Training, empty_leaf
from runtime.session import Op, OpKind

ALLOW = OPTIONAL - {"StateChanged"}
"""Guards that logical ranks do without: everything that is trained is seen when it is made, accumulation divides its
losses, and zero_grad() may stand at the top of a turn."""


class Turn(StrEnum):
    """Where the script is in its training loop."""

    OUTSIDE = "outside"
    OPEN = "open"
    """It has a batch, and its backward() is still to come."""
    UNREDUCED = "unreduced"
    """Its backward() came under no_sync(): this rank's gradients are added up."""
    ENDED = "ended"
    """Its backward() has asked for the gradients of all ranks."""
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
        self.standing = Standing.EACH
        self.evaluated: tuple[int, ...] = ()
        """Of which ranks this worker has run the evaluation, if standing is TOGETHER."""
        self._position = Position()
        self.begun = False
        """The training loop has."""
        self._epoch = -1
        """Which of the job's epochs this worker is in, or passes by."""
        self._entry = 0
        """The epoch in which this worker came to the job."""
        self._source: SamplerSource | None = None
        self._steps: Steps | None = None
        self._turns: Turns | None = None
        self._stepped = True
        """An optimizer has stepped since the last result."""
        self._reduces: bool | None = None
        """What a forward() since the last backward() has asked for: True: that this backward() reduces; None: none."""
        self._evaluations = 0
        self._outside: set[int] = set()
        self._counters = Counters()
        self._values = FrameValues()
        """As they were when the pass in progress began."""

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
        if self.turn is Turn.PASSING:
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

    def begin_epoch(self, loader: DataLoader[Any], sampler: DistributedSampler[Any]) -> None:
        """The script begins to iterate over its training loader. Raises LeftPass, ConfigError, JoinMissed."""
        self._end_epoch()
        if not self.begun:
            self._begin()
            self._epoch = self._first_epoch(sampler)
        else:
            self._epoch += 1
        self._evaluations, self.standing = 0, Standing.EACH
        self._source = SamplerSource(loader, sampler, self.ranks, self._position)
        if self.passing:
            self.turn = Turn.PASSING
            return
        training = self.training
        if self._steps is not None:
            training.end_epoch(last=False)
        training.begin_epoch(self._epoch)
        if not training.elsewhere:
            self._position.batch = 0
        first = training.begin_steps(self._source.about())
        work = PassWork(self.ranks, self._source, "mean", ALLOW)
        self._steps = Steps(training, work, Extent(first, self._epoch, None, None, None))

    def _begin(self) -> None:
        if self.job is None:
            raise ConfigError("the training loop began before dist.init_process_group(); call that first")
        self.begun = True
        if not self.seen.get("model"):
            raise ConfigError("the training loop began without a DistributedDataParallel model; wrap the model before")
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
        turns, source = self._turns, self._source
        assert source is not None
        if self.turn is Turn.PASSING:
            return self._passing_by()
        if turns is not None and not turns.over:
            batch = self._same_pass(turns, source)
        elif turns is not None and not self._stepped and source.left:
            batch = self._new_pass()
        else:
            batch = self._new_step(source)
        self.turn, self.standing, self._reduces = Turn.OPEN, Standing.EACH, None
        return batch

    def _passing_by(self) -> Any:
        assert self._source is not None
        if self._source.used:
            for model in self.seen["model"]:
                model.zero_grad()
            self._source, self.turn = None, Turn.OUTSIDE
            raise StopIteration
        self._source.used = 1
        return self._source.fetch(0, 0, 0)

    def _same_pass(self, turns: Turns, source: SamplerSource) -> Any:
        if self.turn is Turn.OPEN:
            raise mistakes.read_ahead()
        if self.turn is Turn.ENDED:
            self._values.put_back()
            batch = turns.following()
            self._count(turns)
            return batch
        try:
            return turns.more()
        except IndexError as end:
            raise mistakes.unreduced(source.left, len(source)) from end

    def _new_pass(self) -> Any:
        assert self._steps is not None and self._steps.running is not None and self._source is not None
        self._turns = turns = Turns(self.training, self._steps.running, self._source)
        self.turned.clear()
        self.brought.clear()
        self._values = FrameValues.read(self._outside)
        batch = turns.first()
        self._count(turns)
        return batch

    def _count(self, turns: Turns) -> None:
        """A turn begins."""
        self.turned.append(turns.rank)
        self.calls = 0

    def _new_step(self, source: SamplerSource) -> Any:
        assert self._steps is not None
        if self._steps.running is not None:
            source.end_step()
            self._steps.running.ended = source.left == 0
        values = FrameValues.read(self._outside)
        if self._position.copied:
            self._take_over(values)
            values = FrameValues.read(self._outside)
        self._position.values = self._counters.step(values)
        try:
            next(self._steps)
        except StopIteration:
            self._end_epoch()
            if self.training.riders.stopped is not None:
                raise SystemExit(0) from None  # from here it would end the epoch, and the script begin the next one
            raise
        return self._new_pass()

    def _end_epoch(self) -> None:
        """The script has left its loop, by itself or as its data is used up."""
        if self._turns is not None and not self._turns.over:
            raise mistakes.left_turn()
        self._turns, self.turn = None, Turn.OUTSIDE
        self.turned.clear()
        if self._source is not None:
            self._source.close()
            self._source = None

    @property
    def number(self) -> int:
        """Of the batch in the epoch that was handed out last, as the script's rank counts it."""
        if self._turns is None:
            return 0
        return self._turns.number

    # Forward and backward

    def forward(self, *, reduces: bool) -> None:
        """A DistributedDataParallel model runs, and its backward() is to reduce or not, as DDP's own."""
        if self.turn is Turn.OPEN and self._turns is not None and self._reduces is None:
            self._turns.settle_rates()
        self._reduces = reduces or bool(self._reduces)

    def before_backward(self) -> None:
        """Raises TwoBackwards, UnknownBatches, StrayGradient."""
        if self.turn is Turn.OPEN:
            if self._turns is not None and self._turns.fresh and self._reduces is not None:
                self._turns.set_gradients_aside()
        elif self._reduces is not None and self.turn is not Turn.PASSING:
            raise mistakes.two_backwards() if self.turn is Turn.ENDED else mistakes.unknown_batches()

    def after_backward(self) -> None:
        """Ends the turn if it was asked for, and the pass if it was the last one."""
        if self._turns is None or self.turn is not Turn.OPEN or self._reduces is None:
            return
        if not self._reduces:
            self.turn, self._reduces = Turn.UNREDUCED, None
            return
        self.turn, self._reduces = Turn.ENDED, None
        self._turns.backward_ended()
        if self._position.copied:
            self._take_over(self._values)
        if self._turns.over:
            self._stepped = False
        else:
            # What the script counts behind a silent turn must not end its loop: the step is not over.
            self._values.become_earlier(self._counters.earlier)

    def _take_over(self, values: FrameValues) -> None:
        """The state of others, or of an earlier run, has come. values: of this script when it was where they were."""
        self._position.copied = False
        self._counters.told(self._position.values)
        values.become(self._position.values)

    # Evaluation

    def evaluation(self, loader: DataLoader[Any], sampler: DistributedSampler[Any]) -> Generator[Any, None, None]:
        """The batches of all ranks for which this worker stands; of a lost worker's ranks, again, by another one."""
        source = SamplerSource(loader, sampler, self.ranks, Position())
        if self.job is None or not self.begun:
            for rank in range(self.ranks):
                yield from source.of_rank(rank)
            return
        if self.turn in (Turn.OPEN, Turn.UNREDUCED):
            raise mistakes.in_turn("an evaluation")
        if self.passing or self.silent or self.training.session.joining:
            yield source.fetch(0, 0, 0)  # so that the names are bound which the loop binds
            return
        training, label = self.training, f"evaluation {self._evaluations}"
        self._evaluations += 1
        covered: list[int] = []
        missing = list(range(self.ranks))
        while missing:
            op = Op(OpKind.EVALUATE, len(missing), training.epoch, training.next_step, label=label)
            for unit in training.in_turns(op, training.fingerprint()):
                covered.append(missing[unit])
                yield from source.of_rank(missing[unit])
            everywhere = training.collective(
                OpKind.ALLREDUCE, f"{label}: ranks", 1, empty_leaf, lambda result: result.note, own=[*sorted(covered)]
            )
            assert isinstance(everywhere, dict)
            done = {rank for ranks in everywhere.values() for rank in ranks}  # type: ignore[union-attr]
            missing = sorted(set(range(self.ranks)) - done)
        self.standing, self.evaluated = Standing.TOGETHER, tuple(sorted(covered))
        seed_all(training.seed, training.next_step, label)

    # The end

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
