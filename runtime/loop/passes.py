"""A pass: shards handed out, harvested and reduced, until the gradients of the whole step are in place.

The iterator is a class, because a generator that is left by `break` closes unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias

from elastic.errors import UsageError
from elastic.protocol.loop_state import Join, PassRepeated, RehearsalOver, ResultHeld, ScriptStage
from runtime.allreduce.reduction.gradient_harvest import Harvest
from runtime.allreduce.reduction.partial_sum import Json, Partial, Scalars
from runtime.data.loader import Loader
from runtime.data.prefetcher import Wanted
from runtime.data.random_state import ShardRandom
from runtime.data.stream import Stream
from runtime.guards import checks
from runtime.loop.control_scalars import RESERVED, UNRECORDED
from runtime.loop.step_cache import Cached
from runtime.loop.training import Training
from runtime.recovery.state.change_detection import StateMarks
from runtime.recovery.state.verification import digest_of
from runtime.session import Op, OpKind, StepRecord

Gradients: TypeAlias = Literal["mean", "sum"]
Nonfinite: TypeAlias = Literal["pass", "skip", "stop"]
Source: TypeAlias = Loader | Stream


class ShardSource(Protocol):
    """The data of a pass; see Loader."""

    def weight(self, shard: int) -> float: ...
    def samples(self, epoch: int, step: int) -> list[Any]: ...
    def begin_step(self, epoch: int, step: int) -> None: ...
    def batch(self, wanted: Wanted, own: tuple[int, ...] | None) -> Any: ...
    def ends(self, shard: int) -> bool: ...
    def release(self) -> None: ...


REHEARSALS = 2
"""How many shards are run and thrown away at the start, if there are as many: the second one meets what the first left.
Later, one shard is thrown away when a worker computes no shard of the n-th pass of a step, and has never done so: a
GradScaler begins with a shard. Shards that the script skips do not count."""
CHECKSUM_STEPS = 256
"""Every this many steps a pass also compares checksums of all weights; see change_detection.py."""
REPEATS_MAX = 2
"""The first repetition has exponents that fit the pass; more show gradients that differ from one time to the next."""
ENDS = RESERVED + "epoch ends"
"""Name of a scalar in the reduction of an epoch's last step, when only the reader of the data knows the end."""

NONFINITE = RESERVED + "nonfinite"
"""Among the metrics of a step: how many of its passes had a gradient with an infinity or NaN; absent if none."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a step. index counts the steps of the job, position those of the epoch."""

    index: int
    epoch: int
    position: int
    total: int | None
    """Steps of the whole job; None: not known."""
    last_in_epoch: bool


@dataclass(frozen=True, slots=True)
class PassWork:
    """What a loop does in each of its steps. loader: the data; None: the script draws it. gradients: how gradients are
    reduced. allow: guards that are off. nonfinite: what happens to gradients that are not finite. inner_steps:
    of a round, which each shard makes as a replica, see outer_pass.py; 0: a shard is a shard."""

    shards: int
    loader: ShardSource | None
    gradients: Gradients
    allow: frozenset[str]
    nonfinite: Nonfinite = "pass"
    inner_steps: int = 0

    def weight(self, shard: int) -> float:
        """The weight of a shard that was not weighed: its number of samples, or 1 if equal for all or not known."""
        return 1.0 if self.loader is None else self.loader.weight(shard)

    def samples(self, place: Place) -> list[Json]:
        """What each shard was given, as Loader.samples or Stream.samples has it; [] if the script draws it."""
        return [] if self.loader is None else self.loader.samples(place.epoch, place.position)


@dataclass(frozen=True)
class Shard(ShardRandom):
    """The shard that the inner loop's body computes now: `step.shard`.

    seed, generator (torch, CPU) and numpy depend on (seed, step, pass, shard) only; the global RNGs of torch, numpy
    and random are seeded alike.
    """

    index: int
    inner: int = 0
    """With outer=, the number of the inner step in its round, from 0."""


