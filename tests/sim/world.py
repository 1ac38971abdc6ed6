"""One run: nodes, leaders, a store, a script, and what goes wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from elastic.checkpoints.naming import EntryName
from elastic.config import JobSpec, Timing
from elastic.protocol import worker_state
from elastic.protocol.failure_detector import Health
from elastic.protocol.membership import End, Group
from elastic.protocol.messages import Generation, Order
from elastic.protocol.worker_state import WorkerState
from tests.sim.agent import Agent
from tests.sim.clock import Clock, Lane, Timepiece
from tests.sim.directed import draw
from tests.sim.faults import Fault, Scene
from tests.sim.judge import Judge, Violation
from tests.sim.leader import Leader
from tests.sim.memory import Storage
from tests.sim.network import Network
from tests.sim.paths import Paths
from tests.sim.replicas import Rounds, RoundsScript
from tests.sim.script import Script, Sum, write_script
from tests.sim.store import Records
from tests.sim.strikes import strike
from tests.sim.wanted import Change
from tests.sim.worker import Worker

TIMING = Timing(
    beat_s=0.5, suspect_s=1.5, orphan_limit_s=40.0, orphan_margin_s=5.0, pause_limit_s=80.0, control_silence_s=20.0,
    progress_s=10.0, hang_s=15.0, join_window_s=5.0,
)  # fmt: skip
PATIENCE_S = 400.0
"""After the heal: longer than every deadline of TIMING, one after the other."""
INNER_STEP_S, PASSES = 0.03, 2
"""In rounds besides: for each inner step on a machine of speed 1; and the passes of a step, few of which come again."""

GOODBYE_S = 60.0
"""After its end: by then no process of the job is left."""

SKEW = 0.001
"""Clocks differ by at most so much in their rate; orphan_margin_s is made for ten times that."""


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
        self.is_told = tell is not None
        """Somebody reads it; what is not read need not be worded."""
        self.scene = scene = scene or draw(seed)
        self.clock = Clock(seed)
        self.network = Network(self.clock, scene.loss)
        program = write_script(self.clock.random, scene.steps, scene.units, scene.epoch_steps)
        self.script = (Script if scene.rounds is None else RoundsScript)(program, program.operations)
        self._runs = {"": self.script}
        self.spec = JobSpec(
            name="simulated",
            command=("script",),
            workers=scene.nodes * scene.slots + scene.absent,
            min_workers=scene.min_workers,
            max_workers=scene.max_workers + scene.absent,
            spares=scene.spares if scene.replace else 0,
            timing=replace(TIMING, uneven_s=scene.uneven_s),
            stragglers=scene.stragglers,
            retain_results=scene.retains,
            replace=scene.replace,
            max_restarts=scene.max_restarts,
            reduction=scene.reduction,
        )
        self.store_trouble, self.copy_trouble = scene.store_trouble, scene.copy_trouble
        self.store_away = False
        self.records, self.storage = Records(), Storage()
        self.size = 0
        """How many workers somebody wants the job to have; 0: as at the start."""
        self.most = self.spec.workers
        """How many it ever was to have."""
        self.workers: dict[str, Worker] = {}
        self.agents: list[Agent] = []
        self.leader: Leader | None = None
        self.ended: End | None = None
        self.healed = False
        self.disturbed = False
        """Something has happened after which a member may be lost."""
        self.waited_out = False
        """A leader has waited until silent members must have parked."""
        self.reached: Counter[str] = Counter()
        self.changes: set[Change] = set()
        self.events = 0
        self.sleeping_orders: dict[str, list[Order]] = {}
        self._seen: Counter[str] = Counter()
        self._armed: dict[str, list[Fault]] = {}
        self._health: dict[tuple[int, str], Health] = {}
        self._beats = False
        self.judge, self.paths = Judge(self), Paths(self)

    # ----------------------------------------------------------------------------------------------- run

    def run(self) -> Verdict:
        for fault in self.scene.faults:
            self.say("fault", str(fault))
            self._armed.setdefault(fault.hook, []).append(fault)
            if fault.at_s is not None:
                self.clock.after(fault.at_s, lambda fault=fault: strike(self, fault, None))  # type: ignore[misc]
        self.elect()
        for node in range(self.scene.nodes):
            late_s = self.scene.late_s[node] if node < len(self.scene.late_s) else 0.0
            self.clock.after(late_s, lambda: self.start_agent(self.scene.slots))
        self.clock.after(self.scene.heal_s, self.heal)
        limit_s = self.scene.heal_s + PATIENCE_S
        if (rounds := self.scene.rounds) is not None:  # one worker may have to train all replicas
            inner_steps = PASSES * self.scene.steps * self.scene.units * rounds.inner_steps
            limit_s += inner_steps * INNER_STEP_S * max(self.scene.slowness, default=1.0)
        while self.ended is None:
            if not self.clock.turn() or self.clock.now_s > limit_s:
                raise Violation(f"not over after {self.clock.now_s:.1f} s: {self._where()}")
        ended = self.ended
        self.judge.ended(ended)
        self.reach(f"exit {ended.exit_code}")
        duration_s = self.clock.now_s
        self._say_goodbye()
        return Verdict(self.seed, self.scene, ended, self.reached, duration_s)

    def _say_goodbye(self) -> None:
        for agent in self.agents:
            agent.after(self.clock.between(0.0, 1.0), agent.on_end)
        limit_s = max(self.clock.now_s, self.scene.heal_s) + GOODBYE_S
        while any(agent.workers for agent in self.agents if agent.alive):
            if not self.clock.turn() or self.clock.now_s > limit_s:
                raise Violation(f"processes are left {GOODBYE_S} s after the end: {self._where()}")

    def heal(self) -> None:
        self.say("world", "healed")
        self.healed = True
        self.store_trouble = self.copy_trouble = 0.0
        self.network.heal()
        self.network.unmute()
        for agent in self.agents:
            if agent.paused:
                agent.resume()
        for worker in list(self.workers.values()):
            worker.resume()
            worker.go_on()

    def run_from(self, began: str) -> Script:
        """What is left of the script where a revived job goes on; the whole one for the first run."""
        if began not in self._runs:
            name = EntryName.parse(began)
            assert name is not None
            rounds = self.judge.rounds if self.scene.rounds else None
            state = self.script.state(name.step) if rounds is None else rounds.state_of(began)
            self._runs[began] = self.script.resumed(name.step, state)
        return self._runs[began]

    @property
    def rounds(self) -> Rounds:
        """Of a job with a quorum."""
        assert self.scene.rounds is not None
        return self.scene.rounds

    def resize(self, workers: int) -> None:
        """Somebody gives the job another size."""
        self.size, self.most = workers, max(self.most, workers)
        if self.leader is not None:
            self.leader.resize()

    def start_agent(self, slots: int) -> None:
        if not self.over:
            self.agents.append(Agent(self, f"n{len(self.agents)}", slots))

    def elect(self) -> None:
        if not self.over:
            self.leader = Leader(self)
            self.say("world", f"leader {self.leader.term} is elected")
            if self.leader.term > 1:
                self.reach("a new leader")

    def replace_leader(self) -> None:
        if self.store_away:
            self.clock.after(1.0, self.replace_leader)
        elif self.leader is None or not self.leader.alive:
            self.elect()

    def store_returns(self) -> None:
        self.store_away = False
        self.replace_leader()

    def end(self, ended: End) -> None:
        self.ended = self.ended or ended
        self.say("world", f"{ended}")

    @property
    def over(self) -> bool:
        return self.ended is not None

    @property
    def exit_code(self) -> int:
        return self.ended.exit_code if self.ended else 0

    def closed_at(self, exit_code: int) -> bool:
        return self.ended is not None and self.ended.exit_code == exit_code

    def new_worker(self, agent: Agent, slot: int, incarnation: int) -> Worker:
        worker = Worker(self, agent, slot, incarnation)
        self.workers[worker.me] = worker
        return worker

    def new_timepiece(self) -> Timepiece:
        if not self.scene.skewed:
            return Timepiece(self.clock, 0.0, 1.0)
        return Timepiece(self.clock, self.clock.between(0.0, 1e6), self.clock.between(1 - SKEW, 1 + SKEW))

    def slowness(self, agent: Agent) -> float:
        node = self.agents.index(agent)
        return self.scene.slowness[node] if node < len(self.scene.slowness) else 1.0

    def reach(self, what: str) -> None:
        self.reached[what] += 1

    def was_struck(self, *kinds: str) -> bool:
        return any(self.reached[f"fault {kind}"] for kind in kinds)

    def say(self, who: str, what: str) -> None:
        if self._tell:
            self._tell(f"{self.clock.now_s:9.4f}  {who:10} {what}")

    # ---------------------------------------------------------------------------------------- circumstances

    def may_not_start(self, agent: Agent) -> bool:
        return agent.node == f"n{self.scene.cannot_start}"

    def never_joins(self, worker: Worker) -> bool:
        """Its script ends before that, of itself or by what it raises."""
        again = not self.scene.joins_once or not worker.me.endswith(".0")
        return again and worker.agent.node == f"n{self.scene.never_joins}"

    def numerics(self, agent: Agent) -> str:
        return "other" if agent.node == f"n{self.scene.strange}" else "same"

    def raises(self, worker: Worker, unit: int) -> str:
        """Where the script raises now, or empty."""
        if unit == 0 and worker.p.reduced == self.scene.poison:
            return f"poison {unit}"
        return worker.raises

    def copies(self) -> int:
        """How often what is sent now arrives."""
        return 2 if self.scene.twice and not self.healed and self.clock.chance(self.scene.twice) else 1

    # -------------------------------------------------------------------------------------------- network

    def is_blocked(self, sender: str, receiver: str) -> bool:
        return self.network.is_blocked(sender, receiver) or self.network.is_blocked(receiver, sender)

    def new_lane(self, sender: str, receiver: str, low_s: float, high_s: float) -> Lane:
        return self.network.new_lane(sender, receiver, low_s, high_s)

    def control_lane(self, worker: Worker, *, up: bool = False) -> Lane:
        node = worker.agent.node
        here, agent = (worker.me, node), ("agent", node)
        return self.network.lane(here if up else agent, agent if up else here, 0.0001, 0.0005)

    def frame(self, sender: Worker, receiver: str, number: int, key: object, content: object) -> None:
        target = self.workers[receiver]

        def deliver() -> None:
            if target.alive:
                target.mesh.frame(number, sender.me, key, content)

        ends = ((sender.me, sender.agent.node), (receiver, target.agent.node))
        self.network.lane(*ends, 0.0002, 0.004).send(deliver)

    def lose_frames(self, sender: Worker) -> None:
        self.network.lose_from(sender.me, but="agent")

    def link_trouble(self) -> bool:
        troubled = not self.healed and self.clock.chance(self.scene.link_trouble)
        self.disturbed |= troubled
        return troubled

    def link_is_slow(self) -> bool:
        slow = not self.healed and self.clock.chance(self.scene.slow_links)
        self.disturbed |= slow
        return slow

    def look_at_streams(self) -> None:
        """Connections that carry nothing any more."""
        for agent in self.agents:
            if agent.stream is not None:
                agent.do(agent.stream.look)

    # --------------------------------------------------------------------------------- what is seen happen

    def hook(self, name: str, worker: Worker | None = None) -> None:
        self._seen[name] += 1
        for fault in self._armed.get(name, ()):
            if fault.nth != self._seen[name]:
                continue
            self.clock.after(fault.delay_s, lambda fault=fault: strike(self, fault, worker))  # type: ignore[misc]

    def stepped(self, machine: str, before: str, event: object, after: str) -> None:
        self.events += 1
        self.changes.add((machine, before, type(event).__name__, after))

    def judged(self, who: object, name: str, health: Health) -> None:
        before = self._health.get((id(who), name), Health.ALIVE)
        self._health[id(who), name] = health
        self.changes.add(("detector", str(before), "judge", str(health)))

    def noted(self, event: str) -> None:
        if event in ("straggler", "demoted"):
            self.reach(f"a worker was {'demoted' if event == 'demoted' else 'named a straggler'}")
            self.hook(event)
        if event == "newcomer_unreachable":
            self.reach("a newcomer could not be connected")

    def committed(self, record: Generation) -> None:
        if self.is_told:
            self.say("store", f"generation {record.number} {record.kind} {' '.join(record.ids)} {record.plan}")
        self.judge.committed(record)
        self.paths.committed(record)

    def saw(self, worker: Worker, before: WorkerState) -> None:
        self.judge.saw(worker, before)
        self.paths.saw(worker, before)

    def obtained(self, worker: Worker, op: int, result: Sum, before: WorkerState) -> None:
        if self.is_told:
            self.say(worker.me, f"has the result of {op} in generation {before.entered}")
        self.judge.obtained(worker, op, result, before)

    def died(self, worker: Worker) -> None:
        self.judge.died(worker)
        self.paths.died(worker)

    def lost_leader(self, group: Group) -> None:
        self.paths.lost_leader(group)

    def killed(self, worker: Worker | None) -> None:
        if worker is not None:
            self.paths.killed(worker)

    def ticked(self, group: Group, now_s: float) -> None:
        self.waited_out |= bool(group.quiesced_s) and now_s >= group.proof_ends_s
        self.judge.ticked(group, now_s)

    def beat(self) -> None:
        """Workers say where they stand without news too, while it matters: somebody gets nowhere, or is not heard."""
        if not self._beats:
            self._beat()

    def _beat(self) -> None:
        for worker in list(self.workers.values()):
            worker.beat()
        unheard = self.network.is_parted or any(agent.paused for agent in self.agents)
        self._beats = unheard or any(worker.stalled and worker.alive for worker in self.workers.values())
        if self._beats:
            self.clock.after(self.spec.timing.suspect_s / 2 if unheard else 1.0, self._beat)

    def _where(self) -> str:
        group = self.leader.group if self.leader else None
        lines = [f"leader {group.state if group else '-'}: {group.because if group else ''}"]
        for worker in self.workers.values():
            if worker.alive:
                lines.append(f"{worker.me}: {worker_state.next_move(worker.p) if worker.p.record else ''} {worker.p}")
        return "\n".join(lines)
