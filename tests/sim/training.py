"""A worker's script, as runtime/loop/training drives it: what it does is told to loop_state, and the moves are done.

The script is a generator. It yields *requests*: functions that are given what is to be called when they are done, with
what they are about. Time passes only in them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from elastic.protocol import loop_state
from elastic.protocol.loop_state import (
    Admitted,
    AskEarly,
    AskShared,
    AwaitInvitation,
    Called,
    CalledEarly,
    CopyAnew,
    EpochBegun,
    EpochOver,
    HandedOut,
    Join,
    JoinOver,
    LoadAgain,
    LoopBegun,
    LoopEntered,
    LoopKind,
    LoopOver,
    LoopState,
    Miss,
    Move,
    NextStep,
    PassBegun,
    PassRepeated,
    RecallEarly,
    RecallReply,
    Reduced,
    Refuse,
    RehearsalOver,
    ResultHeld,
    RunTogether,
    ScriptEvent,
    ScriptStage,
    SharedCalled,
    Standing,
    StepLeft,
    StepsBegun,
    StepsOver,
)
from elastic.protocol.worker_state import Phase
from tests.sim.script import Epoch, Operation, Step, Sum

if TYPE_CHECKING:
    from tests.sim.worker import Worker

Resume: TypeAlias = Callable[[Any], None]
Request: TypeAlias = Callable[[Resume], None]
Life: TypeAlias = Generator[Request, Any, Any]


class JoinMissed(Exception):
    """This newcomer cannot become a member any more."""


@dataclass(frozen=True, slots=True)
class Meta:
    """What a newcomer is told, and what is kept with a state. As JoinMeta of runtime/session.py."""

    epoch: int
    step: int
    epoch_start: int
    once: dict[str, Sum]
    shared: Sum
    early: dict[str, tuple[int, Sum]]

    def early_in(self, step: int) -> dict[str, Sum]:
        return {key: value for key, (called, value) in self.early.items() if called == step}


@dataclass(frozen=True, slots=True)
class Copy:
    """The state before operation op. follows: its donor keeps the results from there on. waited_for: the members wait
    in this operation."""

    op: int
    state: int
    source: str
    follows: bool
    waited_for: bool
    early: dict[str, Sum]


class Training:
    def __init__(self, worker: Worker) -> None:
        self.w = worker
        self.at = LoopState(standing=Standing.NEWCOMER)
        self.meta: Meta | None = None
        """What newcomers are told."""
        self._copy: Copy | None = None
        """The state that was copied between two steps, until it is loaded for the second time."""
        self._once: dict[str, Sum] = {}
        self._early: dict[str, tuple[int, Sum]] = {}
        self._shared: Sum = ()
        self._used: set[int] = set()
        """The steps for which what the script has used since the hand-out holds."""
        self._read = self._drew = False
        self._tried: set[int] = set()
        """The passes of which this worker has computed a shard, in any step."""
        self._life = self._script()

    def post(self, event: ScriptEvent) -> Move:
        """Raises JoinMissed."""
        world, before = self.w.world, self.at
        self.at, move = loop_state.step(before, event)
        world.stepped("script", before.stage, event, self.at.stage)
        if self.at.standing is not before.standing:
            world.changes.add(("standing", before.standing, type(event).__name__, self.at.standing))
        assert not isinstance(move, Refuse), f"{self.w.me}: {move} to {event} in {before}"
        if isinstance(move, Miss):
            raise JoinMissed(move.because)
        return move

    def go_on(self, value: Any = None) -> None:
        """Until the script's next request."""
        try:
            request = self._life.send(value)
        except StopIteration:
            return
        except JoinMissed as missed:
            self.missed(str(missed))
            return
        request(self.go_on)

    def missed(self, because: str) -> None:
        if because.startswith("epoch "):
            self.w.world.reach("a newcomer was too late for its epoch")
        self.w.die(75, f"it cannot go on: {because}")

    # --------------------------------------------------------------------------------------------- the script

    def _script(self) -> Life:
        w, newcomer = self.w, self.w.newcomer
        yield lambda resume: w.when_free(lambda: resume(None))  # until it is a member, or knows that it is a newcomer
        if w.p.phase is not Phase.FRESH:
            self.post(Admitted())
        program = w.script.program
        if self.at.joining:
            yield self._pause(0.02, 0.2)
        if program.shared is not None:
            yield from self._share(program.shared)
        if isinstance(self.post(LoopBegun(program.loop)), AwaitInvitation):
            yield newcomer.await_invitation
            entered = self._told((yield self._ask()))
        else:
            entered = LoopEntered()
            if (kept := w.keeping.begun_from) is not None:
                entered = replace(self._told(kept.moment), resumed=True)
                self._early = {}
            yield from self._apply(program.sync, (yield self._operate(program.sync)))
        self.post(entered)
        if program.loop is LoopKind.EPOCHS:
            for number in range(self.at.epoch, len(program.epochs)):
                yield from self._epoch(number, program.epochs[number])
        else:
            yield from self._steps(program.epochs[0])
        self.post(LoopOver())
        assert self.at.is_over
        for operation in program.behind:
            yield from self._call(operation, operation.name)
        yield from self._apply(program.leave, (yield self._operate(program.leave)))
        w.finish()

    def _told(self, meta: Meta) -> LoopEntered:
        self._once, self._shared, self._early = dict(meta.once), meta.shared, dict(meta.early)
        return LoopEntered(meta.epoch, meta.step, meta.epoch_start)

    def _epoch(self, number: int, epoch: Epoch) -> Life:
        self.post(EpochBegun(number))
        for place, operation in enumerate(epoch.before):
            yield from self._call(operation, f"{place} once")
        yield from self._steps(epoch)
        self.post(StepsOver())
        for operation in epoch.after:
            yield from self._call(operation, operation.name)
        self.post(EpochOver())
        if epoch.between is not None:
            yield from self._apply(epoch.between, (yield self._operate(epoch.between)))
        self._once, self._early = {}, {}

    def _steps(self, epoch: Epoch) -> Life:
        steps = self.w.script.program.steps
        self.post(StepsBegun())
        while True:
            over = self.at.step >= epoch.end
            if isinstance(self.post(NextStep(over)), CopyAnew):
                self._copy = copy = yield self.w.newcomer.copy_anew
                self._early |= {key: (self.at.step, value) for key, value in copy.early.items()}
            if over:
                return
            yield from self._step(steps[self.at.step])

    def _step(self, step: Step) -> Life:
        self.post(HandedOut(self.at.step, step.epoch))
        self._hand_out()
        for operation in step.early:
            yield from self._call(operation, f"{self.at.early_calls} early")
        steps = self.w.script.program.steps
        while self.at.pass_no < len(steps[self.at.step].passes):  # a newcomer learns late which step it is in
            yield from self._pass(self.at.pass_no)
        for operation in steps[self.at.step].calls:
            yield from self._call(operation, operation.name)
        self.post(StepLeft())
        self._used = set()

    def _hand_out(self) -> None:
        clock, at = self.w.world.clock, self.at
        self._used, self._read, self._drew = set(), False, False
        if at.standing is not Standing.MEMBER and clock.chance(self.w.world.scene.binds):
            self._drew = clock.chance(0.5)
            self._read, self._used = not self._drew, {at.step}
        told = dict(self._once), self._shared, dict(self._early)
        self.meta = Meta(at.shared_epoch, at.step, at.epoch_start, *told)
        if at.standing is Standing.MEMBER:
            self.w.keeping.before_step(self.meta)

    def _pass(self, number: int) -> Life:
        first = number == 0
        begun = PassBegun(self.at.step, number, read=first and self._read, drew=first and self._drew)
        if isinstance(self.post(begun), LoadAgain):
            assert self._copy is not None
            self.w.state, self._copy = self._copy.state, None
        if self.at.joining:
            yield self._pause(0.03, 0.2)
        operations = self._operations()
        result: Sum | None = None
        if isinstance(self.post(RehearsalOver()), Join):
            step, result = yield self.w.newcomer.join
            epoch = self.w.script.program.steps[step].epoch
            self.post(JoinOver(step, epoch, result is not None))
            operations = self._operations()
        for place, operation in enumerate(operations):
            if place > 0:
                self.post(PassRepeated())
            if result is None:
                result = yield self._operate(operation)
            if operation is operations[-1] and self.at.stage is not ScriptStage.TRYING and number not in self._tried:
                self.post(ResultHeld())
                self._tried.add(number)
                yield self._pause(0.0, 0.02)
            if operation is operations[-1]:
                self.post(Reduced())
            yield from self._apply(operation, result)
            result = None

    def _operations(self) -> tuple[Operation, ...]:
        return self.w.script.program.steps[self.at.step].passes[self.at.pass_no]

    def computed(self) -> None:
        """A unit of the operation in progress."""
        if self.at.in_pass:
            self._tried.add(self.at.pass_no)

    # -------------------------------------------------------------------------------------- calls of all workers

    def _share(self, operation: Operation) -> Life:
        """A value from before the loop."""
        kept = self.w.keeping.begun_from
        if isinstance(self.post(SharedCalled()), AskShared):
            self._shared = (yield self._ask()).shared
        elif kept is not None:
            self._shared = kept.moment.shared
        else:
            self._shared = yield self._operate(operation)
            yield from self._apply(operation, self._shared)
        self._check_told(operation, self._shared)

    def _call(self, operation: Operation, key: str) -> Life:
        match self.post(Called()):
            case AskEarly():
                yield from self._ask_early(key)
            case RecallEarly():
                assert self._copy is not None
                self._check_told(operation, self._copy.early[key])
                self._called_early(key, self.at.step, self._copy.early[key])
                self.w.state = operation.changes(self.w.state, self._copy.early[key])
            case RecallReply():
                self._check_told(operation, self._once[key])
            case RunTogether(keep, early):
                result = yield self._operate(operation)
                if early:
                    self._called_early(key, self.at.step, result)
                elif keep:
                    self._once[key] = result
                yield from self._apply(operation, result)

    def _ask_early(self, key: str) -> Life:
        """What the same call has given in this step or, if that is over, in a later one."""
        step = self.at.step

        def called_in(meta: Meta) -> int:
            return meta.early[key][0] if key in meta.early else -1

        meta: Meta = yield self._ask(lambda meta: meta.step > step or called_in(meta) >= step)
        called = called_in(meta)
        if meta.epoch != self.at.shared_epoch or called < step:
            self.w.world.reach("a newcomer was too late for what an early call gave")
            raise JoinMissed(f"step {step} was over before this newcomer had been told what {key!r} gave in it")
        if called > step:
            self.w.world.reach("a newcomer was told what an early call gave in a later step")
        value = meta.early[key][1]
        operation = self.w.script.program.steps[called].early[self.at.early_calls]
        self._check_told(operation, value)
        self._called_early(key, called, value)
        self.w.state = operation.changes(self.w.state, value)

    def _called_early(self, key: str, step: int, value: Sum) -> None:
        self.post(CalledEarly())
        self._early[key] = step, value
        self._used.add(step)
        assert self.meta is not None
        self.meta = replace(self.meta, early=dict(self._early))

    def _check_told(self, operation: Operation, value: Sum) -> None:
        self.w.world.judge.told(self.w, operation, value)

    # ------------------------------------------------------------------------------------------------- requests

    def _pause(self, low_s: float, high_s: float) -> Request:
        w = self.w
        return lambda resume: w.work(low_s, high_s, lambda: w.when_free(lambda: resume(None)))

    def _ask(self, until: Callable[[Meta], bool] = bool) -> Request:
        return lambda resume: self.w.newcomer.ask_meta(until, resume)

    def _operate(self, operation: Operation) -> Request:
        """Run this operation with the others, or get the result that they have had."""
        if self.at.behind:
            return lambda resume: self.w.newcomer.take_over(operation, resume)
        return lambda resume: self.w.begin(operation, resume)

    def _apply(self, operation: Operation, result: Sum) -> Life:
        """What the script does with a result; what it has used of another step spoils it."""
        w = self.w

        def applied() -> None:
            if operation is not w.script.program.leave:
                w.state = operation.changes(w.state, result)
            if self._used - {self.at.step}:
                w.state = hash((w.state, "of another step"))
            w.applied += 1
            w.world.judge.applied(w)

        def work(resume: Resume) -> None:
            def done() -> None:
                applied()
                w.when_free(lambda: resume(None))

            w.work(0.001, 0.02, done)

        yield work
