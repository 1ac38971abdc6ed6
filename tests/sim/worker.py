"""A training process: the real position machine, and models of everything around it.

The user's thread is `_user`: it asks `worker_state.next_move` and does what it says. Between two operations it is the
script's (training.py). The control thread is `order` and the service of copies. Frames of a ring are tagged with
generation and operation, arrive late, and outlive their sender.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from elastic.errors import ExitCode
from elastic.protocol import worker_state
from elastic.protocol.failure_detector import Facts
from elastic.protocol.messages import (
    ANEW,
    Announce,
    Close,
    Doing,
    EndRound,
    Failed,
    Finished,
    Home,
    Invite,
    Kind,
    Order,
    Pointed,
    Progress,
    Publish,
    Quiesce,
    Report,
    Word,
)
from elastic.protocol.messages import Release as ReleaseOrder
from elastic.protocol.reduction_tree import Node
from elastic.protocol.worker_state import (
    AbortRings,
    Acknowledge,
    AwaitAcknowledgements,
    Begin,
    BuildRing,
    CloseRetired,
    Compute,
    CopyResult,
    Deliver,
    Done,
    DropRoots,
    Event,
    Exchange,
    Fetched,
    FreeResult,
    GraceOver,
    HeadersHeld,
    Leave,
    Linger,
    LinksClosed,
    Obtained,
    Phase,
    ReadHeader,
    Released,
    RetireRing,
    Say,
    Started,
    Stop,
    Used,
    Wait,
    WorkerState,
)
from runtime.worker.speed import Speed
from tests.sim.copies import Copies
from tests.sim.keeping import Keeping
from tests.sim.mesh import Mesh
from tests.sim.newcomer import Newcomer
from tests.sim.replicas import Replicas, is_round
from tests.sim.script import Operation, Sum, Value
from tests.sim.training import Training
from tests.trees import fold_nodes

if TYPE_CHECKING:
    from tests.sim.agent import Agent
    from tests.sim.world import World

Header: TypeAlias = tuple[dict[Node, Sum], int]

FENCED = int(ExitCode.FENCED)

OF_USER = (Started, Done, ReadHeader, HeadersHeld, Obtained, Used)
"""What happens while the user's thread is at it."""


