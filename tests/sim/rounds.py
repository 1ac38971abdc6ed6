"""Jobs in rounds under virtual time: runtime/frontends/restart/rounds.py decides, and everything around it is made up.

What is modelled is what the decisions rest on. An exchange has the reports of all members; its result is the same for
all, comes to each at its own time, and comes also to a survivor that has entered the next generation meanwhile. If a
member is lost before the result is complete, the survivors make the exchange again, with the reports that they have
made. A loss begins a generation at any time, a join and a drain only between two exchanges; then scripts end behind one
step (planned_end.py). Scripts end well, fail, are killed, hang, or fail because another one has failed; clocks of
machines differ.

Scripts keep each step, or each tenth one, in the memory of their machine, and on the next one a while later (kept.py).
A death may leave the newest segment of a script half written, a script may change its weights while it keeps its first
step, which is void then, one may keep nothing any more as its memory is full, and a machine is lost with its memory,
also while others copy what it had.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from elastic.protocol.worker_id import node_of
from runtime.frontends.restart import rounds
from runtime.frontends.restart.places import share
from runtime.frontends.restart.rounds import (
    LACKING_S,
    AllDone,
    AwaitNodes,
    AwaitRoom,
    Blame,
    CopyThin,
    Decision,
    GoOn,
    Hang,
    HashKept,
    LookAtKept,
    RoundState,
    ScriptReport,
    ScriptState,
    StartScript,
)
from runtime.frontends.restart.script_failure import Failure
from runtime.frontends.restart.step_records import StepRecords
from runtime.recovery.kept.choice import NO_ROUND, HeldSegment, RoundNumber, mirrors_of, newest_whole
from runtime.session import StepRecord
from tests.sim.clock import Clock
from tests.sim.kept import LoggedKey, Memories
from tests.sim.planned_end import ASKED_LATE_S, LAST_STEPS, POLL_S, PlannedEnd

HANG_S = 60.0
WORK_S = 40.0
"""How long the scripts of a whole round have to run, in all, if no step is lost."""
STEPS = 40
"""One in a second."""
LIMIT_S = 4000.0
NEVER_S = 1e9
EXCHANGE_S = 1.0
"""While scripts run; longer than the real one, so that a schedule is cheap."""
LATE_S = 0.6
"""How late a result may come to a survivor that copies it from another one."""


@dataclass
class Script:
    """A script that runs: how it ends if nobody ends it before. idle_from_s: from when on it uses no processor."""

    begun_s: float
    store: tuple[str, int]
    step: int
    """Steps done."""
    mirrored: int
    """The newest step that is on another machine."""
    kept: int = -1
    """The newest step that it keeps, or is about to have in memory; -1: it has kept none."""
    there: int = -1
    """The newest step that is in the memory of its machine."""
    idle_from_s: float = NEVER_S
    end: Failure | None = None
    ended: bool = False
    asked: bool = False
    waits: bool = False
    """It has done the step behind which all agree to end, as they were asked."""
    off: bool = False
    """It keeps nothing any more."""


@dataclass
class Worker:
    """skew_s: of its wall clock. exchange: the number of the one it is in. knows: the generation it has heard of."""

    name: str
    skew_s: float
    state: RoundState = field(default_factory=RoundState)
    script: Script | None = None
    exchange: int = 0
    knows: int = 0
    dead: bool = False
    lacking_from_s: float = NEVER_S
    """From when on it waits for the memory of another machine, or for room in one."""
    awaited: set[str] = field(default_factory=set)
    """For which of the two it has waited in this round."""
    left: bool = False
    """It has found that all scripts have ended."""
    ends_by_s: float = NEVER_S
    """Until when it waits for the last step of the round."""
    told: set[LoggedKey] = field(default_factory=set)
    off: RoundNumber = NO_ROUND
    """The newest round of which it has heard that a script has kept nothing any more."""
    records: StepRecords | None = None


@dataclass
class Exchange:
    """said: the reports so far. result: once it is complete. decided: what each worker made of it."""

    number: int
    generation: int
    said: dict[str, ScriptReport] = field(default_factory=dict)
    result: dict[str, ScriptReport] | None = None
    decided: dict[str, Decision] = field(default_factory=dict)


class RoundsWorld:
    """One job. `run` raises AssertionError for whatever must not be."""

    def __init__(self, seed: int, *, rare: bool = False) -> None:
        """rare: few steps are kept, mirrors have them late, and machines are lost while the first steps of a round are
        kept."""
        self.clock = Clock(seed)
        choice = self.clock.random.choice
        self.size = self.clock.random.randint(2 if rare else 1, 5)
        self.nodes = self.clock.random.randint(2 if rare else 1, 3)
        self.every = choice((3, 10) if rare else (1, 1, 3, 10))
        """Scripts keep each step whose number is a multiple of this."""
        self.void = 0.5 if rare else choice((0.0, 0.0, 0.3))
        """How often a script changes its weights while it keeps its first step."""
        self.early = 0.5 if rare else 0.15
        """How often a machine is lost while the first steps of a round are kept."""
        self.mirror_s = 0.9 * self.every if rare else choice((0.1, 0.5, 5.0, 0.9 * self.every))
        self.troubles = self.clock.random.randint(0, 6)
        self.full = Random(f"full {seed}")
        """Draws when the memory of a machine is full: in a third of the jobs, and without it the others are as ever."""
        self.no_room = Random(f"no room {seed}")
        """Draws when it is full for a while as a round begins, in the same way."""
        self.fills = self.no_room.random() < 0.33
        self.full_until_s: dict[str, float] = {}
        """By machine."""
        self.workers: dict[str, Worker] = {}
        self.generations: list[tuple[str, ...]] = [()]
        self.newcomers: list[str] = []
        self.exchanges: list[Exchange] = []
        self.incarnations = [0] * self.size
        self.reached: set[str] = set()
        self.memories = Memories(self.clock, self.reached, self.every)
        self.planned: set[int] = set()
        """Generations that began without a loss."""
        self.ends: dict[int, PlannedEnd] = {}
        """Of rounds whose scripts were asked to end."""
        self.ledger: dict[int, StepRecord] = {}
        self.upsets, self.drained = 0, ""
        """How often something has gone wrong; the worker that is to leave."""

    # ------------------------------------------------------------------------------------------------- the course

    def run(self) -> set[str]:
        """What this job has gone through, by name."""
        for slot in range(self.size):
            self._add(slot)
        self.generations.append(tuple(self.workers))
        self.newcomers.clear()
        self.exchanges.append(Exchange(0, 1))
        for worker in self.workers.values():
            worker.knows = 1
            self.clock.after(0.0, lambda worker=worker: self._report(worker))  # type: ignore[misc]
        for _ in range(self.troubles):
            self.clock.after(self.clock.between(0.0, 2.5 * WORK_S), self._trouble)
        for _ in range(self.clock.random.randint(0, 2)):
            self.clock.after(self.clock.between(0.0, 2.5 * WORK_S), self._drain)
        for _ in range(self.full.choice((0, 0, 0, 0, 1, 2))):
            self.clock.after(self.full.uniform(0.0, 2.0 * WORK_S), self._turn_off)
        while not self._over():
            assert self.clock.turn() and self.clock.now_s < LIMIT_S, f"the job does not end: {self.workers}"
        done = [worker.script.step for worker in self.workers.values() if worker.left and worker.script is not None]
        lacking = sorted(set(range(max(done))) - self.ledger.keys())
        assert not lacking, f"steps are not in the ledger: {lacking}"
        return self.reached

    def _record(self, line: StepRecord) -> None:
        """As elastic/records/ledger.py: of a step that is done again the first line stands."""
        known = self.ledger.setdefault(line.step, line)
        assert known.generation != line.generation or known == line, f"a step has two lines: {known}, {line}"
        if known.generation != line.generation:
            self.reached.add("recorded twice")
        if not line.scalars:
            self.reached.add("no loss")

    def _over(self) -> bool:
        living = [worker for worker in self.workers.values() if not worker.dead and worker.knows]
        return bool(living) and all(worker.left for worker in living)

    @property
    def generation(self) -> int:
        return len(self.generations) - 1

    def _add(self, slot: int) -> None:
        name = f"{'abc'[slot % self.nodes]}.{slot}.{self.incarnations[slot]}"
        self.incarnations[slot] += 1
        self.workers[name] = Worker(name, self.clock.between(-0.5, 0.5), records=StepRecords(self._record))
        self.newcomers.append(name)

    def _report(self, worker: Worker) -> None:
        """The worker has waited for its script, follows its generation, and says what its script does."""
        if worker.dead or worker.left:
            return
        if worker.state.generation != worker.knows:
            if worker.script is not None and not worker.script.ended:
                if self._awaits_last_step(worker, worker.script):
                    self.clock.after(POLL_S, lambda: self._report(worker))
                    return
                self._stop(worker)
            if worker.name not in self.generations[worker.knows]:
                self._leave(worker)
                return
            worker.state.enter(worker.knows, len(self.generations[worker.knows]))
            worker.script, worker.ends_by_s = None, NEVER_S
        script, now_s = worker.script, self.clock.now_s
        if script is not None and script.ended and worker.state.script is ScriptState.RUNNING:
            worker.state.ended(script.end)
        members = self.generations[worker.knows]
        store = (worker.name, worker.knows) if members[0] == worker.name else None
        idle_s = max(0.0, now_s - script.idle_from_s) if script is not None else 0.0
        if script is not None:
            worker.state.keeps(self.memories.newest(worker.name, members, worker.state.generation))
            self._look_at_last(worker, members)
            if self.memories.is_off(worker.name, worker.state.generation):
                worker.state.off = RoundNumber(0, worker.state.generation)
        exchange = self.exchanges[worker.exchange]
        if script is not None and worker.name not in exchange.said:
            number = RoundNumber(0, worker.state.generation)
            own = members.index(worker.name)
            worker.state.logged = self.memories.news(
                worker.name, worker.told, lambda one: one.round == number and one.rank == own
            )
        lacking_s = max(0.0, now_s - worker.lacking_from_s)
        recorded = worker.records.recorded if worker.records is not None else -1
        exchange.said.setdefault(worker.name, worker.state.report(store, idle_s, lacking_s, recorded))
        self._complete(exchange)

    def _look_at_last(self, worker: Worker, members: tuple[str, ...]) -> None:
        if worker.state.script is ScriptState.DONE:
            number = RoundNumber(0, worker.state.generation)
            worker.state.held = (HeldSegment(worker.state.kept, number, 0, members.index(worker.name), len(members)),)

    def _complete(self, exchange: Exchange) -> None:
        """If all members of the newest generation have said something, everybody who has gets the result."""
        members = self.generations[self.generation]
        if exchange.result is not None or not all(member in exchange.said for member in members):
            return
        exchange.result = dict(exchange.said) if self.generation == exchange.generation else {
            member: exchange.said[member] for member in members
        }  # fmt: skip
        for name in exchange.result:
            late_s = LATE_S if self.clock.chance(0.1) else 0.05
            self.clock.after(self.clock.between(0.001, late_s), lambda name=name: self._hear(name, exchange))  # type: ignore[misc]

    def _hear(self, name: str, exchange: Exchange) -> None:
        worker = self.workers[name]
        if worker.dead or exchange.result is None or name in exchange.decided:
            return
        members = self.generations[worker.knows]
        if rounds.is_settled(exchange.result, members, worker.knows, worker.state.begun):
            self.memories.settle(name, worker.knows)
        assert worker.records is not None
        worker.state.logged, worker.state.tells = (), False
        worker.records.hear(exchange.result.values())
        worker.off = max(worker.off, *(said.off for said in exchange.result.values()))
        if (safe := rounds.safe_step(exchange.result, members, worker.knows)) > 0:
            worker.records.keep(RoundNumber(0, worker.state.generation), safe)
        worker.state.learn(exchange.result, members, RoundNumber(0, worker.state.generation))
        self.memories.remember(name, worker.state.known)
        decision = worker.state.decide(exchange.result, members, worker.knows, HANG_S)
        exchange.decided[name] = decision
        self._check(worker, exchange, decision)
        match decision:
            case LookAtKept():
                worker.state.known = worker.state.known or self.memories.remembered(name)
                worker.state.off = max(worker.state.off, self.memories.forget_void(name))
                worker.state.held = self.memories.look(name, members)
                if self.fills and (worker.state.held or worker.state.known) and self.no_room.random() < 0.2:
                    lasts_s = self.no_room.uniform(0.0, 0.8 * LACKING_S)
                    self.full_until_s.setdefault(node_of(name), self.clock.now_s + lasts_s)
                worker.state.memory = self._has_room(name)
                mine, shares = share(name, members)
                worker.state.tells = rounds.tells_new_ones(name, exchange.result, members)
                told = worker.records.unrecorded() if worker.state.tells else ()
                left = self.memories.news(name, worker.told, lambda one: one.rank % shares == mine)
                worker.state.logged = (*told, *left)
            case AwaitNodes(lacking):
                self.reached.add("waited")
                found = newest_whole(one for said in exchange.result.values() for one in said.held or ())
                source = found.step if found is not None else 0
                # Who has missed later rounds cannot tell whether others have kept more in them.
                missed = not lacking.nodes and lacking.round.generation < self.memories.newest_round
                # If all are new, machines that have kept a step may have it, though not its mirrors.
                there = self.memories.mirrored if lacking.nodes else self.memories.everywhere
                assert lacking.round > worker.off, f"it waits for step {lacking.step}, behind which nothing was kept"
                missed |= 0 < self.memories.off == self.memories.newest_round  # who has kept nothing more may be lost
                assert source < there or missed, "it waits for a step on its way to its mirrors"
                self._wait(worker, "nodes")
            case AwaitRoom():
                self.reached.add("room awaited")
                self._wait(worker, "room")
                worker.state.memory = self._has_room(name)
            case CopyThin(parts):
                worker.state.held = (*(worker.state.held or ()), *self.memories.copy(name, parts))
                worker.state.copied = True
            case StartScript() as start:
                said = [exchange.result[member] for member in members]
                in_vain = any(one.lacking_s >= LACKING_S for one in said)
                assert in_vain or not start.without, "a round begins without what is kept, for a moment without room"
                nobody_knows = all(one.known is None or not one.known.nodes for one in said)
                self.memories.load(
                    members,
                    worker.state.generation,
                    start,
                    dead={node_of(member) for member in members if self.workers[member].dead},
                    in_vain=in_vain,
                    nobody_knows=nobody_knows,
                    recorded=max(self.ledger, default=-1) + 1,
                    off=max(self.workers[member].off for member in members),
                )
                self.memories.settle(name, worker.state.off.generation)
                number = RoundNumber(0, worker.state.generation)
                worker.records.begin(number, start.source)
                worker.state.starts(start, number)
                self.memories.remember(name, worker.state.known)
                worker.lacking_from_s, worker.awaited = NEVER_S, set()
                self._start(worker, start)
            case Blame(blamed, failure) if blamed == name:
                self.reached.add("killed" if failure.is_from_outside else "failed")
                self._die(worker)
                return
            case Blame() if worker.script is not None and not worker.script.ended:
                self._stop(worker)
                worker.state.script = ScriptState.WAITING
            case Hang(blamed) if blamed == name:
                self.reached.add("hang")
                self._die(worker)
                return
            case HashKept(source):
                worker.state.hashed = True
                if (source.step if source is not None else -1) == worker.records.newest(
                    RoundNumber(0, worker.state.generation)
                ):
                    worker.state.digests = {f"tensor {members.index(name)}": "0123"}
            case AllDone(digest):
                is_kept = worker.script is not None and worker.script.kept == STEPS
                is_kept = is_kept and self.memories.off < worker.state.generation
                assert digest or "ended in part" in self.reached or not is_kept, "the last step has no digest"
                number = RoundNumber(0, worker.state.generation)
                worker.records.keep(number, worker.records.newest(number))
                worker.left = True
                others = [self.workers[other] for other in members if other != name and not self.workers[other].dead]
                if self.troubles and others and self.clock.chance(0.3):
                    self.reached.add("lost at the end")
                    self._die(self.clock.random.choice(others))
                return
            case GoOn(failing=True):
                self.reached.add("failing")
        self._next(worker)

    def _next(self, worker: Worker) -> None:
        """To the next exchange; before it a newcomer may become a member, for all at the same place."""
        worker.exchange += 1
        if worker.exchange == len(self.exchanges):
            ready = [name for name in self.newcomers if not self.workers[name].dead]
            joining = ready if self.clock.chance(0.1) else []
            leaving, self.drained = self.drained, ""
            stay = tuple(name for name in self.generations[-1] if name != leaving)
            if joining or (stay and stay != self.generations[-1]):
                self.reached |= {"join"} if joining else {"drain"}
                self.generations.append((*(stay or self.generations[-1]), *joining))
                self.planned.add(self.generation)
                self.newcomers = [name for name in self.newcomers if name not in joining]
            self.exchanges.append(Exchange(worker.exchange, self.generation))
            for name in joining:
                self.workers[name].exchange = worker.exchange
                self._learn(self.workers[name], self.generation, reports=True)
        worker.knows = max(worker.knows, self.exchanges[worker.exchange].generation)
        running = worker.script is not None and not worker.script.ended
        running = running or worker.lacking_from_s < NEVER_S
        wait_s = self.clock.between(0.0, EXCHANGE_S if running and not worker.state.over else 0.01)
        self.clock.after(wait_s, lambda: self._report(worker))

    def _awaits_last_step(self, worker: Worker, script: Script) -> bool:
        """Whether the worker lets its script go on, to a step behind which all scripts of the round end."""
        members, now_s = self.generations[worker.state.generation], self.clock.now_s
        if worker.ends_by_s == NEVER_S:
            kept = self.memories.newest(worker.name, members, worker.state.generation) >= 0
            since = range(worker.state.generation + 1, worker.knows + 1)
            if not self.planned.issuperset(since) or not kept:
                return False
            worker.ends_by_s = now_s + LAST_STEPS * (1.9 + self.mirror_s)
            self.ends.setdefault(worker.state.generation, PlannedEnd(len(members), self.upsets))
            self.clock.after(ASKED_LATE_S if self.clock.chance(0.1) else 0.0, lambda: setattr(script, "asked", True))
        end = self.ends[worker.state.generation]
        if end.reached:
            assert end.last is not None, "they have ended behind no step"
            self.reached.add("agreed")
            self.memories.agree(worker.state.generation, end.last)
            return False
        quiet = end.upsets == self.upsets and len(end.seen) == len(members) and STEPS - script.step > LAST_STEPS
        all_keep = self.memories.off < worker.state.generation
        assert now_s < worker.ends_by_s or not (quiet and all_keep), "the scripts do not end behind one step"
        return now_s < worker.ends_by_s

    def _leave(self, worker: Worker) -> None:
        """As planned; often its machine goes with it."""
        worker.dead = True
        node, slot = worker.name.split(".")[:2]
        alone = not any(node_of(other.name) == node and not other.dead for other in self.workers.values())
        if alone and self.nodes > 1 and self.clock.chance(0.5):
            self.memories.lose(node)
        self.clock.after(self.clock.between(0.5, 20.0), lambda: self._add(int(slot)))

    # -------------------------------------------------------------------------------------------------- scripts

    def _start(self, worker: Worker, start: StartScript) -> None:
        worker.script = Script(self.clock.now_s, start.store, worker.state.begun, worker.state.begun)
        worker.state.script = ScriptState.RUNNING
        self._look(worker, worker.script)
        if self.troubles and worker.name == self.generations[-1][0] and self.clock.chance(self.early):
            self.clock.after(
                self.clock.between(0.0, 2.0 + 2.0 * self.every), self._lose_another
            )  # while the first steps of the round are kept

    def _look(self, worker: Worker, script: Script) -> None:
        """Once a second of the script: it does a step, or is through. It gets on only with all others of its round."""
        if worker.dead or script.ended or script is not worker.script:
            return
        mates = [self.workers[name] for name in self.generations[worker.state.generation]]
        alike = [mate for mate in mates if not mate.dead and mate.state.generation == worker.state.generation]
        meet = len(alike) == len(mates) and all(
            mate.script is not None and mate.script.store == script.store for mate in alike
        )
        meet = meet and not script.waits
        stuck = any(mate.script is not None and mate.script.idle_from_s < NEVER_S for mate in alike)
        broken = any(mate.script is not None and mate.script.end is not None for mate in alike)
        if broken:
            self.clock.after(self.clock.between(0.0, 0.5), lambda: self._end(worker, script, self._failure(worker)))
            return
        if meet and not stuck:
            self._step(worker, script, [mate.script for mate in mates if mate.script is not None])
            if script.step >= STEPS:
                if script.kept == STEPS:  # its process ends when the step is in memory
                    members, generation = self.generations[worker.state.generation], worker.state.generation
                    self.memories.put(
                        node_of(worker.name), self.memories.begin(worker.name, members, generation, STEPS)
                    )
                self._end(worker, script, None)
                return
        elif stuck:
            script.idle_from_s = min(script.idle_from_s, self.clock.now_s)
        self.clock.after(1.0, lambda: self._look(worker, script))

    def _step(self, worker: Worker, script: Script, scripts: list[Script]) -> None:
        """Do a step, unless another script is behind. If it is to be kept, the one that was kept before is on another
        machine first."""
        members, generation = self.generations[worker.state.generation], worker.state.generation
        partner = next(iter(mirrors_of(worker.name, members)), "")
        if script.step > min(one.step for one in scripts):
            return
        end = self.ends[generation] if script.asked else None
        last = end is not None and not script.off and end.is_last(worker.name, script.step + 1)
        keeps, first = last or (script.step + 1) % self.every == 0, script.kept < 0
        if (keeps or first) and partner and script.mirrored < script.kept and not script.off:
            return
        script.step, script.waits = script.step + 1, last
        self.memories.log(worker.name, members, generation, script.step)
        self.memories.done = max(self.memories.done, min(one.step for one in scripts))
        if script.off or (not keeps and not first):
            return
        script.kept = script.step
        held = self.memories.begin(worker.name, members, generation, script.step)
        is_void = first and not last and script.step < STEPS and self.clock.chance(self.void)

        def copied() -> None:
            if script.ended or worker.dead:
                self.reached.add("torn")
                return
            if is_void:
                self.reached.add("void")
                self.memories.void(generation)
                script.mirrored = held.step  # its thread has ended
                return
            self.memories.put(node_of(worker.name), held)
            script.there = held.step
            self.memories.everywhere = max(self.memories.everywhere, min(one.there for one in scripts))
            if partner:
                self.clock.after(self.clock.between(0.0, self.mirror_s), mirrored)
            else:
                there()

        def mirrored() -> None:
            if not script.ended and not worker.dead:
                if not self.workers[partner].dead:  # else the part is thin
                    self.memories.put(node_of(partner), held)
                there()

        def there() -> None:
            script.mirrored = held.step
            self.memories.mirrored = max(self.memories.mirrored, min(one.mirrored for one in scripts))
            if end is not None and script.waits:
                end.there.add(worker.name)

        self.clock.after(self.clock.between(0.0, 0.9), copied)  # the next step of the optimizer waits for it

    def _end(self, worker: Worker, script: Script, failure: Failure | None) -> None:
        if not script.ended and not worker.dead:
            script.ended, script.end = True, failure

    def _failure(self, worker: Worker, status: int = 1) -> Failure:
        return Failure(status, self.clock.now_s + worker.skew_s)

    def _stop(self, worker: Worker) -> None:
        assert worker.script is not None
        worker.script.ended = True
        worker.script = None

    # ------------------------------------------------------------------------------------------------- troubles

    def _trouble(self) -> None:
        running = [w for w in self.workers.values() if w.script is not None and not w.script.ended and not w.dead]
        living = [self.workers[name] for name in self.generations[-1] if not self.workers[name].dead]
        kind = self.clock.random.choice(("kill", "fail", "kill script", "hang", "part", "node"))
        self.upsets += 1
        if kind == "kill" and len(living) > 1:
            self.reached.add("lost")
            self._die(self.clock.random.choice(living))
        elif kind == "node" and len({node_of(worker.name) for worker in living}) > 1:
            self._lose_node(node_of(self.clock.random.choice(living).name))
        elif not running or kind in ("kill", "node"):
            return
        elif (worker := self.clock.random.choice(running)).script is not None:
            match kind:
                case "fail":
                    self._end(worker, worker.script, self._failure(worker))
                case "kill script":
                    self._end(worker, worker.script, self._failure(worker, -9))
                case "hang":
                    worker.script.idle_from_s = min(worker.script.idle_from_s, self.clock.now_s)
                case "part":  # one script ends well, and another one waits for it for ever
                    self.reached.add("ended in part")
                    self._end(worker, worker.script, None)
                    for other in running:
                        if other is not worker and other.script is not None:
                            other.script.idle_from_s = min(other.script.idle_from_s, self.clock.now_s)

    def _wait(self, worker: Worker, what: str) -> None:
        """As the supervisor does: each kind of wait has its own time."""
        if what not in worker.awaited:
            worker.awaited.add(what)
            worker.lacking_from_s = self.clock.now_s

    def _has_room(self, name: str) -> bool | None:
        return None if self.clock.now_s < self.full_until_s.get(node_of(name), 0.0) else True

    def _turn_off(self) -> None:
        """The memory of a machine is full for one script."""
        running = [w for w in self.workers.values() if w.script is not None and not w.script.ended and not w.dead]
        if not running or (script := (worker := self.full.choice(running)).script) is None:
            return
        self.upsets += 1
        script.off = True
        self.memories.turn_off(worker.name, worker.state.generation)

    def _drain(self) -> None:
        living = [name for name in self.generations[-1] if not self.workers[name].dead]
        self.drained = self.clock.random.choice(living) if len(living) > 1 else ""

    def _lose_node(self, node: str) -> None:
        """And often the next one soon after it."""
        self.reached.add("node lost")
        self.memories.lose(node)
        for worker in self.workers.values():
            if node_of(worker.name) == node and not worker.dead and worker.knows and not worker.left:
                self._die(worker)
        if self.clock.chance(0.4):
            self.clock.after(self.clock.between(0.0, 3.0), self._lose_another)

    def _lose_another(self) -> None:
        living = [self.workers[name] for name in self.generations[-1] if not self.workers[name].dead]
        if len(nodes := sorted({node_of(worker.name) for worker in living})) > 1:
            self._lose_node(self.clock.random.choice(nodes))

    def die(self, name: str) -> None:
        """A worker dies now, unless it is dead; the memory of its machine stays."""
        if not self.workers[name].dead:
            self._die(self.workers[name])

    def _die(self, worker: Worker) -> None:
        """The leader hears of it a moment later, and has the next generation."""
        worker.dead = True
        self.upsets += 1
        if worker.script is not None:
            worker.script.ended = True
        self.clock.after(self.clock.between(0.01, 0.3), self._lose)
        slot = int(worker.name.split(".")[1])
        self.clock.after(self.clock.between(0.5, 20.0), lambda: self._add(slot))

    def _lose(self) -> None:
        members = self.generations[-1]
        living = tuple(name for name in members if not self.workers[name].dead)
        if living == members:
            return
        if not living:  # nobody holds the job any more: its replacements begin it anew
            self.reached.add("all lost")
            ready = [name for name in self.newcomers if not self.workers[name].dead]
            if not ready:
                self.clock.after(1.0, self._lose)
                return
            living = tuple(ready)
            self.newcomers.clear()
            self.exchanges.append(Exchange(len(self.exchanges), self.generation + 1))
            for name in living:
                self.workers[name].exchange = len(self.exchanges) - 1
        self.generations.append(living)
        for name in living:
            fresh = not self.workers[name].knows
            self._learn(self.workers[name], self.generation, reports=fresh)
        newest = self.exchanges[-1]
        self._complete(newest)

    def _learn(self, worker: Worker, generation: int, *, reports: bool) -> None:
        """It hears of a generation. reports: it is in its first exchange now."""

        def hear() -> None:
            worker.knows = max(worker.knows, generation)
            if reports:
                self._report(worker)

        if reports:
            hear()
        else:
            self.clock.after(self.clock.between(0.0, 0.1), hear)

    # --------------------------------------------------------------------------------------------------- checks

    def _check(self, worker: Worker, exchange: Exchange, decision: Decision) -> None:
        assert exchange.result is not None
        match decision:
            case StartScript(store=store):
                generation = worker.state.generation
                said = [exchange.result[name] for name in self.generations[generation]]
                assert all(one.state is ScriptState.WAITING for one in said), "somebody was not ready"
                assert {one.generation for one in said} == {generation}, "somebody was in another round"
                assert store == (self.generations[generation][0], generation), "the store of another round"
                for name in self.generations[generation]:
                    script = self.workers[name].script
                    old = script is None or script.ended or script.store == store
                    assert old or self.workers[name].dead, f"a script of {name} still runs in an earlier round"
                assert worker.script is None or worker.script.ended, "two scripts of one worker"
            case Hang(_, hanging):
                for name in hanging:
                    script = self.workers[name].script  # None: it has left the round already
                    idle_s = self.clock.now_s - script.idle_from_s if script is not None else HANG_S
                    assert self.workers[name].dead or idle_s >= HANG_S, f"{name} gets on"
            case AllDone():
                for name in exchange.result:
                    script = self.workers[name].script
                    well = script is not None and script.ended and script.end is None
                    assert well or self.workers[name].dead, f"the script of {name} has not ended well"
        # Whoever has heard of the next generation waits for it; all others decide alike.
        others = [one for one in exchange.decided.values() if not isinstance(one, GoOn)]
        assert all(one == others[0] for one in others), f"different decisions: {exchange.decided}"
        if any(isinstance(one, AllDone) for one in exchange.decided.values()):
            assert all(isinstance(one, AllDone) for one in exchange.decided.values()), "some leave, and some do not"
