"""A pass of a step with `outer=`: each replica makes the inner steps of a round, and their differences are reduced."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

from elastic.errors import UsageError
from elastic.protocol import outer_round
from elastic.protocol.loop_state import ScriptStage
from elastic.protocol.outer_round import DRIFT, INNER_STEPS, LATE, LOST, REPLICAS, SUMMED_BYTES, Quorum
from runtime.allreduce.reduction.gradient_harvest import Harvest
from runtime.allreduce.reduction.partial_sum import Json, Partial, Scalars
from runtime.data.loader import Loader
from runtime.data.random_state import seed_shard
from runtime.guards import checks
from runtime.loop.control_scalars import RESERVED
from runtime.loop.passes import Contribution, Pass, Place, RunningPass, Shard, samples_in_words
from runtime.loop.training import Training
from runtime.outer import Round
from runtime.outer.traffic import bytes_of
from runtime.recovery.state.small_values import same_nan

_SQUARES = RESERVED + "squares"
_EXPECTED = RESERVED + "expected"
"""How many replicas there would be if no worker died."""
_INNER = "inner"
"""In the note of a leaf: what is the same for all replicas."""


class OuterPass(Pass):
    """Hands out one batch for each inner step. A shard is a replica."""

    def __init__(self, training: Training, running: RunningPass) -> None:
        """Raises UsageError for a second pass of a step."""
        super().__init__(training, running)
        if self.number:
            raise UsageError("a step with outer= has one pass; write `for batch in step` once")
        assert training.registered.round is not None
        self._round: Round = training.registered.round
        self._quorum = self._round.outer.quorum
        self.sends_early = self._round.outer.schedule.delay > 0
        self._inner = 0
        """Inner steps that the replica has made."""
        self._made = 0
        """Replicas that this worker has trained in this round, in part or whole."""
        self._expected = 0
        """How many replicas there are, as far as this worker knew when the round began."""
        self._scalars: Scalars = {}

    def __next__(self) -> Any:
        if self._begun and (shard := self._running.shard) is not None:
            checks.check_capture(self.where)
            self._end_inner(shard)
            if self._inner < self._length and not self._stops:
                return self._begin_inner(shard.index)
        return super().__next__()

    def next_shard(self) -> int | None:
        while (replica := super().next_shard()) is not None:
            if self._quorum is None or not self._is(ScriptStage.COLLECTING) or self._computes(self._quorum):
                return replica
            nothing = self._harvest.leaf(replica, 0.0, self._training.riders.travel({}))
            self._training.session.unit_done(nothing)
        return None

    def _computes(self, quorum: Quorum) -> bool:
        session = self._training.session
        left, over = session.units_left, session.round_over
        return outer_round.computes(quorum.min_replicas, self._made, session.world_size, left=left, over=over)

    @property
    def _stops(self) -> bool:
        """Whether the replica that runs makes no more inner steps, because the others have a quorum. It has a
        difference first, also if its script accumulates gradients over several inner steps."""
        if self._quorum is None or not self._is(ScriptStage.COLLECTING):
            return False
        return self._round.trained and self._training.session.round_over

    @property
    def _length(self) -> int:
        """Inner steps of the replica that runs; one, where it does not count."""
        return self._round.outer.schedule.inner_steps if self._is(ScriptStage.COLLECTING) else 1

    def _open(self) -> None:
        self._training.registered.choose(self._round.due(self._running.place.index))
        super()._open()
        self._training.registered.steps_inside()
        self._round.begin(self._running.place.index)

    def _end_rehearsal(self) -> None:
        self._round.abandon()
        super()._end_rehearsal()
        if not self._is(ScriptStage.COLLECTING):  # a newcomer that has come to the result of a round
            self._round.begin(self._running.place.index)

    def _harvest_here(self) -> Harvest:
        self._training.registered.choose(self._round.due(self._running.place.index))
        return super()._harvest_here()

    def _collect(self, place: Place, fingerprint: dict[str, str]) -> None:
        self._round.begin(place.index)
        self._made, self._expected = 0, min(self._training.session.world_size, self._running.work.shards)
        super()._collect(place, fingerprint)
        if self._quorum is not None:
            self._training.session.seek(self._quorum)

    def _repeated(self, result: Partial) -> bool:
        self._round.drop()
        return super()._repeated(result)

    def begin_shard(self, shard: int) -> Any:
        training, running = self._training, self._running
        training.calls.running = shard
        if running.work.loader is not None:
            training.session.draws(shard, lambda: samples_in_words(running.work.samples(running.place), shard))
        self._harvest.before(shard)
        self._round.begin_replica(shard)
        self._inner, self._scalars = 0, {}
        return self._begin_inner(shard)

    def _begin_inner(self, replica: int) -> Any:
        running, place = self._running, self._running.place
        batch = None
        if running.work.loader is not None:
            try:
                batch = cast(Loader, running.work.loader).part(place.epoch, place.position, replica, self._inner)
            except StopIteration as error:  # it would end the inner loop as if all replicas were done
                raise RuntimeError(f"the data raised StopIteration for replica {replica} in {self.where}") from error
        seed = seed_shard(self._training.seed, place.index, self.number, replica, self._inner)
        running.shard = Shard(seed, replica, self._inner)
        running.contribution = Contribution()
        running.cached.clear()
        running.cached.begin_shard()
        return running.shard if running.work.loader is None else batch

    def _end_inner(self, shard: Shard) -> None:
        """The body of the inner loop has ended."""
        self._inner += 1
        self._training.session.advanced()
        weight = self._running.work.weight(shard.index)
        for name, (kind, total, by) in self._running.contribution.scalars(weight).items():
            _, before, by_before = self._scalars.get(name, (kind, 0.0, 0.0))
            self._scalars[name] = (kind, before + total, by_before + by)
        if self._inner == self._round.outer.schedule.taken_after:
            self._round.take()
            self._send_early(shard.index)

    def _send_early(self, replica: int) -> None:
        """The difference of this worker's last replica leaves while its other inner steps are made: the overlap of
        Streaming DiLoCo (Douillard et al. 2025, section 2.3)."""
        if self.sends_early and self.collects and (early := self._training.session.send_early()) is not None:
            with self._round.differences_as_gradients():
                self._harvest.early.give(early, self._weight(replica))

    def _end_shard(self, shard: Shard) -> None:
        training, work = self._training, self._running.work
        self._running.shard = None
        training.scope.passes_tried.add(self.number)
        self._check_unchanged()
        if not self._is(ScriptStage.COLLECTING):
            self._round.drop()
            self._harvest.drop_shard()
            training.calls.running = None
            return
        if not self._round.trained and "NoGradient" not in work.allow:
            raise checks.no_inner_step(f"replica {shard.index} in {self.where}")
        whole = self._inner == self._length
        if self._inner < self._round.outer.schedule.taken_after:
            self._round.take()
        weight = self._weight(shard.index)
        plain = self._round.plain()
        squares = self._round.end_replica(shard.index)
        scalars = {**self._scalars, _SQUARES: ("sum", squares * weight, weight), **self._counted_steps(weight)}
        leaf = self._harvest.leaf(shard.index, weight, training.riders.travel(scalars))
        self._round.drop()  # on_drain hooks, which may come before the result, see the outer parameters
        # The first note there is counts for all replicas, so one that has made fewer inner steps leaves none.
        leaf.note = {**cast(dict[str, Json], leaf.note or {}), _INNER: plain} if whole else None
        self._made += 1
        if whole and self._quorum is not None:
            training.session.replica_done()
        training.session.unit_done(leaf)
        training.calls.running = None

    def _weight(self, replica: int) -> float:
        """By what the difference is weighed. With a quorum replicas differ in how many inner steps are in it."""
        work = self._running.work
        if self._quorum is None:
            return work.weight(replica)
        loader, steps = cast(Loader | None, work.loader), min(self._inner, self._round.outer.schedule.taken_after)
        return float(steps) if loader is None else loader.weight_of_parts(replica, steps)

    def _counted_steps(self, weight: float) -> Scalars:
        """With a quorum, what is counted of this replica."""
        if self._quorum is None:
            return {}
        late = float(self._inner < self._length)
        return {
            REPLICAS: ("sum", 1.0, 0.0),
            LATE: ("sum", late, 0.0),
            INNER_STEPS: ("sum", float(self._inner), 0.0),
            _EXPECTED: ("mean", self._expected * weight, weight),
        }

    def _unexpected(self, changed: list[str]) -> list[str]:
        """Parameters that are trained, their learning rates and schedulers are what inner steps change."""
        own = self._round.changes() if changed else set()
        return [name for name in changed if name not in own]

    def _end(self, result: Partial) -> None:
        super()._end(result)
        if self._quorum is not None:  # which samples of the plan were used is known to each replica only
            assert self._running.record is not None
            self._running.record = replace(self._running.record, samples=[])

    def _install(self, result: Partial) -> None:
        note = cast(dict[str, Json], result.note or {})
        mean = self._round.outer_step(lambda: super(OuterPass, self)._install(result), note.get(_INNER))
        _, squares, weight = result.scalars[_SQUARES]
        metrics = self._running.metrics
        metrics[SUMMED_BYTES] = float(bytes_of(self._harvest.groups()))
        metrics[DRIFT] = same_nan(max(squares / weight - mean, 0.0) ** 0.5)
        if self._quorum is not None:
            for name in (REPLICAS, LATE, INNER_STEPS):
                metrics[name] = result.scalars[name][1]
            _, expected, by = result.scalars[_EXPECTED]
            # A worker that began after a loss expects fewer; the mean of that is no whole number.
            metrics[LOST] = max(math.ceil(expected / by - 1e-6) - metrics[REPLICAS], 0.0)
