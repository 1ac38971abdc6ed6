"""The steps of a training loop that a framework runs: handed out, computed shard by shard, and ended.

The framework's batch is a handle that holds no data. Behind it `run` calls the framework's own closure for each shard
of this worker, and returns when the gradients of all shards are in place. The framework then clips, steps, logs and
calls its callbacks, once.

A script may have several such loops, one after the other. Each is an epoch of the job. A worker that comes in a later
one runs its script from the top: a loop that the job has behind it is not trained there, see EarlierLoops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from elastic.errors import BufferChanged, ConfigError, StateChanged
from elastic.protocol.loop_state import ScriptStage
from runtime.frontends.ddp import mistakes
from runtime.frontends.ddp.rank_script import ALLOW, RankScript
from runtime.frontends.frameworks.plain_state import Kept
from runtime.loop.loops import Extent, Steps
from runtime.loop.passes import PassWork, Place, ShardSource
from runtime.loop.step import Step


class PassedBy(Exception):
    """The job has this training loop behind it: the framework's own is left at its beginning."""


class StepSource(ShardSource, Protocol):
    """The data of the steps, and all that decides which samples a step has; None if that is not known. order: what of
    it holds for this epoch alone."""

    def about(self) -> dict[str, Any] | None: ...
    def order(self, epoch: int) -> dict[str, Any]: ...


class EpochPlace:
    """The epoch in progress. It is registered, because a framework may end an epoch before its last batch."""

    def __init__(self) -> None:
        self.number = 0
        self.first = 0
        """Job index of its first step."""

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "first": self.first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number, self.first = state["number"], state["first"]


class AtHandOut:
    """What a framework keeps, as it was when the step in progress was handed out. A newcomer goes through the whole
    step, so it must have nothing that the step has done before its gradients; and other threads copy while shards run.
    """

    def __init__(self, kept: Kept) -> None:
        self.kept = kept
        self.note()

    def note(self) -> None:
        self._state = self.kept.state_dict()

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state
        self.kept.load_state_dict(state)


UNDIGESTED = "framework"
"""Name of what the framework keeps, which may differ between runs."""


@dataclass(frozen=True, slots=True)
class OpenExtent(Extent):
    """Steps that end when the framework ends them."""

    of: EpochPlace

    def locate(self, index: int) -> Place:
        return Place(index, self.of.number, index - self.of.first, None, False)


