"""A newcomer's user thread, until it is a member."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from elastic.protocol import worker_state
from elastic.protocol.messages import Generation, Progress, Ready
from elastic.protocol.worker_state import AskOutcome, Copied, CopyState, Joined, Phase, Wait, WorkerState
from tests.sim.script import Sum

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
        self._epoch = 0
        self._waited_s = 0.0
        """Since when, if there was no place for it."""
        self._said_ready = 0
        self._outdated = 0
        self._candidate = 0
        self._answers = 0
        self._beats = False
        self._number = -1
        """The operation whose state this worker holds; -1: none."""
        self._donor = ""
        """Who has the results from there on."""
        self._counted_in: Generation | None = None
        self._binds = worker.world.clock.chance(worker.world.scene.binds)
        """What it did as it was handed a step holds for no other one."""
        self._step = -1
        """The operation with which that step begins; -1: that of the next copy."""
        self._astray = False
        """It goes through another step, and copies anew at the end of it."""

    def learn(self) -> None:
        """Which epoch the members are in: this one will take part in it, or in none. A spare has not asked yet."""
        if not self.invited and self.w.p.phase is Phase.FRESH:
            self._waited_s = self._waited_s or self.w.world.clock.now_s
            self.w.after(0.05, 0.2, self.learn)
            return
        if self.w.p.phase is Phase.FRESH:
            self.w.world.hook("invited", self.w)
        self._epoch, self._step = self.w.world.place()
        self.w.after(0.03, 0.2, self.seek)  # after its rehearsal

    def seek(self) -> None:
        """Inside `join`, or, while it takes over what came between two steps, in any operation."""
        p = self.w.p
        if p.phase is not Phase.FRESH:
            self.w.wake()
            return
        if self.hung and not self._said_ready:
            return
        if p.record is not None and p.record.member(self.w.me) is None and self._said_ready != p.record.number:
            self._said_ready = p.record.number
            self.w.say(Ready(self.w.me, p.record.number, self._outdated))
            self.w.world.hook("ready", self.w)
        if self.stuck:  # its control thread goes on
            self.w.after(0.1, 0.5, self.seek)
            return
        if self._number == self.w.script.last:
            self.w.world.reach("the loop ended before a newcomer had caught up")
            return  # the order to go will come
        if self._astray and self._number != self._step and self.w.script.operations[self._number].joinable:
            self.w.world.reach("a newcomer went through a step as no holder, and copies anew")
            self._number, self._step, self._donor, self._astray = -1, -1, "", False
        if self._number >= 0 and (self._astray or not self.w.script.operations[self._number].joinable):
            of = p.acquaintances
            self._ask_next(self._donor or of[self._candidate % len(of)], join=False)
            return
        if p.copied != self._number:
            p = self._post_copied(self._number)
        match worker_state.seek(p):
            case CopyState(of):
                whom, self.asks = of[self._candidate % len(of)], True
                self.w.ask(whom, lambda other, reply: other.copies.serve(self.w, self._binds, reply), self._copied)
            case AskOutcome(op, of) if self._counted_in is p.record:
                whom = of[self._candidate % len(of)]
                self.w.ask(whom, lambda other, reply: reply(other.copies.outcome(op)), self._outcome)
            case AskOutcome(_, of):
                self._ask_next(self._donor or of[self._candidate % len(of)], join=True)
            case Wait():
                wanted = p.newest_pending is not None
                self.w.after(0.01 if wanted else 0.05, 0.03 if wanted else 0.15, self.seek)

    def _ask_next(self, whom: str, *, join: bool) -> None:
        number, donor, base = self._number, self.w.world.workers.get(whom), self._base
        lost = self.w.world.clock.chance(self.w.world.copy_trouble)

        def ask(other: Worker, reply: Callable[[object], None]) -> None:
            answer = other.copies.next_result(self.w.me, number, join, base)
            reply(None if lost else answer)

        if join and donor and donor.alive:
            self._counted_in = self.w.p.record  # until an answer says otherwise
        self.w.ask(whom, ask, lambda reply: self._went_on(cast(tuple[str, Sum | None] | None, reply), whom, join))

    def _went_on(self, reply: tuple[str, Sum | None] | None, whom: str, join: bool) -> None:
        self._answered()
        if reply is not None and reply[0] != "now":
            self._counted_in = None
        match reply:
            case ("now", _):
                self._donor = whom
            case ("result", result) if result is not None and (not join or self._may_change()):
                self.w.world.reach("a newcomer took over a result")
                self._epoch = self.w.script.operations[self._number].epoch
                self.w.state = self.w.script.next_state(self._number, self.w.state, result)
                self.w.applied = self._number + 1
                self._number, self._donor = self._number + 1, whom
            case ("refused", _) if join:
                self.w.world.reach("a newcomer copies anew")
                self._number, self._donor = -1, ""
                self._outdated += 1
                if p := self.w.p.record:
                    self.w.say(Ready(self.w.me, p.number, self._outdated))
            case ("refused", _):
                self.w.world.reach("a newcomer had no way back to a copy")
                self.w.die(75, "it cannot go on")
                return
            case ("later", _) | None:
                self._candidate += 1
                self._donor = ""
        self.w.after(0.002, 0.02, self.seek)

    @property
    def _base(self) -> int:
        return self.w.p.record.base if self.w.p.record else 0

    def _post_copied(self, op: int) -> WorkerState:
        return self.w.post(Copied(op, self.w.script.operations[op].place if op >= 0 else -1))

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

    def _copied(self, reply: object) -> None:
        self.asks = False
        self._answered()
        if isinstance(reply, tuple):
            op, state, source, held, waited_for = reply
            if self.w.script.operations[op].epoch != self._epoch:
                self.w.world.reach("a newcomer was too late for its epoch")
                self.w.die(75, "it cannot go on")
                return
            self._astray = self._binds and self._step not in (op, -1)
            if self._astray and waited_for:
                self.w.die(75, "its step is not the one that waits for it")
                return
            self._number, self._step, self._donor = op, op, source if held else ""
            self.w.state, self.w.applied = state, op
            if not held and self._post_copied(op).copied == op:
                self._counted_in, base = self.w.p.record, self._base
                self.w.world.hook("copied", self.w)
                self.w.ask(source, lambda other, _: other.copies.verified(self.w.me, op, base), lambda _: None)
        else:
            self._candidate += 1
        self.w.after(0.005, 0.02, self.seek)

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
                self.w.results, self.w.gradients = {op: result}, result
                self.w.world.obtained(self.w, op, result, before)
                self.w.world.hook("joined", self.w)
                self.holds = op + 1
                if self._donor:
                    self.w.world.reach("a newcomer joined after it had taken over results")
                waited_s = self.w.world.clock.now_s - self._waited_s if self._waited_s else 0.0
                self.w.world.paths.joined(self.w, self.w.world.leader, waited_s, self._outdated)
        self.w.after(0.005, 0.02, self.seek)
