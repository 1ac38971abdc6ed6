"""`elastic.asynchronous`: the loop over phases, in which no worker waits for another one.

A phase is a step of the job. Its first pass has no gradients: there newcomers copy the common state, and workers leave
as planned. Then each worker trains by itself. At the end all sum what they hold of the common state, so that each has
it whole, and say what they have done.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, cast

import torch
from torch import nn

from elastic.errors import ConfigError, UsageError
from elastic.records.ledger import UNWAITING
from runtime.allreduce.reduction.partial_sum import Json
from runtime.asynchronous import phase_notes
from runtime.asynchronous.local_training import LocalTraining, Sums
from runtime.asynchronous.member_calls import MemberCalls, calls_of, received
from runtime.asynchronous.own_buffers import OwnBuffers
from runtime.asynchronous.own_values import OwnValues
from runtime.data.loader import Loader, check_count, check_number
from runtime.data.random_state import randomness_kept, seed_shard
from runtime.guards.checks import OPTIONAL
from runtime.loop.control_scalars import RESERVED
from runtime.loop.job import Job
from runtime.loop.loops import WINDOW_S, Extent, Steps, pass_without_gradients
from runtime.loop.passes import PassWork
from runtime.loop.training import empty_leaf
from runtime.loop.training.vector_sums import VectorSums
from runtime.recovery.state.small_values import Number, as_number
from runtime.recovery.transfer.connection import CopyConnection, CopyFailed
from runtime.session import OpKind

PHASE_S = 60.0
"""Seconds that a phase takes by default."""
TOLD_S = 5.0
"""Seconds after which a worker that does not hear is told once more, if it is still a member."""
LOOK_S = 0.01
"""Seconds between two looks at who has stopped."""
TRAINS = 4
"""Times as long as the last end of a phase took, with that, a phase lasts at least, also if workers want to join or
leave: so training has four fifths of the time, however long a newcomer copies."""


def asynchronous(job: Job, data: Loader, *, outer: LocalTraining, total: int, phase_s: float = PHASE_S) -> LocalPhases:
    """The loop of workers that do not wait for each other, `for phase in elastic.asynchronous(job, train, ...)`.

    data: a job.loader; batch_size samples are one inner step of all its shards, each of which stands for a replica.
    outer: an Asynchronous or a Gossip, which is registered. total: rounds; in a round each replica makes H inner steps.
    phase_s: seconds after which all workers come together for a moment, at the latest. Raises ConfigError.
    """
    if not isinstance(data, Loader):
        raise ConfigError(f"elastic.asynchronous() was given a {type(data).__name__}; it needs a job.loader")
    if not isinstance(outer, LocalTraining):
        raise ConfigError(
            f"elastic.asynchronous(outer=...) was given a {type(outer).__name__}; it takes an elastic.Asynchronous or "
            "an elastic.Gossip. elastic.DiLoCo and elastic.LocalSGD are for `for step in job.steps(train, outer=outer)`"
        )
    check_number("phase_s", phase_s, "of seconds above 0", lambda one: one > 0)
    return LocalPhases(job, data.in_rounds(outer.every), outer, check_count("total", total), phase_s)


def is_over(age_s: float, limit_s: float, last_end_s: float, *, due: bool, asked: bool) -> bool:
    """Whether a phase ends between two inner steps. due: workers want to join or leave. asked: another worker has
    nothing to do any more, and this one has more than it is at; or one has to leave now."""
    return asked or age_s >= limit_s or (due and age_s >= TRAINS * (last_end_s + WINDOW_S))


class LocalPhases(Iterator["LocalPhase"]):
    """The phases. Used by the thread of the script, but for `answer`."""

    def __init__(self, job: Job, data: Loader, outer: LocalTraining, total: int, phase_s: float) -> None:
        self.job, self.data, self.outer, self.phase_s = job, data, outer, phase_s
        self.training = job._training
        self.session = self.training.session
        self.calls: MemberCalls | None = calls_of(self.session)
        self.sums = VectorSums(self.training.calls, self.session.sums_on)
        self.own: torch.Tensor | None = None
        """This worker's parameters between two phases, if it goes on with them."""
        self.inner = 0
        """Inner steps that it has made of its unit."""
        self.last_end_s = 0.0
        self.asked = -1
        """The newest phase of which another worker has said that it has nothing to do any more."""
        self.leaves = -1
        """The newest phase in which another worker has had to leave."""
        self.stopped: dict[str, int] = {}
        """Other worker -> the newest phase in which it exchanges nothing any more."""
        self.values: OwnValues | None = None
        self.buffers: OwnBuffers | None = None
        outer.left = outer.left.of(total * data.shards)
        self._steps: Steps | None = None
        self._phase: LocalPhase | None = None
        self._over = False

    def __next__(self) -> LocalPhase:
        """Raises UsageError if the inner loop was left before its end."""
        training = self.training
        if self._over:
            raise StopIteration
        if self._phase is not None and not self._phase.over:
            raise UsageError("the inner loop of elastic.asynchronous() was left by `break`; it ends by itself")
        if self._steps is None:
            self._steps = self._begin()
        if not self.outer.left.count:
            training.end_loop()
            self._end()
            raise StopIteration
        training.changes.has_left = False
        kept = [(parameter, parameter.grad) for parameter in self.outer.model.parameters()]
        with randomness_kept():
            try:
                next(self._steps)
            except StopIteration:
                self._end()
                raise
            running = self._steps.running
            assert running is not None
            pass_without_gradients(training, running)
        for parameter, gradient in kept:
            parameter.grad = gradient
        said = training.calls.collective(
            OpKind.ALLREDUCE, "roster", 1, empty_leaf, lambda result: result.note, self.session.rank
        )
        ranks = cast(dict[str, int], said)
        roster = sorted(ranks, key=lambda worker: (ranks[worker], worker))
        # Whoever had left behind the pass or behind this call has been taken back, because all others died meanwhile.
        self._phase = LocalPhase(self, running.place.index, roster, in_step=not training.changes.has_left)
        return self._phase

    def _begin(self) -> Steps:
        training, outer, carrier = self.training, self.outer, self.training.carrier
        found = [name for name, thing in carrier.objects.items() if thing is outer]
        if not found or outer.inner_optimizer not in carrier.optimizers().values():
            raise ConfigError("register the outer object and its optimizer: job.register(..., outer=outer)")
        if training.at.in_epochs:
            raise ConfigError("elastic.asynchronous() is the whole loop: leave job.epochs() out, total= counts rounds")
        if self.session.compression != "none" or self.session.reduction.of_integers:
            raise ConfigError("elastic.asynchronous() sums whole parameters: leave --compression and --reduction out")
        if self.session.verification.every:
            raise ConfigError("--verify compares workers that are alike; here each trains by itself")
        # Each worker has its own: moments and schedulers.
        alike = {name for name, thing in carrier.objects.items() if isinstance(thing, nn.Module)} | set(found)
        carrier.leave_undigested(*(name for name in carrier.objects if name not in alike))
        training.registered.choose([])
        training.agreement.plan_steps(None, self.data.shards)
        first = training.begin_steps({**self.data.about(), UNWAITING: True})
        self.values, self.buffers = OwnValues(carrier, outer), OwnBuffers(carrier)
        outer.prepare(self.session, self.calls, self.data.shards)
        if self.calls is not None:
            self.calls.answer_with(self.answer)
        if first == 0 and training.at.step == 0:
            self.job.print(
                f"elastic: asynchronous training, {outer.left.count} units of {outer.every} inner steps; the bits of "
                "the result depend on the times of the run"
            )
        return Steps(training, PassWork(self.data.shards, None, "mean", OPTIONAL), Extent(first, 0, None, None, None))

    def _end(self) -> None:
        self._over = True
        self.outer.close()
        if self.calls is not None:
            self.calls.close()

    def answer(self, connection: CopyConnection, request: Mapping[str, Any]) -> bool:
        """A question of another worker. Threads of the listener."""
        match request:
            case {"want": "phase_over", "phase": int(phase), "worker": str(worker), "idle": bool(idle), "goes": goes}:
                received(connection, [])
                self.asked = max(self.asked, phase if idle else -1)
                self.leaves = max(self.leaves, phase if goes is True else -1)
                self.stopped[worker] = phase
                connection.send({})
                return True
        return self.outer.answer(connection, request)

    @property
    def goes(self) -> bool:
        """Whether the job goes on without this worker, whose node has little time, or stops."""
        session = self.session
        return session.due and (session.going is not None or session.parting)

    def stop_together(self, phase: int, roster: list[str], *, idle: bool) -> None:
        """Tell the others that this worker exchanges nothing more in the phase, and wait until all that live have said
        so. Until then it answers them. idle: whether it has nothing to do any more."""
        me, told = self.session.worker_id, {self.session.worker_id}
        said = dict[str, Json](want="phase_over", phase=phase, worker=me, idle=idle, goes=self.goes)
        self.session.waits(f"the end of phase {phase}")
        while self.calls is not None:
            self.session.leave_if_over()
            members = self.session.place().members
            self.calls.keep(members)  # one that has come since the last exchange is called, too
            here = [worker for worker in roster if worker in members]
            for worker in here:
                if worker not in told:
                    with suppress(CopyFailed):
                        self.calls.ask("over", worker, said, [], TOLD_S)
                        told.add(worker)
            if all(worker in told and (worker == me or self.stopped.get(worker) == phase) for worker in here):
                return
            time.sleep(LOOK_S)