class StepLoop:
    """Used by the script's thread only: `begin`, then `next` and `run` for each step, then `end` and `close`."""

    def __init__(self, script: RankScript, callbacks: Callable[[], Iterable[Any]] = tuple) -> None:
        """callbacks: those of the framework. If they have a method on_drain(notice), they are told once of each notice
        that this worker's machine has to go, between two steps. notice: as job.notice."""
        self._script = script
        self._callbacks = callbacks
        self._epoch = EpochPlace()
        self._kept: AtHandOut | None = None
        self._objects: dict[str, Any] = {}
        """What is trained, and what the framework keeps."""
        self._steps: Steps | None = None
        self._step: Step | None = None
        self._ran: dict[str, float] | None = None
        """The metrics of the step in progress, if it was run before the framework has asked for it."""
        self.entered = False
        """This worker came later, or goes on from a checkpoint: the framework has still to be told where."""

    @property
    def ranks(self) -> int:
        return self._script.ranks

    @property
    def epoch(self) -> int:
        """Number of the epoch in progress."""
        return self._epoch.number

    @property
    def position(self) -> int:
        """How many steps of this epoch are over."""
        return self._script.training.at.step - self._epoch.first

    @property
    def open(self) -> bool:
        """Whether this worker takes part in the job's loop over steps now, or is about to."""
        return self._steps is not None and self._script.training.at.stage is not ScriptStage.AFTER_STEPS

    @property
    def begun(self) -> bool:
        """Whether the script has come to its first loop."""
        return self._script.begun

    @property
    def rehearsing(self) -> bool:
        """Whether this worker tries a step, of which nothing counts, before it knows in which epoch the others are."""
        return self._script.training.at.stage is ScriptStage.REHEARSING

    @property
    def passing(self) -> bool:
        """Whether the job has this loop, or what follows it, behind it: no other worker is here."""
        return self._script.passing

    @property
    def next_goes_on(self) -> bool:
        """Whether others, or an earlier run, have begun the loop to which the script comes next."""
        training = self._script.training
        if not self._script.begun:
            return training.at.joining or training.checkpoints.found is not None
        return self._script.passing

    def begin(
        self, source: StepSource, kept: Kept, objects: Mapping[str, Any], buffers: Mapping[str, str] | None = None
    ) -> bool:
        """Enter the job's next loop, with the state of the others if this worker comes later. objects: what is trained.
        buffers: see Job.register. Returns whether there is something to train; if not, the job has this loop behind it:
        `kept` and the objects have what they had at its end.

        Raises ConfigError inside of another loop, what Job.register raises; SystemExit if the job was stopped.
        """
        script, training = self._script, self._script.training
        if training.riders.stopped is not None:
            raise SystemExit(0)
        self._steps, self._epoch, self._kept = None, EpochPlace(), AtHandOut(kept)
        self._objects = {**objects, UNDIGESTED: self._kept, "epoch": self._epoch}

        def register() -> None:
            script.job.register(buffers=buffers, **self._objects)
            training.carrier.leave_undigested(UNDIGESTED)

        training.agreement.claim_shards(script.ranks)
        training.agreement.plan_steps(None, script.ranks)
        trains = training.next_loop(register)
        script.hand_over(training.loops.number, training.loops.entry)
        if not trains:
            training.loops.recall(self._objects)
            return False
        self.entered = training.at.elsewhere
        about = source.about()
        if number := training.loops.number:  # epochs are counted anew
            about = {**(about or {"order": "unknown"}), "loop": number}
        training.begin_steps(about, source.order)
        script.job.on_drain(self._tell)
        work = PassWork(script.ranks, source, "mean", ALLOW)
        self._steps = Steps(training, work, OpenExtent(0, 0, None, None, None, self._epoch))
        return True

    def _tell(self, seconds_left: float, because: str) -> None:
        """The hook of job.on_drain: tell the framework's callbacks."""
        if (notice := self._script.job.notice) is None or not self.open:
            return
        for callback in self._callbacks():
            if callable(told := getattr(callback, "on_drain", None)):
                told(notice)

    def enter(self, closure: Callable[[Any, Step], None]) -> None:
        """A newcomer, or a run that goes on: have the state of the others in the registered objects. closure: see
        `run`."""
        if self._script.training.at.joining and self.next():
            self._ran = self.run(closure)

    def begin_epoch(self, number: int, over: int = 0) -> None:
        """The framework begins an epoch. over: steps of it that were over before the job began."""
        at = self._script.training.at
        self._epoch.number, self._epoch.first = number, at.step + int(at.in_step) - over

    def next(self) -> bool:
        """Hand out the next step; whether there is one. There is none if the job was stopped."""
        if self._ran is not None:
            return True
        assert self._kept is not None and self._steps is not None
        self._kept.note()
        self._step = next(self._steps, None)
        return self._step is not None

    def run(self, closure: Callable[[Any, Step], None]) -> dict[str, float]:
        """Compute this worker's shards of the step in progress, and wait for the gradients of all. closure: computes
        the gradients of a shard from its data. Returns what it has logged, over all shards. Raises BufferChanged and
        StateChanged in the words of a script that has no `job`."""
        if self._ran is not None:
            ran, self._ran = self._ran, None
            return ran
        assert self._step is not None
        try:
            for data in self._step:
                closure(data, self._step)
        except BufferChanged as why:
            raise mistakes.changed_buffer(why) from None
        except StateChanged as why:
            raise mistakes.changed_in_step(why) from None
        return self._step.metrics

    def withdraw(self) -> None:
        """The framework does not run the step that it has, and ends its epoch. Raises ConfigError if other workers have
        run it."""
        if self._ran is not None:
            raise ConfigError(
                "an epoch ends at a batch that other workers have trained on: let what ends it depend on the number of "
                "the batch, or on what was logged, not on a clock or on random numbers"
            )
        self._script.training.withdraw_step()
        self._step = None

    def end(self) -> None:
        """The framework has left its loop over steps. Evaluations, and files that it writes behind it, may follow."""
        training, steps = self._script.training, self._steps
        if steps is None or not self.open:
            return
        if steps.running is None:  # no step was asked for
            training.end_steps()
        else:
            steps.running.ended = True
            next(steps, None)
        training.session.publish(None)
        training.session.loop_over()

    def close(self) -> None:
        """The framework's loop returns: keep what it leaves, for workers that come later."""
        training = self._script.training
        if self._tell in training.changes.drain_hooks:
            training.changes.drain_hooks.remove(self._tell)
        if not training.loops.passing:
            assert self._kept is not None
            self._kept.note()
            session = training.session
            workers = len(session.place().beside(session.worker_id))
            training.loops.keep(self._objects, (UNDIGESTED,), max(1, workers))
        training.seed_behind(training.loops.number)
