"""One run: nodes, leaders, a store, a script, faults; and what must hold after every event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from elastic import position
from elastic.config import JobSpec, Timing
from elastic.membership import End, Group
from elastic.messages import Generation, Kind, Order, RingState
from elastic.position import Phase, Position
from elastic.tree import Node, leaves
from tests.sim.agent import Agent
from tests.sim.clock import Clock, Lane
from tests.sim.faults import Fault, Scene, draw
from tests.sim.leader import Leader
from tests.sim.script import Script, Sum, write_script
from tests.sim.store import Records
from tests.sim.worker import Worker

TIMING = Timing(orphan_limit_s=120.0, pause_limit_s=120.0, control_silence_s=20.0, progress_s=10.0, hang_s=15.0)
PATIENCE_S = 400.0
"""After the heal: longer than every deadline of TIMING, one after the other."""


class Violation(AssertionError):
    """Something that must never happen did."""


@dataclass(frozen=True, slots=True)
class Verdict:
    seed: int
    scene: Scene
    ended: End
    reached: Counter[str]
    duration_s: float


class World:
    def __init__(self, seed: int, tell: Callable[[str], None] | None = None, scene: Scene | None = None) -> None:
        """scene: another one than the seed's."""
        self.seed, self._tell = seed, tell
        self.scene = scene or draw(seed)
        self.clock = Clock(seed)
        scene = self.scene
        self.script = Script(write_script(self.clock.random, scene.steps, scene.units, scene.epoch_steps))
        self.spec = JobSpec(
            name="simulated",
            command=("script",),
            workers=scene.nodes * scene.slots,
            min_workers=scene.min_workers,
            max_workers=scene.max_workers,
            spares=scene.spares,
            timing=replace(TIMING, uneven_s=scene.uneven_s),
            stragglers=scene.stragglers,
        )
        self.store_trouble, self.copy_trouble = scene.store_trouble, scene.copy_trouble
        self.records = Records()
        self.workers: dict[str, Worker] = {}
        self.agents: list[Agent] = []
        self.leader: Leader | None = None
        self.ended: End | None = None
        self.over = False
        self.healed = False
        self.disturbed = False
        self.reached: Counter[str] = Counter()
        self.sleeping_orders: dict[str, list[Order]] = {}
        self._seen: Counter[str] = Counter()
        self._armed = list(scene.faults)
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._effect_after: dict[int, int] = {}
        self._promised: dict[str, int] = {}

    # ----------------------------------------------------------------------------------------------- run

    def run(self) -> Verdict:
        for fault in self._armed:
            self.say("fault", str(fault))
            if fault.at_s is not None:
                self.clock.after(fault.at_s, lambda fault=fault: self._strike(fault, None))  # type: ignore[misc]
        self.elect()
        for node in range(self.scene.nodes):
            self.agents.append(Agent(self, f"n{node}", self.scene.slots))
        self.clock.after(self.scene.heal_s, self.heal)
        limit_s = self.scene.heal_s + PATIENCE_S
        while self.ended is None:
            if not self.clock.turn() or self.clock.now_s > limit_s:
                raise Violation(f"not over after {self.clock.now_s:.1f} s: {self._where()}")
            self._check()
        self._judge(self.ended)
        return Verdict(self.seed, self.scene, self.ended, self.reached, self.clock.now_s)

    def heal(self) -> None:
        self.say("world", "healed")
        self.healed = True
        self.store_trouble = self.copy_trouble = 0.0
        for worker in list(self.workers.values()):
            worker.resume()
            worker.go_on()

    def elect(self) -> None:
        if not self.over:
            self.leader = Leader(self)
            self.say("world", f"leader {self.leader.term} is elected")
            if self.leader.term > 1:
                self.reach("a new leader")

    def end(self, ended: End) -> None:
        self.ended, self.over = ended, True
        self.say("world", f"{ended}")

    def new_worker(self, agent: Agent, slot: int, incarnation: int) -> Worker:
        worker = Worker(self, agent, slot, incarnation)
        self.workers[worker.me] = worker
        return worker

    def slowness(self, agent: Agent) -> float:
        node = self.agents.index(agent)
        return self.scene.slowness[node] if node < len(self.scene.slowness) else 1.0

    def reach(self, what: str) -> None:
        self.reached[what] += 1

    def say(self, who: str, what: str) -> None:
        if self._tell:
            self._tell(f"{self.clock.now_s:9.4f}  {who:10} {what}")

    # -------------------------------------------------------------------------------------------- network

    def lane(self, sender: str, receiver: str, low_s: float, high_s: float) -> Lane:
        key = (sender, receiver)
        if key not in self._lanes:
            self._lanes[key] = Lane(self.clock, low_s, high_s)
        return self._lanes[key]

    def control_lane(self, worker: Worker, *, up: bool = False) -> Lane:
        ends = (worker.me, "agent") if up else ("agent", worker.me)
        return self.lane(*ends, 0.0001, 0.0005)

    def frame(self, sender: str, receiver: str, number: int, key: object, content: object) -> None:
        def deliver() -> None:
            worker = self.workers[receiver]
            if worker.alive:
                worker.mesh.frame(number, sender, key, content)

        self.lane(sender, receiver, 0.0002, 0.004).send(deliver)

    def lose_frames(self, sender: str) -> None:
        for (source, target), lane in self._lanes.items():
            if source == sender and target != "agent":
                lane.lose()

    def link_trouble(self) -> bool:
        troubled = not self.healed and self.clock.chance(self.scene.link_trouble)
        self.disturbed |= troubled
        return troubled

    # --------------------------------------------------------------------------------------------- faults

    def hook(self, name: str, worker: Worker | None = None) -> None:
        self._seen[name] += 1
        for fault in [f for f in self._armed if f.hook == name and f.nth == self._seen[name]]:
            self.clock.after(fault.delay_s, lambda fault=fault: self._strike(fault, worker))  # type: ignore[misc]

    def _strike(self, fault: Fault, here: Worker | None) -> None:
        if self.healed or self.over:
            return
        living = [worker for worker in self.workers.values() if worker.alive]
        donors = [worker for worker in living if worker.p.donor]
        victim = here if fault.whom == "self" and here and here.alive else None
        if victim is None and fault.whom == "donor" and donors:
            victim = donors[-1]
        if victim is None and fault.whom == "ahead" and living:
            victim = max((w for w in living if w is not here), key=lambda w: w.p.reduced, default=None)
        if fault.what == "stick":
            victim = next((worker for worker in living if worker.p.phase is Phase.FRESH), None)
        elif victim is None and living:
            victim = living[fault.whom % len(living) if isinstance(fault.whom, int) else 0]
        self.say("world", f"FAULT {fault} -> {victim.me if victim else '-'}")
        self.reach(f"fault {fault.what}")
        if fault.what not in ("drain", "add_node"):
            self.disturbed = True
        leader = self.leader
        match fault.what:
            case "crash" if victim:
                victim.die("killed")
            case "pause" if victim:
                victim.pause()
                self.clock.after(fault.for_s, victim.resume)
            case "cut" if victim and victim.agent.stream:
                victim.agent.stream.cut("the link broke")
            case "hang" if victim and victim.p.phase is Phase.FRESH:
                victim.newcomer.hung = True
            case "stall" if victim and victim.p.phase in (Phase.READY, Phase.COLLECTING) and not victim.paused:
                victim.stall()
                self._beat()
            case "stick" if victim:
                victim.newcomer.stuck = True
            case "crash_node" if victim:
                victim.agent.crash()
            case "drain" if victim:
                victim.agent.drain(fault.for_s)
            case "add_node":
                self.agents.append(Agent(self, f"n{len(self.agents)}", 1))
            case "crash_leader" if leader and leader.alive:
                leader.crash()
                self.clock.after(self.clock.between(0.1, 3.0), self._replace_leader)
            case "pause_leader" if leader and leader.alive:
                leader.pause()
                self.clock.after(fault.for_s, leader.resume)
                if fault.for_s > 2.0:
                    self.clock.after(2.0, lambda: self._usurp(leader))

    def _beat(self) -> None:
        for worker in list(self.workers.values()):
            worker.beat()
        if any(worker.stalled and worker.alive for worker in self.workers.values()):
            self.clock.after(1.0, self._beat)

    def _replace_leader(self) -> None:
        if self.leader is None or not self.leader.alive:
            self.elect()

    def _usurp(self, old: Leader) -> None:
        """The lease of a paused leader is over. Agents find the new one when they look."""
        if self.leader is old and old.alive:
            self.elect()
            for stream in list(old.streams.values()):
                self.clock.after(self.clock.between(0.0, 8.0), lambda stream=stream: stream.cut("a new leader"))  # type: ignore[misc]

    # ----------------------------------------------------------------------------------------- invariants

    def committed(self, record: Generation) -> None:
        self.say("store", f"generation {record.number} {record.kind} {' '.join(record.ids)} {record.plan}")
        self.reach(f"committed {record.kind}")
        if record.kind is not Kind.FORM and record.plan.paces:
            self.reach(f"shards by speed in a {record.kind} generation")
        self._require(len(set(record.ids)) == len(record.ids), f"{record} lists one member twice")
        self._require(bool(record.ids) or record.kind is Kind.PLANNED, f"{record} lists nobody")
        wanted = min(self.spec.workers_limit, max(self.spec.workers, sum(agent.slots for agent in self.agents)))
        drained = self.reached["fault drain"] > 0  # those who may leave stay as long as the others are needed
        self._require(drained or len(record.ids) <= wanted, f"{record} is larger than the world of {wanted} wanted")
        order = [(member.seniority, member.worker_id) for member in record.members]
        self._require(order == sorted(order), f"ranks of {record} do not follow seniority")
        if record.kind is not Kind.LOSS:
            return
        self._require(self.disturbed, f"a loss generation without a fault: {record.because}")
        if self.records.all.get(record.number - 1, record).kind is Kind.PLANNED:
            self.reach("a planned change was voided by a loss")
        if self.records.all.get(record.number - 1, record).kind is Kind.LOSS:
            self.reach("a loss right after a loss")
        if record.hold:
            self.reach("a generation below quorum")
        if record.plan.units:
            self.reach("redo rule: the operation is redone")
        if any(lag.source == "" for lag in record.plan.laggards):
            self.reach("plan: a laggard without a source")
        if all(self.workers[worker].p.phase is Phase.FRESH for worker in record.ids):
            self.reach("newcomers are the only holders")

    def saw(self, worker: Worker, before: Position) -> None:
        after = worker.p
        if after.entered != before.entered:
            record = self.records.all.get(after.entered)
            same = (
                record is not None and after.record is not None and _told(record, worker) == _told(after.record, worker)
            )
            self._require(same, f"{worker.me} entered what was not committed")
            assert record is not None
            self._require(record.member(worker.me) is not None, f"{worker.me} entered without being a member")
            promised = self._promised.get(worker.me, 0)
            self._require(after.entered > promised, f"{worker.me} promised {promised} and enters {after.entered}")
            if record.kind is Kind.PLANNED:
                self.hook("entered_planned", worker)
                if before.record and before.record.ids == record.ids and before.record.plan.paces != record.plan.paces:
                    self.reach("shards followed speed")
                if record.early:
                    self.reach("a drained member did not wait for a newcomer")
                first = self._effect_after.setdefault(record.number, after.reduced)
                self._require(first == after.reduced, f"{record.number} starts with {first} and with {after.reduced}")
            else:
                self.hook("entered_loss", worker)
        report = worker.last_report
        if report is not None:
            self._promised[worker.me] = max(self._promised.get(worker.me, 0), report.promise)
            if report.entered and after.quiesced:
                held = set(leaves(after.roots)) | ({after.running} if after.running is not None else set())
                stale = report.reduced != after.reduced or (report.units and not set(leaves(report.roots)) <= held)
                self._require(not stale, f"{worker.me} reported {report} and stands at {after}")
                self._require(after.ring is RingState.ABORTED, f"{worker.me} reported with a live ring")

    def total(self, worker: Worker, op: int, headers: Mapping[str, tuple[dict[Node, Sum], tuple[int, ...]]]) -> Sum:
        """The sum of all roots, taken only if they cover every unit exactly once."""
        units = self.script.operations[op].units
        nodes = [node for roots, _ in headers.values() for node in roots]
        self._require(leaves(nodes) == tuple(range(units)), f"{worker.me} sums {nodes} of {units} in {op}")
        held = {node: total for roots, _ in headers.values() for node, total in roots.items()}
        return tuple(value for node in sorted(nodes) for value in held[node])

    def agree(self, worker: Worker, slices: Sequence[Sum]) -> None:
        self._require(len(set(slices)) == 1, f"{worker.me} gets slices of different sums")

    def obtained(self, worker: Worker, op: int, result: Sum, before: Position) -> None:
        self.say(worker.me, f"has the result of {op} in generation {before.entered}")
        self._require(result == self.script.result(op), f"{worker.me} has {result}, not {self.script.result(op)}")
        self._require(worker.applied == op, f"{worker.me} has applied {worker.applied} and obtains {op}")
        superseding = [r for n, r in self.records.all.items() if n > before.entered > 0 and r.kind is Kind.LOSS]
        self._require(
            not superseding or op <= superseding[0].plan.op,
            f"{worker.me} completes {op} in {before.entered} after {superseding[:1]}",
        )

    def ticked(self, group: Group) -> None:
        """A deadline that stays in the past after its tick would make the leader spin."""
        self._require(group.deadline_s > self.clock.now_s, f"{group.state} wants a tick at {group.deadline_s}")

    def told_to_close(self, worker: Worker) -> None:
        """A member is told that the job is complete: it must be waiting for the very last operation."""
        self._require(worker.p.reduced >= self.script.last, f"{worker.me} is closed in operation {worker.p.reduced}")

    def _check(self) -> None:
        ahead: dict[int, list[int]] = {}
        for worker in self.workers.values():
            if worker.alive and worker.p.entered:
                ahead.setdefault(worker.p.entered, []).append(worker.p.reduced)
        for number, reduced in ahead.items():
            self._require(max(reduced) - min(reduced) <= 1, f"members of {number} stand at {reduced}")

    def _judge(self, ended: End) -> None:
        base = self.records.base
        holders = [w for w in self.workers.values() if w.alive and (w.p.entered or w.p.copied >= 0)]
        living = [w.me for w in holders if base and (w.p.entered >= base.number or w.p.copied >= 0)]
        if ended.exit_code == 0:
            wanted = str(self.script.state(self.script.last))
            self._require(ended.digest == wanted, f"the job ends with {ended.digest}, not {wanted}")
        elif ended.exit_code == 6:
            self._require(self.reached["fault drain"] > 0, f"nobody has to go: {ended}")
            ended_in = max(worker.p.leaving for worker in self.workers.values())
            reduced = {worker.p.reduced for worker in self.workers.values() if worker.p.leaving == ended_in}
            self._require(len(reduced) <= 1, f"the last to leave stand at {reduced}")
        elif ended.exit_code == 3:
            self._require(self.scene.min_workers > 1 or not base, f"below quorum: {ended}")
            self._require(self.scene.name != "stuck", f"every slot is filled again, and yet {ended}")
        else:
            self._require(ended.exit_code == 4 and not living, f"{ended} while {living} live")
        self.reach(f"exit {ended.exit_code}")

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise Violation(what)

    def _where(self) -> str:
        group = self.leader.group if self.leader else None
        lines = [f"leader {group.state if group else '-'}: {group.because if group else ''}"]
        for worker in self.workers.values():
            if worker.alive:
                lines.append(f"{worker.me}: {position.move(worker.p) if worker.p.record else ''} {worker.p}")
        return "\n".join(lines)


def _told(record: Generation, worker: Worker) -> tuple[object, ...]:
    """What a worker knows of a record: the tasks of others by their digest only."""
    return record.digest(), record.plan.share_of(worker.me), record.plan.source_of(worker.me)
