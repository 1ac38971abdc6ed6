"""How a worker becomes a member, as in runtime/worker/joining.py. loop_state says what a copy counts for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from elastic.protocol import worker_state
from elastic.protocol.loop_state import (
    Admitted,
    CopiedAnew,
    CopyArrived,
    CopyOffered,
    GoAstray,
    MembersLost,
    ResultTaken,
    WentAstray,
)
from elastic.protocol.messages import Generation, Progress, Ready
from elastic.protocol.worker_state import AskOutcome, Copied, CopyState, Joined, Phase, Wait, WorkerState
from tests.sim.script import Operation, Sum
from tests.sim.training import Copy, JoinMissed, Meta, Resume

if TYPE_CHECKING:
    from tests.sim.worker import Worker


class Newcomer:
    def __init__(self, worker: Worker) -> None:
        self.w = worker
        self.invited = False
        self.holds = -1
        """The operation with which it began as a member."""
        self.asks = False
        """A copy of the state is on its way to it."""
        self.stuck = False
        """It does nothing any more, and lives."""
        self.hung = False
        """The same before it is ready."""
        self._waited_s = 0.0
        """Since when, if there was no place for it."""
        self._said_ready = 0
        self._outdated = 0
        self._behind = 0
        self._candidate = 0
        self._answers = 0
        self._beats = False
        self._number = -1
        """The operation whose state this worker holds; -1: none."""
        self._donor = ""
        """Who has the results from there on."""
        self._counted_in: Generation | None = None
        self._copies_anew = False
        self._over: Resume
        """Of the join or the copy in progress."""

    # ------------------------------------------------------------------------------ what its script waits for

    def await_invitation(self, over: Resume) -> None:
        if not self.invited:
            self._waited_s = self._waited_s or self.w.world.clock.now_s
            self.w.after(0.05, 0.2, lambda: self.await_invitation(over))
            return
        self.w.world.hook("invited", self.w)
        over(None)

    def ask_meta(self, until: Callable[[Meta], bool], over: Resume) -> None:
        """Of any member, until its answer will do."""

        def told(reply: object) -> None:
            if isinstance(reply, Meta) and until(reply):
                over(reply)
                return
            self._candidate += 1
            self.w.after(0.05, 0.2, lambda: self.ask_meta(until, over))

        of = self.w.p.acquaintances
        if not of:
            told(None)
            return
        whom = of[self._candidate % len(of)]
        self.w.ask(whom, lambda other, reply: reply(other.training.meta if other.p.entered else None), told)

    def join(self, over: Resume) -> None:
        """Hold the state of a step's first pass and, mostly, get its result; `over` gets (step, result or None)."""
        self._over, self._copies_anew = over, False
        self._seek()

    def copy_anew(self, over: Resume) -> None:
        self.w.world.reach("a newcomer went through a step as no holder, and copies anew")
        self._over, self._copies_anew = over, True
        self._number, self._donor = -1, ""
        self._seek()

    def take_over(self, operation: Operation, over: Resume) -> None:
        """The result of this operation, which the members have completed; between two steps, or in a later pass."""
        if self._stands_still():
            self.w.after(0.1, 0.5, lambda: self.take_over(operation, over))
            return
        if operation is self.w.script.program.leave:
            self.w.world.reach("the loop ended before a newcomer had caught up")
            return  # the order to go will come
        assert self.w.p.phase is Phase.FRESH, f"{self.w.me} is a member, and takes over {operation}"
        self._ask_next(lambda reply, whom: self._took_over(reply, whom, operation, over), join=False)

    # -------------------------------------------------------------------------------------------------- seeking

    @property
    def follows(self) -> bool:
        """Whether it takes over results since its copy."""
        return bool(self._donor)

    def _stands_still(self) -> bool:
        """What the control thread says goes on."""
        p = self.w.p
        if p.record is not None and p.record.member(self.w.me) is None and self._said_ready != p.record.number:
            self._said_ready = p.record.number
            self._say_ready(p.record.number)
            self.w.world.hook("ready", self.w)
        return self.stuck

    def _seek(self) -> None:
        p = self.w.p
        if p.phase is not Phase.FRESH:
            self._caught_up()
            return
        if self.hung and not self._said_ready:
            return
        if self._stands_still():
            self.w.after(0.1, 0.5, self._seek)
            return
        if p.copied != self._number:
            p = self._post_copied(self._number)
        match worker_state.seek(p):
            case CopyState(of):
                whom, self.asks = of[self._candidate % len(of)], True
                follow = self._copies_anew or self.w.training.at.bound
                self.w.ask(whom, lambda other, reply: other.copies.serve(self.w, follow, reply), self._copied)
            case AskOutcome(op, of) if self._counted_in is p.record:
                whom, base = of[self._candidate % len(of)], self._base
                self.w.ask(whom, lambda other, reply: reply(other.copies.outcome(self.w.me, op, base)), self._outcome)
            case AskOutcome():
                self._ask_next(self._went_on, join=True)
            case Wait():
                wanted = p.newest_pending is not None
                self.w.after(0.01 if wanted else 0.05, 0.03 if wanted else 0.15, self._seek)

    def _caught_up(self) -> None:
        """All members were lost, and the copy here is the state now."""
        if self._copies_anew:
            self._post(MembersLost())
            raise AssertionError(f"{self.w.me} goes on without a copy and without members")
        self.w.training.post(Admitted())
        operation = self.w.script.operations[self.w.p.reduced]
        self.w.when_free(lambda: self._over((operation.step, None)))

    def _ask_next(self, then: Callable[[tuple[str, Sum | None] | None, str], None], *, join: bool) -> None:
        of = self.w.p.acquaintances
        whom = self._donor or of[self._candidate % len(of)]
        number, donor, base = self._number, self.w.world.workers.get(whom), self._base
        lost = self.w.world.clock.chance(self.w.world.copy_trouble)

        def ask(other: Worker, reply: Callable[[object], None]) -> None:
            answer = other.copies.next_result(self.w.me, number, join, base)
            reply(None if lost else answer)

        def answered(reply: object) -> None:
            self._answered()
            then(cast(tuple[str, Sum | None] | None, reply), whom)

        if join and donor and donor.alive:
            self._counted_in = self.w.p.record  # until an answer says otherwise
        self.w.ask(whom, ask, answered)

    def _went_on(self, reply: tuple[str, Sum | None] | None, whom: str) -> None:
        if reply is not None and reply[0] != "now":
            self._counted_in = None
        match reply:
            case ("now", _):
                self._donor = whom
            case ("result", result) if result is not None and self._may_change():
                operation = self.w.script.operations[self._number]
                self._take(result, whom)
                self._over((operation.step, result))
                return
            case ("refused", _):
                self.w.world.reach("a newcomer copies anew")
                self._number, self._donor = -1, ""
                self._too_slow()
            case ("later", _) | None:
                self._candidate += 1
                self._donor = ""
        self.w.after(0.002, 0.02, self._seek)

    def _took_over(self, reply: tuple[str, Sum | None] | None, whom: str, operation: Operation, over: Resume) -> None:
        match reply:
            case ("result", result) if result is not None:
                entry = self.w.script.operations[self._number]
                assert entry is operation, f"{self.w.me} is at {operation}, the members at {entry}"
                self._take(result, whom)
                over(result)
                return
            case ("refused", _):
                self.w.world.reach("a newcomer had no way back to a copy")
                self.w.training.missed("the results that it was taking over ended")
                return
            case _:
                self._candidate += 1
                self._donor = ""
        self.w.after(0.002, 0.02, lambda: self.take_over(operation, over))

    def _take(self, result: Sum, whom: str) -> None:
        self.w.world.reach("a newcomer took over a result")
        self._post(ResultTaken())
        donor = self.w.world.workers.get(whom)
        before, self._behind = self._behind, donor.p.reduced - self._number if donor else self._behind
        if 0 < before <= self._behind:
            self.w.world.reach("a newcomer came no nearer")
            self._too_slow()
        self._number, self._donor, self._counted_in = self._number + 1, whom, None

    def _too_slow(self) -> None:
        self._outdated += 1
        if p := self.w.p.record:
            self._say_ready(p.number)

    def _say_ready(self, generation: int) -> None:
        self.w.say(Ready(self.w.me, generation, self._outdated, self.w.script.program.hold))

    @property
    def _base(self) -> int:
        return self.w.p.record.base if self.w.p.record else 0

    def _post(self, event: CopyArrived | ResultTaken | MembersLost) -> object:
        return self.w.training.post(event)

    def _post_copied(self, op: int) -> WorkerState:
        return self.w.post(Copied(op, self.w.script.operations[op].handed_out if op >= 0 else -1))

    def _may_change(self) -> bool:
        """No report has promised the state held here, and it has not become the job's."""
        p = self.w.post(Copied(-1))
        return p.copied == -1 and p.phase is Phase.FRESH

    def _answered(self) -> None:
        self._answers += 1
        if not self._beats:
            self._beats = True
            self.w.after(0.05, 0.25, self._beat)

    def _beat(self) -> None:
        self._beats = False
        if self.w.p.phase is Phase.FRESH:
            self.w.say(Progress(self.w.me, 0, 0, 0, f"joining, {self._answers} answers"))

    # -------------------------------------------------------------------------------------------------- answers

    def _copied(self, reply: object) -> None:
        self.asks = False
        self._answered()
        if not isinstance(reply, Copy):
            self._candidate += 1
            self.w.after(0.005, 0.02, self._seek)
            return
        try:
            self._load(reply)
        except JoinMissed as missed:
            self.w.training.missed(str(missed))

    def _load(self, copy: Copy) -> None:
        """Raises JoinMissed."""
        w, training, operation = self.w, self.w.training, self.w.script.operations[copy.op]
        training.post(CopyOffered(operation.epoch))
        w.state, w.applied = copy.state, copy.op
        self._number, self._donor, self._behind = copy.op, copy.source if copy.follows else "", 0
        if self._copies_anew:
            training.post(CopiedAnew(operation.step))
            self._over(copy)
            return
        move = training.post(CopyArrived(operation.step, bool(copy.early), copy.waited_for))
        if isinstance(move, GoAstray):
            training.post(WentAstray())
            self.take_over(operation, lambda result: self._over((operation.step, result)))
            return
        if not copy.follows and self._post_copied(copy.op).copied == copy.op:
            self._counted_in, base = w.p.record, self._base
            w.world.hook("copied", w)
            w.ask(copy.source, lambda other, _: other.copies.verified(w.me, copy.op, base), lambda _: None)
        w.after(0.005, 0.02, self._seek)

    def _outcome(self, reply: object) -> None:
        self._answered()
        before = self.w.p
        op = before.copied
        if reply is None or op < 0 or before.phase is not Phase.FRESH:
            self._candidate += reply is None
        else:
            number, result = cast(tuple[int, Sum | None], reply)
            if result is None and any(g.number == number and g.member(self.w.me) for g in before.pending):
                self._candidate += 1
            elif result is None or self.w.post(Joined(number, op)).phase is not Phase.READY:
                self._counted_in = None
            else:
                self._joined(before, op, result)
                return
        self.w.after(0.005, 0.02, self._seek)

    def _joined(self, before: WorkerState, op: int, result: Sum) -> None:
        w = self.w
        w.results = {op: result}
        w.world.obtained(w, op, result, before)
        w.world.hook("joined", w)
        self.holds = op + 1
        if self.follows:
            w.world.reach("a newcomer joined after it had taken over results")
        waited_s = w.world.clock.now_s - self._waited_s if self._waited_s else 0.0
        w.world.paths.joined(w, w.world.leader, waited_s, self._outdated)
        w.training.post(Admitted())
        w.when_free(lambda: self._over((w.script.operations[op].step, result)))
