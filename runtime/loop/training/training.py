"""The loop of one job in one worker: what happens at the beginning and the end of epochs, steps and passes.

Job, Epochs, Steps, Step, Pass and evaluate() are views on it. loop_state says which of these calls may come now.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch

from elastic.agent.worker.examination import Examination
from elastic.checkpoints.settings import Settings
from elastic.errors import ConfigError
from elastic.protocol.loop_state import (
    AwaitInvitation,
    EpochBegun,
    EpochOver,
    HandedOut,
    JoinOver,
    LoopBegun,
    LoopEntered,
    LoopKind,
    LoopOver,
    LoopState,
    Move,
    Reduced,
    ScriptEvent,
    ScriptStage,
    StepLeft,
    StepsBegun,
    StepsOver,
    StepWithdrawn,
)
from runtime.allreduce.reduction.gradient_harvest import Harvest
from runtime.allreduce.reduction.partial_sum import Json
from runtime.data.random_state import seed_all
from runtime.guards import checks
from runtime.guards.refusals import place_of, post
from runtime.guards.unregistered import caller
from runtime.loop.call_replies import CallReplies
from runtime.loop.control_scalars import ControlScalars
from runtime.loop.exactness_probe import Examiner
from runtime.loop.hooks.leader_hooks import LeaderHooks
from runtime.loop.hooks.world_hooks import WorldHooks
from runtime.loop.training.agreement import Agreement
from runtime.loop.training.calls import Calls, empty_leaf
from runtime.loop.training.earlier_loops import NAME, EarlierLoops
from runtime.loop.training.newcomer import Newcomer
from runtime.loop.training.registered import Registered
from runtime.loop.training.saves import Saves
from runtime.loop.training.step_scope import OpenStep, StepScope
from runtime.recovery.checkpoint.coordinator import Taking
from runtime.recovery.checkpoint.memory_snapshots import Snapshots
from runtime.script_end import exit_now
from runtime.session import Op, OpKind, Session


class Training:
    """One worker's side of a job. Used by the user's thread only."""

    def __init__(
        self, session: Session, *, seed: int, threads: int, device: torch.device, checkpoints: Settings
    ) -> None:
        self.session = session
        self.seed = seed
        self.registered = Registered(session, threads, device)
        self.carrier = self.registered.carrier
        self.checkpoints = Taking(session, self.carrier, checkpoints)
        self.snapshots = Snapshots(session, self.carrier, checkpoints)
        self.riders = ControlScalars((self.checkpoints, self.snapshots))
        self.leading = LeaderHooks(session)
        self.changes = WorldHooks(session)
        self.scope = StepScope(session)
        self.agreement = Agreement(session, self.registered, self.scope, seed)
        self.replies = CallReplies()
        self.loops = EarlierLoops(device)
        self.newcomer = Newcomer(session, self.registered, self.replies)
        self.calls = Calls(
            session, self.registered, self.agreement, self.riders, self.replies, self.newcomer, self.checkpoints
        )
        self.saves = Saves(
            session,
            self.agreement,
            self.riders,
            self.replies,
            self.newcomer,
            self.checkpoints,
            self.snapshots,
            self.changes,
        )
        examination = Examination.from_environment(os.environ)
        self.examiner = Examiner(examination, self.carrier) if examination is not None else None

    @property
    def at(self) -> LoopState:
        """Where the script is."""
        return self.session.script.at

    def post(self, event: ScriptEvent, call: str = "") -> Move:
        """What follows from what has happened. call: what the script has called. Raises UsageError for a mistake of the
        script, JoinMissed."""
        return post(self.session.script, event, call)

    def stop(self, because: str) -> None:
        """The script has called job.stop()."""
        self.riders.stop(because)
        self.newcomer.stopping(self.riders.stopping or because)

    # The loop, and its epochs

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
        self.registered.freeze()
        if meta is not None:
            entered = self.newcomer.told(meta)
            if self._several and entered.epoch > 0:
                self.loops.told(entered.epoch, *self.session.registered_by_members(NAME), resumed=False)
        else:
            entered = LoopEntered()
            if manifest is not None:
                self.agreement.check_resumed(manifest.moment)
                blobs = self.checkpoints.read(manifest)
                entered = self.newcomer.resumed(manifest.moment)
                if self._several and entered.epoch > 0:
                    self.loops.told(entered.epoch, manifest.header, blobs, resumed=True)
                else:
                    self.carrier.load(manifest.header, blobs)
            self.calls.run(Op(OpKind.SYNC, 1), {}, empty_leaf)
            if manifest is not None and manifest.moment.stop is not None:
                self.riders.stop(manifest.moment.stop)  # only now: one more step belongs to the run
        self.post(entered)
        self.leading.begin(self.at.step)
        seed_all(self.seed, "loop")

    @property
    def _several(self) -> bool:
        """Whether the script may have several training loops, each of which is an epoch of the job."""
        return self.loops.number >= 0

    def next_loop(self, register: Callable[[], None]) -> bool:
        """The script comes to the next of its training loops. register: registers what it trains. Returns whether it is
        to be trained; else the job has it behind it (see EarlierLoops). Raises ConfigError inside of a loop, and behind
        one that an error has ended."""
        loops = self.loops
        self.check_between_loops()
        loops.check_kept()
        loops.number += 1
        if loops.number == 0:
            register()
            self.enter_loop(LoopKind.EPOCHS)
        elif not loops.passing:
            if loops.number > loops.entry:
                self.end_epoch(last=False)
            self.registered.renew()
            register()
            self.registered.register(None, loops.objects())
            self.carrier.leave_undigested(NAME)
            self.registered.freeze()
            self.scope.passes_tried.clear()
            loops.load_found(self.carrier)
        if not loops.passing:
            self.begin_epoch(loops.number)
        return not loops.passing

    def check_between_loops(self) -> None:
        """Raise ConfigError inside of a training loop, and behind one that an error has ended."""
        if self._several and not self.loops.passing and self.at.stage is not ScriptStage.AFTER_STEPS:
            raise ConfigError(
                "a training loop begins inside of another one, or behind one that has ended with an error: what that "
                "left may differ between workers. Begin it when the one before has returned, and let an error end the "
                "script"
            )

    def begin_epoch(self, epoch: int) -> None:
        """Hand out an epoch."""
        self.post(EpochBegun(epoch))
        self.replies.begin_epoch()
        seed_all(self.seed, epoch, "epoch")
        self.newcomer.begin_epoch()
        self.registered.begin_epoch()

    def begin_steps(self, data: dict[str, Json] | None, order: Callable[[int], dict[str, Json]] | None = None) -> int:
        """Begin the steps() loop of this epoch. Returns the job index of its first step.

        data: how the samples of this epoch are planned; None: the script draws its own. order: what differs in the
        epochs of a framework, all of which are in this loop. Raises SecondLoop; ConfigError if the epoch was begun
        elsewhere with other data.
        """
        if not self.at.in_epochs:
            self.enter_loop(LoopKind.BARE)
        before, there = self.at, self.newcomer.data
        self.post(StepsBegun())
        if before.elsewhere and there not in (None, data):
            raise checks.other_data(data, there, resumed=before.resumed)
        self.agreement.data, self.agreement.order = data, order
        return self.at.epoch_start

    def end_steps(self) -> None:
        """End the steps() loop of this epoch."""
        self.post(StepsOver())
        self.newcomer.end_early()
        self.seed_behind(self.at.epoch)

    def seed_behind(self, epoch: int) -> None:
        """Seed the random numbers that the script draws behind the steps of this epoch."""
        seed_all(self.seed, epoch, "behind the steps")

    def end_epoch(self, *, last: bool) -> None:
        """End an epoch: the script asks for the next. Raises JoinMissed in a newcomer that has not entered."""
        self.leave_step()
        self.newcomer.end_early()
        self.registered.check_strays(self.at.step - 1, due=True)
        self.post(EpochOver())
        if not last:
            # A stop() since the last step has met no reduction yet; without this one it would cost a step.
            op = Op(OpKind.ONCE, 1, self.at.epoch, self.at.step, label="epochs")
            self.calls.run(op, {}, empty_leaf)
        self.replies.end_epoch()

    def end_loop(self) -> None:
        """End the script's loop; evaluating and saving are still possible."""
        self.leave_step()
        self.newcomer.end_early()
        self.loops.check_over()
        self.session.loop_over()
        if self.examiner is not None:
            self.examiner.note(self.at.step, self.agreement.shards, caller())
            exit_now(0)
        self.post(LoopOver())
        seed_all(self.seed, "behind the loop")

    # Steps

    def hand_out(self, step: OpenStep, index: int, epoch: int) -> None:
        """Begin a step. A newcomer may enter its first pass, and learns here where it will be."""
        self.newcomer.end_early()
        self.close_record()
        if self.examiner is not None:
            self.examiner.note(index, self.agreement.shards, caller())
        self.post(HandedOut(index, epoch))
        again = self.scope.open(step)
        self.lead()
        if not self.at.joining and not again:
            self.saves.before_step(index, examined=self.examiner is not None and self.examiner.at == index)
        self.newcomer.publish(self.agreement.data, self.riders.stopping)
        seed_all(self.seed, index, "step")  # after the hooks: what they draw differs between workers
        self.registered.begin_step()
        self.newcomer.handed_out()

    def leave_step(self) -> None:
        """End the step in progress, if any. Raises NoGradient if its pass is not over."""
        if self.at.in_step:
            self.post(StepLeft())
            record = self.scope.leave()
            if self.examiner is not None:
                self.examiner.applied(record)
            self.registered.check_strays(self.at.step - 1)

    def withdraw_step(self) -> None:
        """Take a step back whose first pass has not begun; the next one that is handed out has the same number."""
        self.replies.forget_early(self.at.step)
        self.post(StepWithdrawn())
        self.scope.withdraw()

    def close_record(self) -> None:
        """Send the record of the step that was left to the ledger and the sinks; nothing more can be logged for it.
        Raises UsageError for a name that a pass has logged too."""
        if (record := self.scope.close()) is not None:
            self.session.applied(record)
            self.leading.applied(record)
            self.lead()

    def log(self, values: Mapping[str, float]) -> None:
        """Add values to the record of the step in progress, else the last, else the first. Raises UsageError."""
        self.calls.check_outside_pass("log()")
        self.calls.check_leaders("log()")
        if self.scope.log(values) and self.at.early:
            self.newcomer.called_early(f"{self.at.early_calls} log", self.at.step, None)

    def lead(self) -> None:
        """Do the leader's tasks besides training, if this worker is the leader now."""
        self.calls.leaders = "job.on_lead() or a sink"
        self.leading.check()
        self.calls.leaders = None

    # Passes

    def begin_pass(self, step: int, number: int, allow: frozenset[str]) -> Harvest:
        """Begin this pass of this step. Returns its Harvest. Raises NoGradient, UsageError, the guards' errors."""
        self.newcomer.begin_pass(step, number)
        self.calls.check_finished()
        self.calls.check_leaders("steps()")
        return self.registered.begin_pass(place_of(self.at), allow)

    def joined(self, step: int, epoch: int, *, result: bool) -> None:
        """Go on in the pass of this step, whose state is here. result: its result is here, too."""
        self.scope.joined(step)
        if (because := self.session.script.stop) is not None:
            self.riders.stop(because)
        self.post(JoinOver(step, epoch, result))

    def end_pass(self, where: str, allow: frozenset[str]) -> None:
        """End a pass: the result is installed, and user code may change everything again. Raises Unregistered."""
        self.registered.end_pass(where, may_change="Unregistered" in allow or bool(self.checkpoints.restore_hooks))
        self.session.may_part = self.session.may_part and not self.checkpoints.takes_any
        self.post(Reduced())
