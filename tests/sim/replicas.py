"""Jobs whose passes are rounds of replicas with a quorum, in the simulator: what a worker trains, and what must hold.

A unit is a replica that its worker trains for some inner steps, or leaves out. A value of the result says for how many,
so the result depends on who was late and who died: the first member that has it decides what it is. It is decided anew
only if nobody is left who has it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from elastic.protocol import outer_round
from elastic.protocol.messages import EndRound, Generation
from elastic.protocol.worker_state import Phase
from tests.sim.faults import Scene
from tests.sim.script import Operation, Script, Sum, Value

if TYPE_CHECKING:
    from tests.sim.worker import Worker
    from tests.sim.world import World

BEAT_S = 0.25
"""Between two words of a worker while a round goes on."""

ROUNDED_S = 0.01
"""By so much a time that is said in milliseconds, by a clock that goes too fast, may be too long."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """min_replicas, grace_s: of the quorum. inner_steps: of a round."""

    min_replicas: int
    grace_s: float
    inner_steps: int


def with_quorum(scene: Scene, seed: int) -> Scene:
    """The same job with rounds of replicas, on machines that differ more."""
    random = Random(f"quorum {seed}")
    workers = scene.nodes * scene.slots
    units = max(scene.units, workers)
    most = random.choice([workers, units])
    rounds = Rounds(random.randint(1, most), random.choice([0.0, 0.0, 0.3, 2.0]), random.randint(1, 6))
    slowness = tuple(random.choice([1.0, 1.0, 4.0, 20.0]) for _ in range(scene.nodes))
    return replace(scene, units=units, rounds=rounds, slowness=slowness)


def is_round(operation: Operation) -> bool:
    return operation.name in ("pass", "again")


class RoundsScript(Script):
    """The results of its rounds are those that members have had."""

    def __init__(self, *of: object) -> None:
        super().__init__(*of)  # type: ignore[arg-type]
        self._found: dict[int, Sum] = {}

    def settle(self, op: int, result: Sum) -> None:
        """This is the result of the round from now on."""
        self._found = {**{earlier: one for earlier, one in self._found.items() if earlier < op}, op: result}
        self.result.cache_clear()
        del self._states[op + 1 :]

    def _result(self, op: int) -> Sum:
        return self._found[op] if is_round(self.operations[op]) else super()._result(op)


class Replicas:
    """The replicas of one worker, as OuterPass and ProgressReporter of the runtime have them."""

    def __init__(self, worker: Worker) -> None:
        self.w = worker
        self.op = -1
        """The round in which it is, or was last."""
        self.made = self.whole = 0
        """Replicas that it has trained in this round, in part or whole; and those that have made all inner steps."""
        self.since_s = 0.0
        """When it had done its part of it."""
        self.ended = (0, -1)
        """Generation and operation of the newest order to stop."""

    def begin(self) -> None:
        w = self.w
        self.op, self.made, self.whole, self.since_s = w.p.reduced, 0, 0, w.world.clock.now_s
        w.after(0, BEAT_S, lambda: self._beat(w.p.reduced))

    def _beat(self, op: int) -> None:
        w = self.w
        if w.p.reduced == op and w.p.phase is Phase.COLLECTING:
            w.beat()
            w.after(BEAT_S, BEAT_S, lambda: self._beat(op))

    @property
    def over(self) -> bool:
        return self.ended == (self.w.p.entered, self.w.p.reduced)

    def order(self, order: EndRound) -> None:
        self.ended = order.generation, order.op
        if self.over and self.w.p.running is not None:
            self.w.world.reach("a late replica was told to stop")
            self.w.world.judge.rounds.stopped(self.w)

    def train(self, unit: int) -> None:
        """The unit has been handed out."""
        w, rounds = self.w, self.w.world.rounds
        record = w.p.record
        assert record is not None
        left, over = len(w.p.todo), self.over
        if not outer_round.computes(rounds.min_replicas, self.made, len(record.ids), left=left, over=over):
            w.world.reach("a replica was left out")
            self._deliver(unit, 0, w.state)
            return
        if self.made:
            w.world.reach("a survivor trained more than one replica")
        self._inner(unit, 0, w.state)

    def _inner(self, unit: int, steps: int, state: int) -> None:
        """state: with which the replica began."""
        w, rounds = self.w, self.w.world.rounds
        if steps == rounds.inner_steps or (steps and self.over):
            self.made += 1
            self.whole += steps == rounds.inner_steps
            if steps < rounds.inner_steps:
                w.world.reach("a replica stopped early")
            self._deliver(unit, steps, state)
            return
        times = w.world.slowness(w.agent)
        w.work(0.005 * times, 0.03 * times, lambda: self._inner(unit, steps + 1, state))

    def _deliver(self, unit: int, steps: int, state: int) -> None:
        self.since_s = self.w.world.clock.now_s
        value: Value = (self.w.script.operations[self.w.p.reduced].place, unit, state, steps)
        self.w.computed(unit, value)


class RoundsJudge:
    """What must hold of rounds. Raises by `require`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._states: dict[str, int] = {}
        """Name of what is kept -> the state that it has."""
        self._replies: dict[int, set[Sum]] = {}
        """Place of a call in the program -> what members have had from it, in any run."""

    def is_current(self, worker: Worker) -> bool:
        """Whether it has not been expelled. Whoever was, and does not know it, may go on for a moment by itself."""
        base = self.world.records.base
        return not worker.p.entered or base is None or worker.p.entered >= base.number

    def kept(self, entry: str, state: int) -> None:
        self._require(self._states.setdefault(entry, state) == state, f"members keep different states as {entry}")

    def state_of(self, entry: str) -> int:
        return self._states[entry]

    def told(self, operation: Operation, reply: Sum) -> None:
        known = self._replies.get(operation.place, set())
        self._require(reply in known, f"a newcomer is told {reply} of {operation}, which no member has had")

    def committed(self, record: Generation) -> None:
        """A generation has a member with the state of the job, or with the copy of it."""
        workers = [self.world.workers[name] for name in record.ids]
        holds = any(worker.p.entered or worker.p.copied >= 0 for worker in workers)
        self._require(holds or not workers, f"nobody in {record} has the state of the job")

    def stopped(self, late: Worker) -> None:
        """A replica stops before its end: the others have a quorum, and had it for as long as the window is."""
        rounds, record, op = self.world.rounds, late.p.record, late.p.reduced
        assert record is not None
        others = [self.world.workers[name] for name in record.ids if name != late.me]
        if any(other.p.reduced > op for other in others):
            return  # an order that comes late to a worker which a later generation has left out: its round is over
        done = [other for other in others if other.replicas.op == op and not other.busy and not other.p.todo]
        waited = [(other.replicas.whole, self.world.clock.now_s - other.replicas.since_s) for other in done]
        missing = rounds.min_replicas - sum(whole for whole, _ in waited)
        self._require(missing <= 0, f"{late.me} is told to stop in {op}, and {missing} of the quorum are missing")
        in_time = [whole for whole, for_s in waited if for_s >= rounds.grace_s - ROUNDED_S]
        self._require(sum(in_time) >= rounds.min_replicas, f"{late.me} is told to stop in {op}, and has had no grace")

    def obtained(self, worker: Worker, op: int, result: Sum) -> None:
        """All members have the same, and it is of the state with which the round began."""
        script = worker.script
        assert isinstance(script, RoundsScript)
        operation = script.operations[op]
        self._replies.setdefault(operation.place, set()).add(result)
        if not self.is_current(worker):
            return
        if is_round(operation) and not self._others_with(worker, op):
            script.settle(op, result)
        self._require(result == script.result(op), f"{worker.me} has {result}, and others have {script.result(op)}")
        if not is_round(operation):
            return
        begun = script.state(op)
        strange = [value for value in result if value[2] != begun]
        self._require(not strange, f"replicas of {op} have begun with another state than {begun}: {strange}")
        trained = sum(value[3] > 0 for value in result)
        least = self.world.rounds.min_replicas
        self._require(trained >= least, f"{trained} replicas have a part in {op}, and the quorum is {least}")

    def _others_with(self, worker: Worker, op: int) -> bool:
        """Whether somebody else of the job has this result, or the state after it."""
        for other in self.world.workers.values():
            if other is worker or not other.alive or other.script is not worker.script or not self.is_current(other):
                continue
            if other.p.copied > op or (other.p.entered and other.p.reduced > op):
                return True
        return False

    def _require(self, holds: bool, what: str) -> None:
        from tests.sim.judge import require

        require(holds, what)