class LocalPhase:
    """A phase on this worker: `for x, y in phase` gives the batches of its inner steps."""

    def __init__(self, phases: LocalPhases, index: int, roster: list[str], *, in_step: bool) -> None:
        """index: of the step of the job. in_step: as of LocalTraining.begin_phase."""
        self._phases, self.index, self._roster = phases, index, roster
        self._outer = phases.outer
        self.over = False
        self.metrics: dict[str, float] = {}
        """Means of what all workers have logged, and the counts of the phase; empty before its end."""
        self._logged: dict[str, tuple[float, int]] = {}
        self._done: list[int] = []
        self._running = self._trained = False
        """Whether an inner step runs; whether one has run: each phase has one, so that training gets on."""
        self._begun_s = time.monotonic()
        self._behind = phases.training.at.behind
        """Whether this worker gets the results of a phase in which it was no member."""
        self._units: Iterator[int] = iter(())
        self._unit: int | None = None
        self._next: int | None = None
        self._outer.start = self._outer.flat.read()
        assert phases.values is not None and phases.buffers is not None
        self._values, self._buffers = phases.values, phases.buffers
        self._values.begin(behind=self._behind)
        self._buffers.begin()
        if not self._behind:
            self._outer.put_moments()
            self._outer.begin_phase(index, roster, in_step=in_step)
            self._outer.put_back(phases.own)
            me = phases.session.worker_id
            self._units = self._outer.left.share(me, roster, self._outer.begun)
            self._unit, self._next = next(self._units, None), next(self._units, None)

    def __iter__(self) -> LocalPhase:
        return self

    def __next__(self) -> Any:
        """The next batch."""
        if self.over:
            raise StopIteration
        phases = self._phases
        if self._running:
            self._end_step()
        phases.session.leave_if_over()
        age_s = time.monotonic() - self._begun_s
        due = not self._behind and phases.session.due
        asked = self._next is not None and phases.asked >= self.index
        limits = (phases.phase_s, phases.last_end_s)
        leaves = phases.leaves >= self.index or (due and phases.goes)
        over = self._trained and is_over(age_s, *limits, due=due, asked=asked or leaves)
        if self._unit is None or over:
            self._end()
            raise StopIteration
        return self._batch(self._unit)

    def _batch(self, unit: int) -> Any:
        phases, data = self._phases, self._phases.data
        round, shard = divmod(unit, data.shards)
        epoch, position = divmod(round, len(data))
        batch = data.part(epoch, position, shard, phases.inner)
        seed_shard(phases.training.seed, round, 0, shard, phases.inner)
        self._running = phases.training.calls.unwaiting = True
        return batch

    def _end_step(self) -> None:
        phases = self._phases
        self._running = phases.training.calls.unwaiting = False
        self._trained = True
        phases.session.advanced()
        self._outer.between_steps()
        phases.inner += 1
        if phases.inner == self._outer.every:
            assert self._unit is not None
            self._done.append(self._unit)
            self._outer.exchange(len(self._done))
            self._unit, self._next, phases.inner = self._next, next(self._units, None), 0

    @property
    def inner_index(self) -> int:
        """The number of the inner step in the job, for each replica, from 0: for schedules of learning rates. Raises
        UsageError outside the inner loop."""
        if not self._running or self._unit is None:
            raise UsageError("phase.inner_index is for the inner loop")
        return self._unit // self._phases.data.shards * self._outer.every + self._phases.inner

    def log(self, **values: Number) -> None:
        """Record scalars of this inner step; `metrics` has their means over the phase and all workers. Raises
        UsageError outside the inner loop, and for reserved names."""
        if not self._running:
            raise UsageError("phase.log() is for the inner loop")
        for name, value in values.items():
            if name.startswith(RESERVED):
                raise UsageError(f"phase.log: names that start with {RESERVED!r} are reserved; rename {name!r}")
            total, count = self._logged.get(name, (0.0, 0))
            self._logged[name] = total + as_number(value, f"phase.log: {name}"), count + 1

    def _end(self) -> None:
        """Come together: afterwards the model has the common parameters."""
        phases, outer, training = self._phases, self._outer, self._phases.training
        if not self._behind:
            phases.stop_together(self.index, self._roster, idle=self._unit is None)
            phases.own = outer.end_phase(in_unit=phases.inner > 0)
            outer.take_moments()
            outer.flat.write(outer.start)  # all workers compare their weights with each sum
        begun_s = time.monotonic()
        values = self._values.end(behind=self._behind)
        self._buffers.end(f"phase {self.index}", trained=self._trained)
        training.session.may_part = False  # all may stop in the next pass, which begins with a checkpoint if one is due
        begun = self._unit if phases.inner else None
        counts = {"applied": {}, "sums": {}, "most": {}} if self._behind else outer.counts()
        note = phase_notes.note(self._done, begun, self._logged, {**counts, "values": values})
        # Before the sum: a worker that leaves as planned behind the sum has said what it has done.
        notes = self._told(f"phase {self.index}", note)
        whole = False
        attempt = 0
        while not whole:
            label = f"phase {self.index}, sum {attempt}"
            whole = phases.sums.sum(label, len(self._roster), self._contribution(), self._take)
            attempt += 1
        behind_sum = {"ended_s": time.monotonic() - begun_s, **({} if self._behind else outer.losses())}
        ends = self._told(f"end of phase {self.index}", behind_sum)
        summary = phase_notes.summary(notes, ends, self._roster, outer.left, outer.begun)
        self.metrics = outer.settle(summary)
        training.log(self.metrics)
        for worker in summary.gone if phases.job.is_leader else ():
            training.session.note("update_lost", of=worker)
        phases.last_end_s = summary.end_s
        self._values.settle(summary.values)
        self.over = True

    def _told(self, label: str, own: Json) -> dict[str, Any]:
        """What each living worker says."""
        calls = self._phases.training.calls
        said = calls.collective(OpKind.ALLREDUCE, label, 1, empty_leaf, lambda result: result.note, own)
        return cast(dict[str, Any], said)

    def _contribution(self) -> dict[str, list[torch.Tensor]]:
        mine = self._outer.contribution()
        buffers = self._buffers.contribution(first=self._phases.session.rank == 0)
        mine["float64"] = [*mine["float64"], buffers]
        return (
            {group: [torch.zeros_like(one) for one in parts] for group, parts in mine.items()} if self._behind else mine
        )

    def _take(self, sums: Sums, workers: int) -> bool:
        """As LocalTraining.take_sums, with the buffers, which come last."""
        doubles = sums["float64"].cpu()
        outers, buffers = doubles.split([len(doubles) - self._buffers.elements, self._buffers.elements])
        return self._outer.take_sums({**sums, "float64": outers}, workers) and self._buffers.take(buffers)