class Worker:
    def __init__(self, world: World, agent: Agent, slot: int, incarnation: int) -> None:
        self.world, self.agent, self.slot = world, agent, slot
        self.me = f"{agent.node}.{slot}.{incarnation}"
        self.p = WorkerState(me=self.me, phase=Phase.FRESH)
        self.alive, self.paused, self.announced = True, False, False
        self._how = ""
        self.raises = ""
        """Where its script is about to raise."""
        self.fenced = False
        self.home = -1
        self.drifted = False
        """Its state is not what it should be, and the sums do not show it."""
        self.state = 0
        self.applied = 0
        """Operations whose result the user's code has applied; ``state`` is the parameters after them."""
        self.results: dict[int, Sum] = {}
        self.gradients: Sum = ()
        """Of the last operation, which the script applies."""
        self._due: Callable[[], None] | None = None
        """What the script does as soon as it may go on."""
        self.last_report: Report | None = None
        self.sums: dict[Node, Sum] = {}
        self._asleep: list[Callable[[], None]] = []
        self.busy = False
        self.stalled = False
        self._stalled_s = 0.0
        self._held: list[Callable[[], None]] = []
        self._woken = False
        self.mesh = Mesh(self)
        self.newcomer = Newcomer(self)
        self.training = Training(self)
        self.copies = Copies(self)
        self.keeping = Keeping(self)
        self.replicas = Replicas(self)
        self.script = world.script
        """Of the run that its members are in."""
        self._lingering = -1
        self._beats = False
        self._first = -1
        """Operations completed when the generation was entered."""
        self.speed = Speed()
        self._units = 0

    # ----------------------------------------------------------------------------------- life of a process

    def start(self) -> None:
        """The script's imports come first."""
        self.after(0.001, max(0.002, self.world.scene.import_s), self._announce)

    def _announce(self) -> None:
        if self.world.never_joins(self):
            status = int(self.world.clock.chance(0.7))
            words = "Traceback\nImportError: no module" if status else ""
            self.after(0.01, 0.1, lambda: self.die(status, "its script ends early", words))
            return
        self.announced = True
        self.world.hook("announced", self)
        numerics = self.world.numerics(self.agent)
        kept = self.agent.memory.newest
        self.say(Announce(self.me, self.agent.node, self.slot, 1, "host", 1, numerics, snapshot=kept))
        self.training.go_on()

    def die(self, status: int, because: str, last_words: str = "") -> None:
        """Everything it has sent may still arrive, or not."""
        if not self.alive:
            return
        self.alive = False
        world, agent = self.world, self.agent
        world.say(self.me, f"dies: {because}")
        world.died(self)
        if status and world.clock.chance(0.5):
            world.lose_frames(self)
        self.mesh.close_all()
        lane = world.control_lane(self, up=True)
        delay_s = world.clock.between(0.001, 0.03)
        if world.clock.chance(0.5):  # its lifeline is told before the kernel has taken it apart
            lane.send(lambda: agent.do(lambda: agent.saw_dying(self, status)))
        exited = lambda: agent.do(lambda: agent.saw_exit(self, status, last_words))  # noqa: E731
        world.clock.after(delay_s, lambda: lane.send(exited))

    def signalled(self, number: signal.Signals) -> None:
        """SIGTERM waits until the process runs again."""
        self.world.clock.after(0.0001, lambda: self._signalled(number))

    def _signalled(self, number: signal.Signals) -> None:
        if number is signal.SIGKILL:
            self.die(-number, "killed by its agent")
        else:
            self.after(0, 0.01, lambda: self.die(-number, "asked to stop"))

    def pause(self, how: str) -> None:
        """how: "stopped" by a signal, "asleep" and using no processor, or "burning" one with the interpreter held. One
        way may follow another."""
        if self.alive:
            self.paused, self._how = True, how

    def facts(self, now_s: float) -> Facts:
        """What /proc would say."""
        if self._how == "burning":
            return Facts("R", round(100 * now_s))
        return Facts("T" if self._how == "stopped" else "S", 0)

    def resume(self) -> None:
        if self.alive and self.paused:
            self.paused = False
            waiting, self._asleep = self._asleep, []
            self.world.clock.random.shuffle(waiting)
            for act in waiting:
                self.world.clock.after(0, act)

    def after(self, low_s: float, high_s: float, act: Callable[[], None]) -> None:
        """Do it then, or when the process is thawed, and not at all if it is dead."""

        def run() -> None:
            if not self.alive:
                return
            if self.paused:
                self._asleep.append(run)
            else:
                act()

        self.world.clock.after(self.world.clock.between(low_s, high_s), run)

    # ------------------------------------------------------------------------------------- control thread

    def order(self, order: Order) -> None:
        """Orders are handled in the order in which they came, also after a pause."""
        self.world.control_lane(self).send(lambda: self._order(order))

    def _order(self, order: Order) -> None:
        if not self.alive:
            return
        if self.paused:
            self._asleep_in_order.append(order)
            if len(self._asleep_in_order) == 1:
                self._asleep.append(self._drain_orders)
            return
        match order:
            case Publish() | Quiesce():
                if isinstance(order, Publish):
                    self.world.judge.listed(self, order.generation)
                self.post(order)
            case Invite():
                self.newcomer.invited = True
            case Home(_, _, home):
                self.home = home
            case Close(_, _, exit_code):
                finishes = exit_code == 0 and self.p.phase is not Phase.FRESH and not self.p.leaving
                if finishes and self.world.judge.told_to_close(self):
                    self.say(Finished(self.me, self.p.entered, self._digest()))
                self.die(exit_code, "the job is over")
            case ReleaseOrder():
                self.die(0, "released")
            case Pointed():
                self.keeping.pointed(order)
            case EndRound():
                self.replicas.order(order)
            case _:
                self.fenced = True
                if not self.stalled:
                    self.die(FENCED, "fenced")

    @property
    def _asleep_in_order(self) -> list[Order]:
        return self.world.sleeping_orders.setdefault(self.me, [])

    def _drain_orders(self) -> None:
        waiting = self.world.sleeping_orders.pop(self.me, [])
        for order in waiting:
            self._order(order)

    def post(self, event: Event) -> WorkerState:
        if isinstance(event, Quiesce) and (closed := self.mesh.closed_by_peers(self.p.entered)):
            self.p, _ = worker_state.step(self.p, LinksClosed(self.p.entered, closed))
        before = self.p
        self.p, actions = worker_state.step(before, event)
        self.world.stepped("position", before.phase, event, self.p.phase)
        if self.p.record is not before.record:
            self._follow(before)
        for action in actions:
            self._perform(action)
        self.world.saw(self, before)
        if self.alive and self.p.entered:
            if self.p.entered != before.entered or before.reduced == self._first < self.p.reduced:
                self._first = self.p.reduced
                self._say_progress()
            elif self.p.reduced != before.reduced and not self._beats:
                self._beats = True
                self.after(0.05, 0.25, self._beat)
        if not isinstance(event, OF_USER):
            self.wake()
        return self.p

    def _follow(self, before: WorkerState) -> None:
        """A record says which run of the job it belongs to; the first members of a revived one become what is kept."""
        record = self.p.record
        assert record is not None
        self.script = self.world.run_from(record.entry)
        if record.began.startswith(ANEW) and record.kind is Kind.FORM and self.p.entered != before.entered:
            self.world.hook("anew", self)
        if record.kind is Kind.FORM and record.entry and self.p.entered != before.entered:
            self.state = self.keeping.restore(record.entry)
            self.world.hook("revived", self)

    def _beat(self) -> None:
        """What is no news of a generation waits for the next beat."""
        self._beats = False
        self._say_progress()

    def _say_progress(self) -> None:
        stalled_s = self.world.clock.now_s - self._stalled_s if self.stalled else 0.0
        rounds = self.world.scene.rounds
        in_round = rounds is not None and self.replicas.op == self.p.reduced and self.p.phase is Phase.COLLECTING
        waiting = not self.busy and self.p.phase is Phase.COLLECTING
        if in_round:  # the leader counts the replicas of those that wait: their part is done
            waiting = waiting and not self.p.todo and self.p.running is None
        if in_round and waiting:
            stalled_s = self.world.clock.now_s - self.replicas.since_s
        mine = Doing.SHARD if self.p.running is not None else Doing.ELSEWHERE
        self.say(
            Progress(
                self.me,
                self.p.entered,
                self.p.reduced,
                self.applied,
                phase=f"{self.p.phase} {self.p.reduced}",
                shards=self._units,
                shard_us=self.speed.shard_us,
                doing=Doing.WAITING if waiting else mine,
                for_ms=round(1000 * stalled_s),
                usual_ms=20 if rounds is None else 20 * round(max(self.world.scene.slowness, default=1)),
                computes=not self.stalled,
                min_replicas=rounds.min_replicas if rounds and in_round else 0,
                grace_ms=round(1000 * rounds.grace_s) if rounds and in_round else 0,
                replicas=self.replicas.whole if in_round else 0,
            )
        )

    def beat(self) -> None:
        """Without news too; only where somebody gets nowhere does it matter."""
        if self.alive and not self.paused and self.p.entered:
            self._say_progress()

    def stall(self) -> None:
        """What its script waits for does not come. The rest of the process lives."""
        self.stalled, self._stalled_s = True, self.world.clock.now_s

    def go_on(self) -> None:
        self.stalled = False
        waiting, self._held = self._held, []
        for act in waiting:
            self.after(0, 0, act)

    def _perform(self, action: worker_state.Action) -> None:
        match action:
            case AbortRings():
                self.mesh.abort()
            case BuildRing(generation):
                self.mesh.build(generation)
            case RetireRing(number, until):
                self.mesh.retire(number, until)
            case CloseRetired(op):
                self.mesh.close_retired(op)
            case Acknowledge(number, op, to):
                for worker in to:
                    self.mesh.send(number, worker, ("ack", op), True)
            case AwaitAcknowledgements():
                self.mesh.awaited = action
                self.world.hook("leaving", self)
            case FreeResult(op):
                self.results.pop(op, None)
            case DropRoots(keep):
                self.sums = {node: total for node, total in self.sums.items() if node in keep}
            case Say(word):
                self.say(word)
            case Leave():
                if not self.stalled:  # it is the script's thread that leaves
                    self.die(FENCED, "fenced")

    def say(self, word: Word) -> None:
        if isinstance(word, Report):
            self.last_report = word
            self.world.hook("reported", self)
        if self.world.is_told:
            self.world.say(self.me, f"says {word}")
        self.world.control_lane(self, up=True).send(lambda: self._heard(word))

    def _heard(self, word: Word) -> None:
        """A word that was under way when its process ended may come, but not after the exit was seen."""
        if self.agent.workers.get(self.me) is self:
            self.agent.hear(word)

    def _digest(self) -> str:
        return "another" if self.drifted else str(self.state)

    # -------------------------------------------------------------------------------------- user's thread

    def wake(self) -> None:
        """Not from what it does itself: it looks around when that is done."""
        if not (self._woken or self.busy):
            self._woken = True
            self.after(0, 0.0005, self._user)

    def _user(self) -> None:
        self._woken = False
        if self.busy or not self.alive:
            return
        self.mesh.check_acknowledgements()
        if self.p.phase is Phase.FRESH:
            if self.p.record is not None:
                self._between()
            return
        if self.p.phase is Phase.COLLECTING and self.p.laggard == "" and self.cannot_redo(self.p.reduced):
            self.world.reach("a member gave way, as it missed the result of a round")
            self.die(FENCED, "gives way")
            return
        match worker_state.next_move(self.p):
            case Compute(unit) if place := self.world.raises(self, unit):
                self._raise(place)
            case Compute(unit):
                self.post(Started(unit))
                self.world.hook("alone" if self.p.laggard == "" else "unit", self)
                if self.in_round(self.p.reduced):
                    self.replicas.train(unit)
                    return
                self.speed.handed_out(self.world.clock.now_s)
                value = (self.script.operations[self.p.reduced].place, unit, self.state)
                times = self.world.slowness(self.agent)
                self.work(0.005 * times, 0.03 * times, lambda: self._computed(unit, value))
            case Exchange(number):
                self.mesh.take_part(number)
            case CopyResult(source, op):
                self.world.reach("redo rule: the result is copied")
                self.copies.fetch(source, op)
            case Deliver():
                self.world.reach("redo rule: computed alone")
                self.complete(Fetched(self.p.reduced), self.sums[(0, self.p.units)])
            case Linger():
                if self._lingering != self.p.reduced:
                    self._lingering = self.p.reduced
                    self.world.reach("a donor lingers")
                    grace_s = self.world.spec.timing.join_grace_s
                    self.after(grace_s, grace_s, lambda: self._grace_over())
            case Released():
                self._between()
            case Wait(because):
                if because == "below quorum":
                    self.world.reach("held below quorum")
            case Stop():
                pass

    def in_round(self, op: int) -> bool:
        """Whether it is a round of replicas with a quorum."""
        return self.world.scene.rounds is not None and is_round(self.script.operations[op])

    def cannot_redo(self, op: int) -> bool:
        """Whether nobody can compute again what others have had from this operation."""
        return self.in_round(op)

    def _raise(self, place: str) -> None:
        code = 5 if place.startswith("guard") else 1
        said, of_device = "what the script says", place == "device"
        self.say(Failed(self.me, self.p.entered, place, said, code, of_device, self.p.newcomer))
        self.busy = True
        self.after(0.001, 0.02, lambda: self.die(code, f"raised at {place}"))

    def _grace_over(self) -> None:
        self.post(GraceOver())

    def work(self, low_s: float, high_s: float, then: Callable[[], None]) -> None:
        """The user's thread is busy: nothing else is asked of it."""
        self.busy = True

        def done() -> None:
            if self.stalled:
                self._held.append(done)
                return
            self.busy = False
            then()
            self.wake()

        self.after(low_s, high_s, done)

    def _between(self) -> None:
        """The script has the thread."""
        if self._due is not None:
            due, self._due = self._due, None
            due()

    def when_free(self, act: Callable[[], None]) -> None:
        """Between two operations; of a newcomer at any time."""
        assert self._due is None, f"{self.me} does two things at once"
        self._due = act
        self.wake()

    def begin(self, operation: Operation, over: Callable[[Sum], None]) -> None:
        self.world.judge.begins(self, operation)
        self.sums = {}
        if operation.joinable:
            self.speed.begin_step()
            self._units = operation.units
        self._due = lambda: over(self.gradients)
        self.post(Begin(operation.units, operation.joinable))
        if self.in_round(self.p.reduced):
            self.replicas.begin()
        self.world.hook("begin", self)

    def finish(self) -> None:
        self.say(Finished(self.me, self.p.entered, self._digest()))
        self.world.hook("finished", self)
        self.busy = True
        self.after(0.005, 0.1, lambda: self.die(0, "its script has ended"))

    def _computed(self, unit: int, value: Value) -> None:
        """The fold happens outside the lock, so a plan may take its inputs meanwhile."""
        self.speed.done(self.world.clock.now_s)
        self.computed(unit, value)

    def computed(self, unit: int, value: Value) -> None:
        leaf = (unit, unit + 1)
        held = set(self.p.roots)
        units = self.p.units
        folded = set(fold_nodes({*held, leaf}, units))
        root = next(node for node in folded if node[0] <= unit < node[1])
        consumed = tuple(sorted(held - folded))
        inputs = {leaf: (value,), **{node: self.sums[node] for node in consumed}}
        total = tuple(v for node in sorted(inputs) for v in inputs[node])

        def done() -> None:
            before = self.p
            after = self.post(Done(unit, root, consumed))
            if before.running == unit and root in after.roots:
                self.sums = {node: total for node, total in self.sums.items() if node not in consumed}
                self.sums[root] = total
                self.training.computed()

        self.work(0, 0.001, done)

    def complete(self, event: Fetched | Obtained, result: Sum) -> None:
        op = self.p.reduced
        before = self.p
        self.post(event)
        if self.p.reduced == op + 1:
            self.results, self.gradients = {op: result}, result
            self.copies.completed(op, result)
            self.world.obtained(self, op, result, before)
            if not (self.world.scene.retains or self.cannot_redo(op)):
                self.work(0, 0.001, lambda: self._used(op))

    def _used(self, op: int) -> None:
        self.post(Used(op))

    def obtained(self, event: Obtained, result: Sum) -> None:
        """Between the last byte and the lock the control thread may have left the ring, and reported."""
        self.complete(event, result)
        self.world.hook("obtained", self)

    # --------------------------------------------------------------------------------------------- copies

    def ask(self, whom: str, question: Callable[[Worker, Callable[[object], None]], None],
             answer: Callable[[object], None]) -> None:  # fmt: skip
        """A question over a connection of its own; the answer is None if the other is gone or too slow."""
        answered = False

        def once(content: object) -> None:
            nonlocal answered
            if not answered:
                answered = True
                self.after(0.0002, 0.003, lambda: answer(content))

        def arrive() -> None:
            other = self.world.workers.get(whom)
            if other is not None and self.world.is_blocked(self.agent.node, other.agent.node):
                return
            if other is None or not other.alive:
                once(None)
            elif other.paused:
                other._asleep.append(arrive)
            else:
                question(other, once)

        self.world.clock.after(self.world.clock.between(0.0002, 0.003), arrive)
        self.world.clock.after(2.0, lambda: once(None))
