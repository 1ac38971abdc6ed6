"""A step as the user sees it: one optimizer update of the whole job."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeVar

from elastic.errors import ConfigError, UsageError
from runtime.loop.control_scalars import RESERVED
from runtime.loop.outer_pass import OuterPass
from runtime.loop.passes import Pass, Place, RunningPass, Shard
from runtime.loop.training import Training
from runtime.recovery.state.small_values import Number, as_number
from runtime.session import StepRecord

T = TypeVar("T")


class Step:
    """Iterate over it to run a pass, `for batch in step`; iterate again for another pass with its own reduction."""

    def __init__(self, training: Training, running: RunningPass) -> None:
        self._training = training
        self._running = running

    @property
    def index(self) -> int:
        """Number of this step in the job, from 0. A newcomer's first step has its final number after the pass."""
        return self._place.index

    @property
    def epoch(self) -> int:
        """Number of the epoch, from 0."""
        return self._place.epoch

    @property
    def _place(self) -> Place:
        """The place of this step. A script that reads it before the first pass is over may depend on it."""
        self._training.newcomer.place_read = True
        return self._running.place

    @property
    def total(self) -> int:
        """The number of steps of the whole job. Raises UsageError if a stream decides it."""
        total = self._running.place.total
        if total is None:
            raise UsageError("step.total: the epochs of a stream end with their data, so nobody knows their steps yet")
        return total

    @property
    def last_in_epoch(self) -> bool:
        """Whether the epoch ends with this step. With a stream this is known after the first pass."""
        return self._place.last_in_epoch

    @property
    def metrics(self) -> dict[str, float]:
        """The values logged in the passes of this step, equal on every worker; empty before the first pass ends."""
        return dict(self._running.metrics)

    @property
    def shard(self) -> Shard:
        """The shard that is computed now. Raises UsageError outside a pass."""
        self._check_in_pass("shard")
        assert self._running.shard is not None
        return self._running.shard

    def log(
        self, *, mean: Mapping[str, Number] | None = None, sum: Mapping[str, Number] | None = None, **means: Number
    ) -> None:
        """Record scalars of this shard; `metrics` has their weighted mean, or their sum, over all shards.

        Values are numbers or tensors of one element, summed in float64. Raises UsageError outside a pass and for a name
        that this shard has already logged.
        """
        self._check_in_pass("log()")
        logged = self._running.contribution.logged
        for kind, values in (("mean", mean or {}), ("mean", means), ("sum", sum or {})):
            for name, value in values.items():
                if name.startswith(RESERVED):
                    raise UsageError(f"step.log: names that start with {RESERVED!r} are reserved; rename {name!r}")
                if name in logged:
                    raise UsageError(f"step.log: {name!r} was logged twice in one shard; log each name once a shard")
                logged[name] = (kind, as_number(value, f"step.log: {name}"))

    def weigh(self, n: Number) -> None:
        """Set the weight of this shard's mean gradient and metrics: sum(n g) / sum(n), for tokens or ragged batches.

        With gradients="sum" n weighs the metrics only. Raises ConfigError unless n is positive and finite.
        """
        self._check_in_pass("weigh()")
        self._check_one_shard("weigh()")
        weight = as_number(n, "step.weigh(n)")
        if not (weight > 0 and math.isfinite(weight)):
            raise ConfigError(f"step.weigh({weight}) must be positive and finite; step.skip() leaves a shard out")
        self._running.contribution.weight = weight

    def skip(self) -> None:
        """Leave this shard out: its gradient, metrics and buffers do not count."""
        self._check_in_pass("skip()")
        self._check_one_shard("skip()")
        self._running.contribution.skipped = True

    def cached(self, fn: Callable[[], T]) -> T:
        """The value of `fn()` for this shard, kept until the step ends: its later passes get the same value.

        A worker that takes over the shard calls fn again. So fn may only use values that do not change between the
        passes of a step: the data, registered state that changes only at the end of a step (with PPO the copy of the
        policy, not the trained policy), and random numbers. Inside fn, random numbers depend on (seed, step, shard),
        also those of `step.shard`. fn runs without gradients. Raises UsageError outside a pass, and for two functions
        with the same name.
        """
        shard = self.shard
        running = self._running
        if running.work.inner_steps:
            raise UsageError("step.cached() in a step with outer=: a step has one pass; call the function itself")

        def become(seed: int) -> None:
            running.shard = Shard(seed, shard.index)

        try:
            return running.cached.get(fn, (self._training.seed, self.index, shard.index), become)
        finally:
            running.shard = shard

    @property
    def inner_index(self) -> int:
        """With outer=: the number of the inner step in the job, from 0, for each replica. Raises UsageError outside the
        inner loop."""
        return self.index * self._running.work.inner_steps + self.shard.inner

    def _check_in_pass(self, call: str) -> None:
        if self._running.shard is None:
            raise UsageError(
                f"step.{call} was used outside the inner loop of step {self.index}, where there is no shard; move it "
                "into `for batch in step`"
            )

    def _check_one_shard(self, call: str) -> None:
        if self._running.work.inner_steps:
            raise UsageError(
                f"step.{call} in a step with outer=: replicas count by their samples. To leave a batch out, go on to "
                "the next one without optimizer.step()"
            )

    def __iter__(self) -> Pass:
        return (
            OuterPass(self._training, self._running)
            if self._running.work.inner_steps
            else Pass(self._training, self._running)
        )

    @property
    def record(self) -> StepRecord:
        """The record of its passes so far, of which there is one."""
        assert self._running.record is not None
        return self._running.record
