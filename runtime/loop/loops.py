"""The outer loops, `job.epochs` and `job.steps`: where they begin, what they hand out, and when they end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from elastic.errors import ConfigError
from elastic.protocol.loop_state import CopyAnew, LoopKind, NextStep
from runtime.data.loader import Loader, check_count
from runtime.data.stream import Stream
from runtime.guards.unregistered import caller
from runtime.loop.passes import Pass, PassWork, Place, RunningPass, Source
from runtime.loop.step import Step
from runtime.loop.training import Training

WINDOW_S = 0.1
"""Seconds for which a pass without gradients stands still while workers want to join or leave; a copy that has begun
has longer."""


class Epochs(Iterator[int]):
    """The numbers of the epochs; a newcomer starts with the epoch in progress. `len()` counts all epochs."""

    def __init__(self, training: Training, count: int) -> None:
        self._training = training
        self._count = count
        self._next: int | None = None
        self._over = False

    def __len__(self) -> int:
        return self._count

    def __next__(self) -> int:
        training = self._training
        if self._over:
            raise StopIteration
        if self._next is None:
            training.registered.choose_outer()
            training.enter_loop(LoopKind.EPOCHS)
            self._next = training.at.epoch
        else:
            training.end_epoch(last=self._next == self._count)
        if training.riders.stopped is not None or self._next >= self._count:
            training.end_loop()
            self._over = True
            raise StopIteration
        training.begin_epoch(self._next)
        self._next += 1
        return self._next - 1


@dataclass(frozen=True, slots=True)
class Extent:
    """The steps of a loop. first: job index of its first step, which lies in `epoch`. total: steps of the whole job.

    A number is None if a stream decides it: the stream ends the epoch, and with it the loop.
    """

    first: int
    epoch: int
    per_epoch: int | None
    length: int | None
    total: int | None

    def locate(self, index: int) -> Place:
        """The place of the step with this job index."""
        offset = index - self.first
        epochs, position = divmod(offset, self.per_epoch) if self.per_epoch is not None else (0, offset)
        last = position + 1 == self.per_epoch or offset + 1 == self.length
        return Place(index, self.epoch + epochs, position, self.total, last)


class Steps(Iterator[Step]):
    """The steps of an epoch, or of a whole job without epochs."""

    def __init__(self, training: Training, work: PassWork, extent: Extent) -> None:
        self._training = training
        self._work = work
        self._extent = extent
        self.initial = training.at.step - extent.first
        """Number of steps of this loop before this worker came: `tqdm(steps, initial=steps.initial)`."""
        self.running: RunningPass | None = None
        """The step that was handed out last."""
        self._over = False

    def __len__(self) -> int:
        """The number of all steps of this loop, also those before `initial`. Raises TypeError for a stream."""
        if self._extent.length is None:
            raise TypeError("the steps of a stream have no length: the epoch ends when the first shard is used up")
        return self._extent.length

    def __next__(self) -> Step:
        training, extent = self._training, self._extent
        if self._over:
            raise StopIteration
        training.leave_step()
        over = training.riders.stopped is not None or self._is_complete()
        if isinstance(training.post(NextStep(over)), CopyAnew):
            training.newcomer.copy_anew()
        if over:
            self._over = True
            if self._work.loader is not None:
                self._work.loader.release()
            if training.at.in_epochs:
                training.end_steps()
            else:
                training.end_loop()
            raise StopIteration
        place = extent.locate(training.at.step)
        self.running = running = RunningPass(self._work, place, extent.locate)
        step = Step(training, running)
        if "Unregistered" not in self._work.allow:
            training.registered.watch_strays(caller)
        training.hand_out(step, place.index, place.epoch)
        return step

    def _is_complete(self) -> bool:
        extent, used_up = self._extent, self.running is not None and self.running.ended
        return used_up or (extent.length is not None and self._training.at.step - extent.first >= extent.length)


class NoTrials:
    """A pass without gradients has nothing that could be tried."""

    keeps_fingerprint = False

    def rehearsals(self) -> int:
        return 0

    def untried(self, skipped: object) -> int | None:
        return None

    def told(self, why: Any, before: object) -> Any:
        return why


def pass_without_gradients(training: Training, running: RunningPass) -> None:
    """The first pass of a step in which workers reduce by themselves: there newcomers copy the state, and workers leave
    as planned. If one is to come or to leave, all wait for a moment, as they wait for whoever has a shard: in a pass of
    a millisecond a newcomer would hardly ever begin to copy."""
    empty = Pass(training, running, NoTrials())
    waited = False
    while (shard := empty.next_shard()) is not None:
        empty.begin_shard(shard)
        running.contribution.skipped = True
        if not waited and training.session.due:
            waited = True
            time.sleep(WINDOW_S)


def shards_of(data: Source | None, shards: int | None) -> int:
    """The number of shards, by the arguments of job.steps(). Raises ConfigError."""
    if data is None:
        if shards is None:
            raise ConfigError("job.steps() needs data, job.steps(train), or shards=, job.steps(shards=8, total=1000)")
        return check_count("shards", shards)
    if not isinstance(data, Loader | Stream):
        raise ConfigError(
            f"job.steps() was given a {type(data).__name__}; wrap the dataset, job.loader(dataset, 256, shards=8)"
        )
    if shards is not None:
        raise ConfigError("job.steps(data, shards=...): the loader says how many shards there are; leave shards= out")
    return data.shards


def steps_of(data: Source | None, total: int | None, epochs: int | None, inside: bool) -> tuple[int | None, int | None]:
    """(steps of an epoch, steps of this loop), by the arguments of job.steps(); None: a stream decides it.

    Raises ConfigError.
    """
    if total is not None:
        check_count("total", total)
    if epochs is not None:
        check_count("epochs", epochs)
    if inside:
        if epochs is not None or (total is not None) == (data is not None):
            raise ConfigError(
                "inside job.epochs(), write job.steps(train), or without data job.steps(shards=8, total=100)"
            )
        if isinstance(data, Stream):
            return None, None
        steps = len(data) if data is not None else cast(int, total)
        return steps, steps
    if isinstance(data, Stream):
        if epochs is not None:
            raise ConfigError(
                "job.steps(stream, epochs=...): outside job.epochs() a stream is one epoch; write "
                "`for epoch in job.epochs(n): for step in job.steps(stream):`"
            )
        return None, total
    if data is None:
        if total is None or epochs is not None:
            raise ConfigError("job.steps(shards=...) without data needs total=, the number of steps, and no epochs=")
        return total, total
    if (total is None) == (epochs is None):
        raise ConfigError("outside job.epochs(), job.steps(train) needs one of total= (steps) and epochs=")
    return len(data), total if total is not None else len(data) * cast(int, epochs)