@dataclass(slots=True)
class Contribution:
    """What the loop's body has said about its shard."""

    logged: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Name -> ("mean" or "sum", value)."""
    weight: float | None = None
    skipped: bool = False

    def scalars(self, weight: float) -> Scalars:
        """The logged values as the reduction carries them."""
        return {
            name: (kind, value * weight if kind == "mean" else value, weight)
            for name, (kind, value) in self.logged.items()
        }


@dataclass(slots=True)
class RunningPass:
    """A step in progress: Step shows it and Pass changes it."""

    work: PassWork
    place: Place
    locate: Callable[[int], Place]
    """Step index -> place: a newcomer learns late which step it has entered."""
    metrics: dict[str, float] = field(default_factory=dict)
    shard: Shard | None = None
    contribution: Contribution = field(default_factory=Contribution)
    passes: int = 0
    ended: bool = False
    """Whether the data of the epoch is used up."""
    cached: Cached = field(default_factory=Cached)
    record: StepRecord | None = None
    """The record of the passes so far; None until the first pass is reduced."""


SAMPLES_SHOWN = 8


def samples_in_words(samples: Sequence[Json], shard: int) -> str:
    """What a shard was given, in a few words, by PassWork.samples; "": that is not known."""
    given = samples[shard] if shard < len(samples) else None
    if isinstance(given, list):
        return f"samples {', '.join(map(str, given[:SAMPLES_SHOWN]))}{', ...' * (len(given) > SAMPLES_SHOWN)}"
    return ", ".join(f"{name} {value}" for name, value in given.items()) if isinstance(given, dict) else ""


class Trials(Protocol):
    """Which shards of a pass are computed and thrown away."""

    keeps_fingerprint: bool
    """Whether the script may change in a rehearsal what all workers must have in common."""

    def rehearsals(self) -> int:
        """How many shards to rehearse, if there are as many."""

    def untried(self, skipped: Set[int]) -> int | None:
        """A shard to try before the result is used; None: none. skipped: those that the script has left out."""

    def told(self, why: UsageError, before: StateMarks | None) -> UsageError:
        """The error to raise for state that the body has changed. before: what it was like when the pass began."""


class LoopTrials:
    """Trials of `for batch in step`."""

    keeps_fingerprint = False

    def __init__(self, training: Training, running: RunningPass) -> None:
        self._training = training
        self._running = running
        self._number = running.passes

    def rehearsals(self) -> int:
        """REHEARSALS in the first step of the job, or of this worker; later see there."""
        training = self._training
        if self._running.place.index == 0 or training.at.joining:
            return REHEARSALS
        owned = training.session.owned(self._running.work.shards)
        return int(not (self._number in training.scope.passes_tried or owned))

    def untried(self, skipped: Set[int]) -> int | None:
        """One if this worker has computed none of this pass so far: the script may have skipped all it had. None for a
        stream, which hands out each shard once."""
        if self._number in self._training.scope.passes_tried or isinstance(self._running.work.loader, Stream):
            return None
        return next((shard for shard in range(self._running.work.shards) if shard not in skipped), None)

    def told(self, why: UsageError, before: StateMarks | None) -> UsageError:
        return why


class Pass(Iterator[Any]):
    """One pass over the shards: rehearsals if they are due, this worker's shards, then the result of all shards."""

    def __init__(self, training: Training, running: RunningPass, trials: Trials | None = None) -> None:
        """trials: default LoopTrials."""
        self._training = training
        self._running = running
        self._trials: Trials = trials or LoopTrials(training, running)
        self._skipped: set[int] = set()
        self.number = running.passes
        self._begun = False
        self._over = False
        self._rehearsals: list[int] = []
        self._result: Partial | None = None
        """The reduced result of the pass, held back while a shard runs that is thrown away."""
        self._rehearsed = False
        self._repeats = 0
        """How often the pass was computed again because a gradient did not fit its integers."""
        self._fingerprint: dict[str, str] | None = None
        """The fingerprint when the pass began, if the script may change it in a rehearsal."""
        self._snapshot: StateMarks | None = None
        self._checksums: StateMarks | None = None
        self._verified: int | None = None
        """The shard of this pass that several workers compute."""
        self._checks = 0
        """How often this worker is still to compute it for no other purpose."""
        self.sends_early = True  # parts of a worker's last shard may leave before it is over
        self.verifying = False
        """Whether the running shard is computed only to be compared."""
        self._harvest: Harvest
        """For the parameters that are trained when the pass begins."""

    @property
    def where(self) -> str:
        """In words."""
        return f"pass {self.number} of step {self._running.place.index}"

    @property
    def collects(self) -> bool:
        """Whether shards that are computed now count."""
        return self._is(ScriptStage.COLLECTING) and not self.verifying

    def settle_rates(self, rates: dict[str, Any]) -> None:
        """The script may have set these learning rates since the pass began. rates: as Carrier.watch_rates has them."""
        self._snapshot, self._checksums = (
            None if marks is None else replace(marks, marks={**marks.marks, **rates})
            for marks in (self._snapshot, self._checksums)
        )

    def __next__(self) -> Any:
        """The next batch. Raises the guards' errors for what the body did with the last one."""
        shard = self.next_shard()
        if shard is None:
            raise StopIteration
        return self.begin_shard(shard)

    def next_shard(self) -> int | None:
        """End the shard that runs, if one does. Returns the next shard to compute; None: the result of all is in place.
        Raises the guards' errors for what the body did."""
        checks.check_capture(self.where)
        if self._running.shard is not None and self._begun:
            self._end_shard(self._running.shard)
        if not self._begun:
            self._open()
        if self._over:
            return None
        if self._is(ScriptStage.REHEARSING):
            if self._rehearsals:
                return self._rehearsals.pop(0)
            if self._rehearsed and (shard := self._trials.untried(self._skipped)) is not None:
                return shard
            self._end_rehearsal()
        if self._is(ScriptStage.TRYING):
            if (shard := self._trials.untried(self._skipped)) is not None:
                return shard
            assert self._result is not None
            self._end(self._result)
        while self._is(ScriptStage.COLLECTING):
            if (verified := self._to_verify()) is not None:
                return verified
            unit = self._training.session.next_unit()
            if unit is not None:
                return unit
            self._check_unchanged()
            result = self._training.session.finish()
            if result is not None and self._repeated(result):
                continue
            if result is not None and (shard := self._trials.untried(self._skipped)) is not None:
                self._training.post(ResultHeld())
                self._result = result
                return shard
            if result is not None:
                self._end(result)
        return None

    def _is(self, stage: ScriptStage) -> bool:
        """Whether this pass, which has begun and is not over, is so far."""
        return self._training.at.stage is stage

    def _open(self) -> None:
        training, place = self._training, self._running.place
        self._harvest = training.begin_pass(place.index, self.number, self._running.work.allow)
        if self._running.work.loader is not None:
            self._running.work.loader.begin_step(place.epoch, place.position)
        first = place.index == 0 or training.at.joining
        self._snapshot = training.carrier.watch()
        if first or place.index % CHECKSUM_STEPS == 0:
            self._checksums = training.carrier.watch(full=True)
        self._harvest.begin_pass(training.seed, place.index, self.number)
        self._begun = True
        shards = self._running.work.shards
        if self._trials.keeps_fingerprint:
            self._fingerprint = training.agreement.fingerprint()
        if (rehearsals := self._trials.rehearsals()) > 0:
            self._rehearsals = list(range(min(rehearsals, shards)))
            self._rehearsed = True
        if first and "LossDivided" not in self._running.work.allow:
            training.registered.watch_losses(lambda loss: checks.check_loss(loss, shards))

    def _end_rehearsal(self) -> None:
        training, place = self._training, self._running.place
        training.registered.cleanup.close()
        if self.number == 0:
            self._running.cached.clear()
        if self._rehearsed and self._running.work.loader is not None:
            self._running.work.loader.release()
        if isinstance(training.post(RehearsalOver()), Join):
            self._check_unchanged()
            here = self._op(place)
            op, result = training.session.join(here, self._fingerprint or training.agreement.fingerprint())
            self._fingerprint = None
            self._running.place = place = self._running.locate(op.step)
            training.joined(place.index, place.epoch, result=result is not None)
            self._harvest = self._harvest_here()
            self._harvest.begin_pass(training.seed, place.index, self.number)
            self._snapshot, self._checksums = training.carrier.watch(), training.carrier.watch(full=True)
            if result is not None:
                if not self._repeated(result):
                    self._result = result
                return
        self._collect(place, self._fingerprint or training.agreement.fingerprint())

    def _harvest_here(self) -> Harvest:
        """For this pass, after its place has become another one."""
        return self._training.registered.harvest()

    def _collect(self, place: Place, fingerprint: dict[str, str]) -> None:
        harvest, op, session = self._harvest, self._op(place), self._training.session
        work = self._running.work
        # A round of inner steps takes too long to be computed twice: of those the states alone are compared.
        comparable = op.joinable and not isinstance(work.loader, Stream) and not work.inner_steps
        self._verified = session.verification.shard(place.index, op.units) if comparable else None
        self._checks = 0 if self._verified is None else self._checks_of(self._verified)
        early = self.sends_early and self._verified is None  # what has been sent would be used
        session.begin(op, fingerprint, harvest.groups(), cuts=harvest.early.cuts if early else ())

    def _checks_of(self, shard: int) -> int:
        """How often this worker computes that shard only to compare its values with those of others."""
        session, running = self._training.session, self._running
        here = session.place()
        own = shard in (session.owned(running.work.shards) or ())
        return session.verification.again(running.place.index, here.rank, here.world, own=own)

    def _to_verify(self) -> int | None:
        """The shard that this worker computes only to be compared; None: none. It comes before those that count: what
        a script has in its variables behind the pass is that of a shard of its own, as without --verify."""
        if self._checks == 0:
            return None
        self._checks -= 1
        self.verifying = True
        self._training.session.advanced()  # a shard more than others compute is no hang
        return self._verified

    def _repeated(self, result: Partial) -> bool:
        """Whether the pass has to be computed again, and has begun again, on all workers alike: see Harvest.misfits.
        Raises UsageError if that did not help."""
        if not self._harvest.misfits(result):
            return False
        self._repeats += 1
        if self._repeats > REPEATS_MAX:
            raise checks.other_gradients(self.where)
        self._training.session.note("pass_repeated", step=self._running.place.index, pass_no=self.number)
        self._training.session.used()
        self._training.post(PassRepeated())
        self._collect(self._running.place, self._fingerprint or self._training.agreement.fingerprint())
        return True

    def _op(self, place: Place) -> Op:
        label = f"again {self._repeats}" if self._repeats else ""
        return Op(
            OpKind.PASS,
            self._running.work.shards,
            self._training.at.shared_epoch,
            place.index,
            self.number,
            label=label,
        )

    def begin_shard(self, shard: int) -> Any:
        """The shard's batch, with everything that the shard may read reset to its value at the start of the pass."""
        training, running = self._training, self._running
        training.calls.running = shard
        loader, place = running.work.loader, running.place
        batch = None
        if loader is not None:
            training.session.draws(shard, lambda: samples_in_words(running.work.samples(place), shard))
            wanted = Wanted(place.epoch, place.position, self.number, shard)
            try:
                batch = loader.batch(wanted, training.session.owned(running.work.shards))
            except StopIteration as error:  # it would end the inner loop as if all shards were done
                raise RuntimeError(f"the data raised StopIteration for shard {shard} in {self.where}") from error
        running.shard = Shard(self._harvest.before(shard), shard)
        running.contribution = Contribution()
        if self.collects and (early := training.session.send_early()) is not None:
            self._harvest.early.expect(early, lambda: self._counted(shard))
        running.cached.begin_shard()
        return running.shard if loader is None else batch

    def _end_shard(self, shard: Shard) -> None:
        training, work, said = self._training, self._running.work, self._running.contribution
        self._running.shard = None
        if not said.skipped and "NoGradient" not in work.allow and not self._harvest.has_gradient():
            raise checks.no_gradient(f"shard {shard.index} in {self.where}")
        if said.skipped:
            self._skipped.add(shard.index)
        else:
            training.scope.passes_tried.add(self.number)
        if not self._is(ScriptStage.COLLECTING):
            self._check_unchanged()
            self._harvest.drop_shard()
            training.calls.running = None
            return
        weight = work.weight(shard.index) if said.weight is None else said.weight
        scalars = {} if said.skipped else said.scalars(weight)
        if work.loader is not None and work.loader.ends(shard.index):
            scalars[ENDS] = ("sum", 1.0, 0.0)
        counted = self._counted(shard.index)
        leaf = self._harvest.leaf(shard.index, counted, scalars)
        if shard.index == self._verified:
            training.session.vouch(shard.index, digest_of(leaf))
        training.calls.running = None
        if self.verifying:
            self.verifying = False
            self._harvest.drop_shard()
            return
        leaf.scalars = training.riders.travel(scalars)
        training.session.unit_done(leaf)

    def _counted(self, shard: int) -> float:
        """By what the gradients of the running shard are multiplied, as far as the script has said."""
        work, said = self._running.work, self._running.contribution
        if said.skipped:
            return 0.0
        if work.gradients == "sum":
            return 1.0
        return work.weight(shard) if said.weight is None else said.weight

    def _check_unchanged(self) -> None:
        if "StateChanged" in self._running.work.allow:
            return
        carrier = self._training.carrier
        watched = [snapshot for snapshot in (self._snapshot, self._checksums) if snapshot is not None]
        found = (self._unexpected(carrier.changed(snapshot)) for snapshot in watched)
        if changed := next(filter(None, found), []):
            raise self._trials.told(checks.state_changed(self.where, changed, carrier.fixed()), self._snapshot)

    def _unexpected(self, changed: list[str]) -> list[str]:
        """Which of these changes, named as by Carrier.changed, a body must not make."""
        return changed

    def _end(self, result: Partial) -> None:
        training, running = self._training, self._running
        running.metrics.update(training.riders.arrive(result.scalars))
        self._install(result)
        training.session.used()
        running.passes += 1
        if ENDS in result.scalars:
            running.ended, running.place = True, replace(running.place, last_in_epoch=True)
        running.record = StepRecord(
            step=running.place.index,
            epoch=running.place.epoch,
            generation=training.session.generation,
            world_size=training.session.world_size,
            lr=training.carrier.learning_rates(),
            scalars={name: value for name, value in running.metrics.items() if not name.startswith(UNRECORDED)},
            samples=running.work.samples(running.place),
            data=training.agreement.plan(running.place.epoch),
        )
        training.end_pass(self.where, running.work.allow)
        self._over = True

    def _install(self, result: Partial) -> None:
        """Install the result. Raises NonFinite. All workers have the same result, so all decide alike."""
        running = self._running
        policy = running.work.nonfinite

        def accept(nonfinite: list[str]) -> bool:
            if policy == "stop":
                raise checks.nonfinite(self.where, nonfinite)
            running.metrics[NONFINITE] = running.metrics.get(NONFINITE, 0.0) + 1.0
            return policy != "skip"

        self._harvest.install(result, running.work.gradients, accept)
