"""Shared by the objects of one job in one worker: session, registered state, and the place in the script.

Job, Epochs, Steps, Step, Pass and evaluate() are views on it. Training checks the order of calls (nothing collective
before the loop, one open pass, a step applied when the next is asked for) and runs operations on the session.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from types import FrameType
from typing import Any, Protocol, cast

import torch

from elastic.agent.worker.examination import Examination
from elastic.checkpoints.manifest import Manifest, Moment
from elastic.checkpoints.naming import EntryName
from elastic.checkpoints.settings import Settings
from elastic.config import Reduction
from elastic.errors import ConfigError, Disagree, JoinMissed, UsageError
from elastic.protocol.loop_state import (
    AskEarly,
    AskShared,
    AwaitInvitation,
    Called,
    CalledEarly,
    EpochBegun,
    EpochOver,
    HandedOut,
    JoinOver,
    LoadAgain,
    LoopBegun,
    LoopEntered,
    LoopKind,
    LoopOver,
    LoopState,
    Mistake,
    Move,
    PassBegun,
    RecallEarly,
    RecallReply,
    Reduced,
    Refuse,
    RunTogether,
    ScriptEvent,
    SharedCalled,
    Standing,
    StepLeft,
    StepsBegun,
    StepsOver,
)
from runtime.allreduce.fixed_point.exponents import BlockExponents
from runtime.allreduce.reduction.gradient_harvest import Harvest
from runtime.allreduce.reduction.partial_sum import Json, Partial
from runtime.data.random_state import drawn_from, randomness_kept, seed_all
from runtime.guards import checks, numerics_fingerprint
from runtime.guards.module_attributes import Attributes
from runtime.guards.refusals import place_of, refusal
from runtime.guards.unregistered import Strays, caller
from runtime.loop.call_replies import CallReplies
from runtime.loop.control_scalars import ControlScalars
from runtime.loop.exactness_probe import Examiner
from runtime.loop.leader_hooks import LeaderHooks
from runtime.loop.world_hooks import WorldHooks
from runtime.recovery.checkpoint.coordinator import Taking
from runtime.recovery.checkpoint.memory_snapshots import Snapshots
from runtime.recovery.state.script_state import Values
from runtime.recovery.state.training_state import Carrier
from runtime.script_end import exit_now
from runtime.session import Copy, JoinMeta, LoopPlace, Op, OpKind, Session, StepRecord

STRAYS_STEPS = 256
"""Every this many steps, values that are not registered are checked for changes."""
_SHOWN_CHARACTERS_MAX = 200
_EXPONENTS = "exponents of --reduction fixed"
"""A name among the registered objects that no script can give to another one."""


class OpenStep(Protocol):
    """The step in progress, for Training."""

    @property
    def record(self) -> StepRecord:
        """Its record, once its first pass is over."""


class Training:
    """One worker's side of a job. Used by the user's thread only."""

    def __init__(
        self, session: Session, *, seed: int, threads: int, device: torch.device, checkpoints: Settings
    ) -> None:
        self.session = session
        self.seed = seed
        self.threads = threads
        self.device = device
        self.values = Values()
        self.carrier = Carrier(self.values, device)
        self.checkpoints = Taking(session, self.carrier, checkpoints)
        self.snapshots = Snapshots(session, self.carrier, checkpoints)
        self.riders = ControlScalars((self.checkpoints, self.snapshots))
        self.leading = LeaderHooks(session)
        examination = Examination.from_environment(os.environ)
        self.exponents = _exponents(session.reduction)
        if self.exponents is not None:
            self.carrier.register(None, **{_EXPONENTS: self.exponents})
        self.examiner = Examiner(examination, self.carrier) if examination is not None else None
        self.changes = WorldHooks(session)
        session.before_leaving(self._before_leaving)
        self.shards: int | None = None
        self.data: dict[str, Json] | None = None
        """How the samples of this epoch are planned; None: the script draws its own."""
        self.data_elsewhere: dict[str, Json] | None = None
        """How the others, or an earlier run, have planned the samples of the epoch in progress."""
        self.where: Callable[[], dict[str, str]] = dict
        """Further parts of the fingerprint that say where the script is."""
        self._planned: tuple[int | None, int] | None = None
        self.open_step: OpenStep | None = None
        self.running: int | None = None
        """The shard or part that the script computes now; None: none."""
        self._leaders: str | None = None
        """The call in progress whose code only the leader runs; None: none."""
        self._unfinished: Op | None = None
        """The operation in which the script's own function has raised; None: none."""
        self.replies = CallReplies()
        self._epoch_values: dict[str, Json] = {}
        """job.state when this epoch was handed out."""
        self._later: dict[str, Any] | None = None
        """job.state in the step that this worker enters; until the steps of its epoch it is as at the epoch's start."""
        self._called = False
        """Whether the workers have made a collective call between passes."""
        self._meta: JoinMeta | None = None
        self._left: StepRecord | None = None
        """The record of the step that was left last, until the next step is handed out."""
        self._logged: dict[str, float] = {}
        """Values of job.log() for that step, the step in progress, or the first."""
        self.place_read = False
        """Whether the script has read which step it is in."""
        self.passes_tried: set[int] = set()
        """Numbers of passes within a step of which this process has run a shard."""
        self._drawn_from: object = None
        self._copy: Copy | None = None
        self._harvest = Harvest([])
        self._trainable: list[int] = []
        self._guard = checks.OptimizerGuard()
        self._attributes = Attributes({})
        self._strays: Strays | None = None
        self._strays_due = False
        self.cleanup = ExitStack()
        """What must be undone when a rehearsal, or the job, ends."""

    @property
    def at(self) -> LoopState:
        """Where the script is."""
        return self.session.script.at

    def post(self, event: ScriptEvent, call: str = "") -> Move:
        """What follows from what has happened. call: what the script has called. Raises UsageError for a mistake of the
        script, JoinMissed."""
        move = self.session.script.post(event)
        if isinstance(move, Refuse):
            raise refusal(move.mistake, self.at, call)
        return move

    # Entering

    def plan_steps(self, total: int | None, shards: int) -> None:
        """Journal how many steps the job has (None: a stream decides), and how many shards each step has."""
        if (total, shards) != self._planned:
            self._planned = total, shards
            self.session.note("steps_planned", total=total, shards=shards)

    def claim_shards(self, shards: int) -> None:
        """Set V, which is fixed for the job: every loop and loader must ask for the same. Raises ConfigError."""
        if self.shards not in (None, shards):
            raise ConfigError(
                f"shards={shards} here and shards={self.shards} before; the number of shards is fixed for the whole "
                "job, because it decides the order of every sum"
            )
        self.shards = shards
        if self.exponents is not None:
            self.exponents.units = shards

    def enter_loop(self, loop: LoopKind) -> None:
        """Begin the script's loop: freeze what is registered, and start together, or learn where the others are. Raises
        SecondLoop."""
        if not self.carrier.modules():
            raise ConfigError("no model is registered; call job.register(model=model, optimizer=optimizer) first")
        meta = None
        if isinstance(self.post(LoopBegun(loop), f"{loop}()"), AwaitInvitation):
            self.session.await_invitation()
            meta = self.session.meta()
        manifest = self.checkpoints.resume() if meta is None else None
        if meta is not None:
            self.checkpoints.restored(meta.step, meta.epoch, meta.state)
        self.carrier.freeze()
        self._guard.attach(self.carrier.optimizers())
        self._attributes = Attributes(self.carrier.modules())
        self.session.attach(self.carrier)
        if meta is not None:
            self.values.update_from_json(meta.state, self.carrier.place)
            replies = self.replies
            replies.of_epoch, replies.shared, replies.early = dict(meta.once), dict(meta.shared), dict(meta.early)
            self._epoch_values = dict(meta.values)
            self.data_elsewhere = meta.data
            entered = LoopEntered(meta.epoch, meta.step, meta.epoch_start)
        else:
            entered = self._resume(manifest) if manifest is not None else LoopEntered()
            self.run(Op(OpKind.SYNC, 1), {}, empty_leaf)
        self.post(entered)
        self.leading.begin(self.at.step)
        seed_all(self.seed, "loop")

    def _resume(self, manifest: Manifest) -> LoopEntered:
        """Load the state of a checkpoint. Raises ConfigError if the script has changed what decides the bits."""
        moment = manifest.moment
        if moment.seed != self.seed:
            raise ConfigError(
                f"this job was begun with seed={moment.seed}, and the script says seed={self.seed}; go on with the old "
                "one, or start anew with --fresh"
            )
        session = self.session
        for option, old, new in (
            ("--reduction", moment.reduction or session.reduction, session.reduction),
            ("--compression", moment.compression, session.compression),
        ):
            if old != new:
                raise ConfigError(
                    f"this job was begun with {option} {old}, and goes on with {new}, which has other bits; go on with "
                    "the old one, or start anew with --fresh"
                )
        if moment.shards:
            self.claim_shards(moment.shards)
        self.checkpoints.load(manifest)
        self._epoch_values = dict(moment.values)
        self.replies.of_epoch = dict(moment.once)
        self.replies.shared = {**moment.shared, **self.replies.shared}
        self.data_elsewhere = moment.data
        return LoopEntered(moment.epoch, moment.step, moment.epoch_start, resumed=True)

    def end_epoch(self, *, last: bool) -> None:
        """End an epoch: the script asks for the next. Raises JoinMissed in a newcomer that has not entered."""
        self.leave_step()
        self._end_early()
        self._check_strays(due=True)
        self.post(EpochOver())
        if not last:
            # A stop() since the last step has met no reduction yet; without this one it would cost a step.
            self.run(Op(OpKind.ONCE, 1, self.at.epoch, self.at.step, label="epochs"), {}, empty_leaf)
        self.replies.end_epoch()

    def begin_epoch(self, epoch: int) -> None:
        """Hand out an epoch."""
        self.post(EpochBegun(epoch))
        self.replies.begin_epoch()
        seed_all(self.seed, epoch, "epoch")
        if self.at.elsewhere:
            self._later = self.values.as_dict()
            self.values.rewind(self._epoch_values, self.carrier.place)
        else:
            self._epoch_values = self.values.to_json(packed=True)
        self.values.begin_early()
        self._attributes.begin_epoch()

    def begin_steps(self, data: dict[str, Json] | None) -> int:
        """Begin the steps() loop of this epoch. Returns the job index of its first step.

        data: see the attribute. Raises SecondLoop; ConfigError if the epoch was begun elsewhere with other data.
        """
        if not self.at.in_epochs:
            self.enter_loop(LoopKind.BARE)
        before = self.at
        self.post(StepsBegun())
        if before.elsewhere and self.data_elsewhere not in (None, data):
            raise checks.other_data(data, self.data_elsewhere, resumed=before.resumed)
        self.data = data
        return self.at.epoch_start

    def end_steps(self) -> None:
        """End the steps() loop of this epoch."""
        self.post(StepsOver())
        self._end_early()
        seed_all(self.seed, self.at.epoch, "behind the steps")

    def end_loop(self) -> None:
        """End the script's loop; evaluating and saving are still possible."""
        self.leave_step()
        self._end_early()
        self.session.loop_over()
        if self.examiner is not None:
            self.examiner.note(self.at.step, self.shards, caller())
            exit_now(0)
        self.post(LoopOver())
        seed_all(self.seed, "behind the loop")

    # Operations

    def run(self, op: Op, fingerprint: dict[str, str], compute: Callable[[int], Partial], own: Json = None) -> Partial:
        """Run a whole operation that reduces scalars only. own: see Session.begin."""
        self._check_finished()
        self.session.begin(op, fingerprint, own=own)
        while True:
            while (unit := self.session.next_unit()) is not None:
                self.running = unit
                try:
                    leaf = compute(unit)
                except Exception:
                    self._unfinished = op
                    raise
                leaf.scalars = self.riders.travel(leaf.scalars)
                self.session.unit_done(leaf)
                self.running = None
            if (result := self.session.finish()) is not None:
                self.riders.arrive(result.scalars)
                return result

    def in_turns(
        self,
        op: Op,
        fingerprint: dict[str, str],
        said: Callable[[int], dict[str, float]],
        totals: list[dict[str, float]],
    ) -> Iterator[int]:
        """As `run`, but the caller computes each unit that it gets before it asks for the next one.

        said: returns the scalars of the unit, which is computed. totals: gets their sums over all units.
        """
        self.session.begin(op, fingerprint)
        while True:
            while (unit := self.session.next_unit()) is not None:
                self.running = unit
                yield unit
                leaf = empty_leaf(unit)
                leaf.scalars = self.riders.travel({name: ("sum", value, 0.0) for name, value in said(unit).items()})
                self.session.unit_done(leaf)
                self.running = None
            if (result := self.session.finish()) is not None:
                totals.append(self.riders.arrive(result.scalars))
                return

    def collective(
        self,
        kind: OpKind,
        label: str,
        units: int,
        compute: Callable[[int], Partial],
        reply: Callable[[Partial], Json],
        own: Json = None,
    ) -> Json:
        """Run a call of all workers between passes; its reply is kept for newcomers of this epoch."""
        self._check_leaders(label)
        move = self.post(Called(), label)
        key = self.replies.next_key(label, self.at.early_calls if self.at.early else None)
        match move:
            case AskEarly():
                return self._ask_early(key)
            case RecallEarly():
                return self._recall_early(key)
            case RecallReply():
                return self.replies.told(key, self.at.epoch)
        self._leaders = "job.once()" if kind is OpKind.ONCE else None
        assert isinstance(move, RunTogether)
        op = Op(kind, units, self.at.epoch, self.at.step, label=label, early=move.early)
        try:
            with self._attributes.left_alone():
                value = reply(self.run(op, self.fingerprint(), compute, own))
        finally:
            self._leaders = None
        self._called = True
        if move.early:
            self._called_early(key, self.at.step, value)
        elif move.keep:
            self.replies.keep(key, value)
        return value

    @property
    def idle(self) -> bool:
        """Whether the workers have done nothing together: no step in this run or an earlier one, no call, no stop()."""
        return self.at.step == 0 and not self._called and self.riders.stopped is None

    def _called_early(self, key: str, step: int, value: Json) -> None:
        """Note an early call, between the hand-out of a step and its first pass: newcomers may need its reply."""
        self.post(CalledEarly())
        self.replies.keep_early(key, step, value)
        assert self._meta is not None
        self._meta = replace(self._meta, early=dict(self.replies.early))
        self.session.publish(self._meta)

    def _recall_early(self, key: str) -> Json:
        """The others' reply to an early call in the step whose state this newcomer has copied."""
        assert self._copy is not None
        if key not in self._copy.early:
            raise Disagree(
                f"this newcomer called {key!r} (n-th call, name) before the inner loop of step {self.at.step}, the "
                f"others {sorted(self._copy.early)}. Make such calls depend on step.index and job.state only."
            )
        value = self._copy.early[key]
        self._called_early(key, self.at.step, value)
        return deepcopy(value)

    def _ask_early(self, key: str) -> Json:
        """The others' reply to an early call in the step where they were when this newcomer asked. If that step is
        over, the reply to the same call in a later step will do, because this worker then copies again."""
        step = self.at.step

        def called_in(meta: JoinMeta) -> int:
            return cast(int, meta.early[key][0]) if key in meta.early else -1

        meta = self.session.meta(lambda meta: meta.step > step or called_in(meta) >= step)
        called = called_in(meta)
        if meta.epoch != self.at.shared_epoch or called < step:
            raise JoinMissed(f"step {step} was over before this newcomer had been told what {key!r} gave in it")
        value = meta.early[key][1]
        self._called_early(key, called, value)
        return deepcopy(value)

    def shared(
        self,
        name: str,
        compute: Callable[[int], Partial],
        reply: Callable[[Partial], Json],
        kind: OpKind = OpKind.ONCE,
        own: Json = None,
    ) -> Json:
        """A value that all workers share from before the loop; a newcomer gets it from a member, and a resumed run from
        the checkpoint. kind, own: as in `collective`."""
        label = f"shared({name})"
        shared = self.replies.shared
        if name in shared:
            return deepcopy(shared[name])
        self._check_leaders(label)
        if isinstance(self.post(SharedCalled(), label), AskShared):
            shared = self.replies.shared = dict(self.session.meta().shared)
            if name not in shared:
                raise Disagree(
                    f"this newcomer called job.{label}, and the others have {sorted(shared)}. Make such calls "
                    "the same in every process: not under `if job.restarted` or `if job.is_leader`."
                )
        elif (found := self.checkpoints.found) is not None and name in found.moment.shared:
            shared[name] = found.moment.shared[name]
        else:
            self._leaders = "job.shared()"
            shared[name] = reply(self.run(Op(kind, 1, label=label), {}, compute, own))
            self._leaders = None
        return deepcopy(shared[name])

    def fingerprint(self) -> dict[str, str]:
        """What all workers must have in common now: readable parts, and hashes over some weights and buffers. {}: there
        are no others."""
        if self.session.alone:
            return {}
        return {
            "data": json.dumps(self.data, sort_keys=True),
            "reduction": str(self.session.reduction),
            "compression": str(self.session.compression),
            **self.where(),
            **numerics_fingerprint.settings(self.device),
            "learning rates": ", ".join(map(repr, self.carrier.learning_rates())),
            "job.state": _shown(json.dumps(self.values.to_json(), sort_keys=True)),
            "weights, rates and job.state": self.carrier.fingerprint(self.at.step),
            "buffers": self.carrier.buffer_fingerprint(self.at.step),
            **self.logged(),
        }

    # Steps and passes

    def hand_out(self, step: OpenStep, index: int, epoch: int) -> None:
        """Begin a step. A newcomer may enter its first pass, and learns here where it will be."""
        self._end_early()
        self.tell()
        if self.examiner is not None:
            self.examiner.note(index, self.shards, caller())
        self.post(HandedOut(index, epoch))
        self.open_step = step
        self.lead()
        if not self.at.joining:
            self.changes.before_step()
            if self.changes.take_pause():
                self.checkpoints.before_pause()
            examined = self.examiner is not None and self.examiner.at == index
            if examined:
                self.checkpoints.ask()
            taken = self.checkpoints.before_step(self.moment, index)
            if examined:
                self.checkpoints.finish()
            self.snapshots.before_step(self.moment, index)
            may_part = self.changes.may_part(taken) or not self.checkpoints.takes_any
            if self.changes.take_wish() or (self.session.parting and not may_part):
                self.checkpoints.wish()
            self.session.may_part = may_part
        replies = self.replies
        self._meta = JoinMeta(
            self.at.shared_epoch,
            index,
            self.at.epoch_start,
            self.values.to_json(packed=True),
            dict(replies.of_epoch),
            dict(replies.shared),
            self.data,
            dict(replies.early),
            self._epoch_values,
        )
        self.session.publish(self._meta)
        seed_all(self.seed, index, "step")  # after the hooks: what they draw differs between workers
        self._attributes.begin_step()
        self._drawn_from = None if self.at.standing is Standing.MEMBER else drawn_from()
        self.place_read = False
        self.values.forget_reads()

    def _end_early(self) -> None:
        """The steps of this epoch begin, or none are left: end the early phase of job.state."""
        self.values.end_early()
        if self._later is not None:
            self.values.replace(self._later)
            self._later = None

    def _begin_pass(self, step: int, number: int) -> None:
        """Raises NoGradient, UsageError."""
        read = drew = False
        if number == 0 and self._drawn_from is not None:
            read, drew = self.place_read or self.values.was_read, self._drawn_from != drawn_from()
        if isinstance(self.post(PassBegun(step, number, read, drew)), LoadAgain):
            assert self._copy is not None
            self.carrier.load(self._copy.header, self._copy.blobs)
            self._copy = None

    def copy_anew(self) -> None:
        """Copy the state of the pass in progress, because this newcomer ran a step that it was not bound to; the copy's
        step is the next. Raises JoinMissed."""
        self._copy = copy = self.session.copy_anew()
        self.carrier.load(copy.header, copy.blobs)
        self.values.rewind(copy.values, self.carrier.place)
        self.replies.early |= {key: [copy.op.step, value] for key, value in copy.early.items()}

    def lead(self) -> None:
        """Do the leader's tasks besides training, if this worker is the leader now."""
        self._leaders = "job.on_lead() or a sink"
        self.leading.check()
        self._leaders = None

    def _before_leaving(self) -> None:
        with randomness_kept():
            self.changes.tell_drain()
        self.checkpoints.finish()

    def moment(self) -> Moment:
        """The place in the script, for a checkpoint."""
        return Moment(
            step=self.at.step,
            epoch=self.at.shared_epoch,
            epoch_start=self.at.epoch_start,
            seed=self.seed,
            shards=self.shards or 0,
            once=dict(self.replies.of_epoch),
            shared=dict(self.replies.shared),
            data=self.data,
            values=self._epoch_values,
            reduction=str(self.session.reduction),
            compression=str(self.session.compression),
        )

    def plan_save(self) -> Json:
        """What all members of a save() must know alike; one of them says it."""
        place = self.session.place()
        return {
            "step": self.at.step,
            "call": self.replies.calls,
            "generation": place.generation,
            "members": list(place.members),
            "token": place.token,
        }

    def save(self, series: str, plan: dict[str, Any]) -> None:
        """Write this worker's part of a save()."""
        members, me = tuple(plan["members"]), self.session.worker_id
        rank = members.index(me) if me in members else len(members)
        place = LoopPlace(plan["generation"], rank, members, plan["token"])
        name = EntryName(plan["step"], plan["call"], plan["generation"], plan["token"])
        self.checkpoints.save(series, name, place, self.moment())

    def joined(self, step: int, epoch: int, *, result: bool) -> None:
        """Go on in the pass of this step, whose state is here. result: its result is here, too."""
        if step != self.at.step:
            self._logged = {}
        self.post(JoinOver(step, epoch, result))

    def leave_step(self) -> None:
        """End the step in progress, if any. Raises NoGradient if its pass is not over."""
        if self.at.in_step:
            self.post(StepLeft())
            assert self.open_step is not None
            self._left, self.open_step = self.open_step.record, None
            if self.examiner is not None:
                self.examiner.applied(self._left)
            self._check_strays(self.at.step % STRAYS_STEPS == 0)

    def log(self, values: Mapping[str, float]) -> None:
        """Add values to the record of the step in progress, else the last, else the first. Raises UsageError."""
        self.check_outside_pass("log()")
        self._check_leaders("log()")
        if not self.at.entered:
            raise UsageError(
                "job.log() came before the loop, where there is no step yet; call it in the loop or after it"
            )
        if not self.at.in_step and self._left is None and self.at.step > 0:
            return  # others, or an earlier run, have logged it
        if twice := sorted(values.keys() & self._logged.keys()):
            raise UsageError(f"job.log: {', '.join(twice)} was logged twice for one step; log each name once a step")
        self._logged |= values
        if self.at.early:
            self._called_early(f"{self.at.early_calls} log", self.at.step, None)

    def tell(self) -> None:
        """Send the record of the step that was left to the ledger and the sinks; nothing more can be logged for it.
        Raises UsageError for a name that a pass has logged too."""
        if self._left is not None:
            record, logged = self._left, self._logged
            self._left, self._logged = None, {}
            if twice := sorted(logged.keys() & record.scalars.keys()):
                raise UsageError(
                    f"{', '.join(twice)}: logged by job.log and by step.log for step {record.step}; rename one"
                )
            record = replace(record, scalars={**record.scalars, **logged})
            self.session.applied(record)
            self.leading.applied(record)
            self.lead()

    def logged(self) -> dict[str, str]:
        """The part of the fingerprint for job.log(); {}: nothing was logged for this step."""
        return {"job.log": _shown(json.dumps(self._logged, sort_keys=True))} if self._logged else {}

    def watch_strays(self, frame_of_script: Callable[[], FrameType | None]) -> None:
        """In the first step, begin to watch unregistered values that the script trains; newcomers need not."""
        if self._strays is None and not self.at.joining:
            self._strays = Strays(self.carrier.objects, frame_of_script())
            self._strays_due = True

    def _check_strays(self, due: bool) -> None:
        """Raise Unregistered. Values may change as rarely as a target network's, so later steps are checked too."""
        if self._strays is not None and (due or self._strays_due):
            self._strays_due = False
            self._strays.check(f"step {self.at.step - 1}")

    def begin_pass(self, step: int, number: int, allow: frozenset[str]) -> Harvest:
        """Check that a pass may begin, and which gradients it finds. A newcomer's second copy replaces what its script
        has changed since the hand-out: the members had made the same changes. Returns its Harvest."""
        self._begin_pass(step, number)
        where = place_of(self.at)
        self._check_finished()
        self._check_leaders("steps()")
        checks.check_threads(self.threads)
        if self.session.reduction.stable and not self.session.alone:
            checks.check_timed_kernels(self.device)
        self.carrier.check_kinds()
        harvest = self.harvest()
        self._guard.begin_pass(where, harvest.parameters, allow)
        self._attributes.begin_pass()
        self.values.lock()
        return harvest

    def end_pass(self, where: str, allow: frozenset[str]) -> None:
        """End a pass: the result is installed, and user code may change everything again. Raises Unregistered."""
        changed = self._attributes.end_pass()
        if changed and "Unregistered" not in allow and not self.checkpoints.restore_hooks:
            raise checks.changed_attribute(where, changed)
        self._guard.end_pass(self._harvest.installed)
        self.session.may_part = self.session.may_part and not self.checkpoints.takes_any
        self.values.unlock()
        self.post(Reduced())

    def harvest(self) -> Harvest:
        """The Harvest for the parameters that require a gradient now, which may differ between passes."""
        parameters = self.carrier.parameters()
        trainable = [id(parameter) for _, parameter in parameters]
        if trainable != self._trainable:
            self._trainable = trainable
            self._harvest.early.close()
            self._harvest = Harvest(
                parameters,
                self.carrier.float_buffers(),
                self.carrier.int_buffers(),
                modes=self.carrier.modes,
                device=self.session.sums_on,
                fixed=self.exponents,
                compression=self.session.compression,
            )
        return self._harvest

    def watch_losses(self, look: Callable[[torch.Tensor], None]) -> None:
        """Show every loss to `look` before its backward(), until `cleanup` is closed."""
        self.cleanup.enter_context(checks.backward_watched(look))

    def _check_leaders(self, call: str) -> None:
        """Raise UsageError in code that only the leader runs."""
        if self._leaders is not None:
            raise checks.inside_leaders(call, self._leaders)

    def _check_finished(self) -> None:
        """Raise UsageError if the script has caught an error of its own function in a call of all workers."""
        if self._unfinished is not None:
            raise checks.unfinished(self._unfinished)

    def check_outside_pass(self, call: str) -> None:
        """Raise UsageError inside a pass, where workers run different code at different times."""
        if self.at.in_pass:
            raise refusal(Mistake.IN_PASS, self.at, call)

    def close(self) -> None:
        """Remove the hooks from the user's objects."""
        self.cleanup.close()
        self._harvest.early.close()
        self._attributes.close()
        self._guard.close()


def _exponents(reduction: Reduction) -> BlockExponents | None:
    """The exponents of sums as integers; None: they are summed as floats."""
    if reduction not in (Reduction.FIXED, Reduction.FIXED64):
        return None
    return BlockExponents(always_wide=reduction == Reduction.FIXED64)


def empty_leaf(unit: int) -> Partial:
    """A leaf without content: it only says that the worker takes part."""
    return Partial(unit, unit + 1)


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS_MAX else text[:_SHOWN_CHARACTERS_MAX] + "..."
