"""A node's agent: it owns processes, forwards words, and says again to every new leader what still holds.

When a process is started and what its end means is the real supervision; who is frozen is judged by the real detector.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from elastic.agent.standing_words import StandingWords
from elastic.protocol import worker_slot
from elastic.protocol.failure_detector import Detector, Health
from elastic.protocol.membership import AgentUp, Event
from elastic.protocol.messages import (
    Announce,
    Close,
    DrainOver,
    DrainWish,
    Failed,
    Finished,
    Home,
    Invite,
    Kill,
    Order,
    Progress,
    Publish,
    Quiesce,
    Release,
    RingUp,
    Word,
    WorkerDead,
    WorkerFrozen,
)
from elastic.wire import elastic_pb2 as pb
from elastic.wire.broadcast import Reader
from tests.sim.memory import Memory

if TYPE_CHECKING:
    from tests.sim.leader import Leader
    from tests.sim.worker import Worker
    from tests.sim.world import World

KEEPALIVE_S = 2.0
"""By then an agent notices that nothing comes from its leader."""

SERVER_KEEPALIVE_S = (3.0, 10.0)
"""After a time between these a leader's end of such a stream is closed."""

SPAWN_PAUSE_S = 0.2


class Stream:
    """One connection of an agent to one leader; what is under way when it is cut is lost, or comes late."""

    def __init__(self, agent: Agent, leader: Leader) -> None:
        self.agent, self.leader = agent, leader
        self.open = True
        self._known = agent.reader.known
        world = agent.world
        self._up = world.new_lane(agent.node, leader.host, 0.0002, 0.003)
        self._down = world.new_lane(leader.host, agent.node, 0.0002, 0.003)
        leader.attach(self)

    def say(self, event: Event) -> None:
        for _ in range(self.agent.world.copies()):
            self._up.send(lambda: self.leader.hear(self, event))

    def beat(self) -> None:
        self._up.send(lambda: self.leader.beat(self))

    def tell(self, to: tuple[str, ...], order: Order) -> None:
        """On the wire as in earnest: a generation travels as its difference to one that the agent has."""
        world, agent = self.agent.world, self.agent
        for _ in range(world.copies()):
            addressed = self.leader.publisher.addressed(order, to, self._known)
            document = addressed.SerializeToString()
            if addressed.delta:
                world.reach("a generation was told as a difference")
            self._down.send(lambda document=document: agent.do(lambda: self._told(to, document)))  # type: ignore[misc]

    def _told(self, to: tuple[str, ...], document: bytes) -> None:
        if self.open:
            self.agent.obey(to, self.agent.reader.read(pb.Addressed.FromString(document)))

    def cut(self, because: str) -> None:
        """Here; the leader notices later, and may hear until then what was said before."""
        if not self.open:
            return
        self.open = False
        clock = self.agent.world.clock
        if clock.chance(0.5):
            self._up.lose()
        self._down.lose()
        self.agent.world.say(self.agent.node, f"stream to leader {self.leader.term} ends: {because}")
        clock.after(clock.between(0.0, 0.01), lambda: self.leader.detach(self))
        self.agent.lost_stream(self)

    def look(self) -> None:
        """Has it been silent for too long?"""
        if self.open and self.agent.world.is_blocked(self.agent.node, self.leader.host):
            self.open = False
            self.agent.world.say(self.agent.node, f"stream to leader {self.leader.term} is silent")
            self.agent.lost_stream(self)
            clock = self.agent.world.clock
            earliest_s, latest_s = SERVER_KEEPALIVE_S
            clock.after(
                clock.between(earliest_s - KEEPALIVE_S, latest_s - KEEPALIVE_S), lambda: self.leader.detach(self)
            )


class Agent:
    def __init__(self, world: World, node: str, slots: int) -> None:
        self.world, self.node, self.slots = world, node, slots
        self.alive, self.paused, self.ended = True, False, False
        self.clock = world.new_timepiece()
        self.workers: dict[str, Worker] = {}
        self.draining = False
        self.uncarried = False
        """What carries the gradients fails here."""
        self.stream: Stream | None = None
        self.reader = Reader()
        self.memory = Memory()
        self._gone_s = 0.0
        self._term = 0
        self._standing = StandingWords()
        self._detector = Detector(world.spec.timing, self.clock.now_s)
        self._frozen: set[str] = set()
        self._asleep: list[Callable[[], None]] = []
        self._led_s, self._orphaned = self.clock.now_s, False
        count = slots + world.spec.spares
        self.places = [worker_slot.Slot(node, number, world.spec, 0) for number in range(count)]
        self._timers = [0] * count
        for number in range(count):
            self._arm(number)
        self.connect()
        self._watch()

    def is_carried(self) -> None:
        self.uncarried = False

    def do(self, act: Callable[[], None]) -> None:
        """Now, or when this process is thawed; not at all if it is dead."""
        if self.paused:
            self._asleep.append(act)
        elif self.alive:
            act()

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        self.world.clock.after(delay_s, lambda: self.do(act))

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        waiting, self._asleep, self.paused = self._asleep, [], False
        for act in waiting:
            self.do(act)

    # ---------------------------------------------------------------------------------------- supervision

    def supervise(self, number: int, event: worker_slot.Event) -> None:
        before = self.places[number]
        self.places[number], actions = worker_slot.step(before, event, self.clock.now_s)
        self.world.stepped("supervision", before.phase, event, self.places[number].phase)
        for action in actions:
            match action:
                case worker_slot.SayTo(word):
                    self.hear(word)
                case worker_slot.Signal(sent):
                    worker = self.workers.get(self.places[number].worker_id)
                    if worker is not None:
                        worker.signalled(sent)
                case worker_slot.Spawn():
                    delay_s = self.world.clock.between(0.01, 0.3)
                    self.after(delay_s, lambda: self._spawned(number))
        self._arm(number)

    def _arm(self, number: int) -> None:
        self._timers[number] += 1
        timer, deadline_s = self._timers[number], self.places[number].deadline_s
        if deadline_s < math.inf:
            wait_s = 0.0 if deadline_s == -math.inf else max(SPAWN_PAUSE_S, self.clock.until(deadline_s))
            self.after(wait_s, lambda: self._due(number, timer))

    def _due(self, number: int, timer: int) -> None:
        if self._timers[number] == timer:
            self.supervise(number, worker_slot.Due())

    def _spawned(self, number: int) -> None:
        slot = self.places[number]
        if self.world.may_not_start(self):
            self.supervise(number, worker_slot.SpawnFailed("no such program"))
            return
        worker = self.world.new_worker(self, slot.number, slot.incarnation)
        self.workers[worker.me] = worker
        self.supervise(number, worker_slot.Spawned(len(self.world.workers)))
        worker.start()

    def supervise_worker(self, worker_id: str, event: worker_slot.Event) -> None:
        for number, slot in enumerate(self.places):
            if slot.worker_id == worker_id and slot.lives:
                self.supervise(number, event)

    def for_all_places(self, event: worker_slot.Event) -> None:
        for number in range(len(self.places)):
            self.supervise(number, event)

    def saw_dying(self, worker: Worker, status: int) -> None:
        self.supervise_worker(worker.me, worker_slot.Dying(status))

    def saw_exit(self, worker: Worker, status: int, last_words: str) -> None:
        if self.workers.pop(worker.me, None) is None:
            return
        self._detector.forget(worker.me)
        self._frozen.discard(worker.me)
        if worker.announced:
            self.hear(Progress(worker.me, 0, 0, 0, "gone"))
        self.supervise(worker.slot, worker_slot.Exited(status, last_words))

    def crash(self) -> None:
        """The whole node: workers die with their agent, and nobody is left to say so."""
        self.alive = False
        for worker in list(self.workers.values()):
            worker.die(-signal.SIGKILL, "its node died")
        if self.stream:
            self.stream.cut("the node died")

    def stop(self) -> None:
        """It was asked to go, and has no time."""
        self.for_all_places(worker_slot.StopSlot())

    def on_end(self) -> None:
        self.ended = True
        self.for_all_places(worker_slot.JobOver(complete=self.world.exit_code == 0))
        for worker in self.workers.values():
            worker.order(Close(self._term, "the job is over", self.world.exit_code))

    # --------------------------------------------------------------------------------------------- drains

    def drain(self, left_s: float) -> None:
        """left_s: until the node may be gone. Of some notices nothing comes, and the node is there again."""
        clock = self.world.clock
        self.draining, self._gone_s = True, self.clock.now_s + left_s
        self.for_all_places(worker_slot.NodeLeaves())
        for worker in self._announced():
            self.hear(self._wish(worker))
        if clock.chance(0.3):
            self.after(clock.between(0.0, 2 * left_s), self.undrain)

    def undrain(self) -> None:
        if not self.draining or self.ended:
            return
        self.world.reach("a drain was taken back")
        self.draining = False
        for worker in self._announced():
            self.hear(DrainOver(worker))
        self.for_all_places(worker_slot.NodeStays())

    def _announced(self) -> list[str]:
        return [name for name, worker in self.workers.items() if worker.announced]

    def _wish(self, worker: str) -> DrainWish:
        return DrainWish(worker, "asked for", max(0, round(1000 * (self._gone_s - self.clock.now_s))))

    # ------------------------------------------------------------------------------------------- liveness

    def _watch(self) -> None:
        """Every beat_s: beats of the workers that can, a look at those that are silent, and a beat upstream."""
        if not self.alive or (self.world.over and not self.workers):
            return
        now_s, detector = self.clock.now_s, self._detector
        assert not (self._standing.leader and not self._standing.newest), "somebody leads what nobody has heard of"
        if self.stream is not None:
            self.stream.beat()
        for name, worker in self.workers.items():
            if worker.announced and worker.alive and not worker.paused:
                detector.beat(name, now_s)
        for name in detector.suspects(now_s):
            if (suspect := self.workers.get(name)) is not None:
                detector.look(name, suspect.facts(now_s), now_s)
        for name, verdict in detector.judge(now_s).items():
            self.world.judged(self, name, verdict.health)
            if verdict.health is Health.FROZEN and name not in self._frozen:
                self._frozen.add(name)
                self.supervise_worker(name, worker_slot.FoundFrozen())
                self.hear(WorkerFrozen(name, verdict.because))
            elif verdict.health is Health.ALIVE and name in self._frozen:
                self._frozen.discard(name)
                self.supervise_worker(name, worker_slot.FoundAlive())
                self._standing.thawed(name)
        if self.stream is None and not self._orphaned and not self.world.over:
            self._park_if_orphaned()
        self.after(self.world.spec.timing.beat_s, self._watch)

    def _park_if_orphaned(self) -> None:
        if self.clock.now_s < self._led_s + self.world.spec.timing.orphan_limit_s:
            return
        self._orphaned = True
        self.world.reach("workers without any leader were parked")
        for worker in self.workers.values():
            worker.order(Quiesce(self._term, 0, self._standing.newest))
        self.after(0.1, lambda: self.world.judge.parked(self))

    # --------------------------------------------------------------------------------------------- words

    def hear(self, word: Word) -> None:
        """From one of its workers, or about it."""
        if not self.alive or self.world.over:
            return
        if self.paused:
            self._asleep.append(lambda: self.hear(word))
            return
        if isinstance(word, WorkerDead):
            word = replace(word, snapshot=self.memory.newest)
        match word:
            case Announce():
                self._detector.watch(word.worker_id, self.clock.now_s)
                self.supervise_worker(word.worker_id, worker_slot.WorkerJoined())
            case RingUp() | Progress() if word.generation:
                self._served(word.worker_id)
            case Failed():
                how = (word.exit_code, word.of_device, word.newcomer)
                raised = worker_slot.Raised(word.place, word.message, *how)
                self.supervise_worker(word.worker_id, raised)
            case Finished():
                self.supervise_worker(word.worker_id, worker_slot.MayLeave())
        self._standing.heard(word)
        if self.stream:
            self.stream.say(word)
        if isinstance(word, Announce) and self.draining:
            self.hear(self._wish(word.worker_id))

    def _served(self, worker_id: str) -> None:
        if any(slot.worker_id == worker_id and not slot.served for slot in self.places):
            self.supervise_worker(worker_id, worker_slot.Served())

    def obey(self, to: tuple[str, ...], order: Order) -> None:
        if order.term < self._term:
            self.world.reach("an order of an older term was refused")
            return
        self._term = order.term
        if isinstance(order, Publish):
            self._standing.published(order.generation)
        for name in to:
            match order:
                case Kill():
                    self.world.killed(self.workers.get(name))
                    self.supervise_worker(name, worker_slot.KillOrdered())
                    continue
                case Release():
                    self.supervise_worker(name, worker_slot.WorkerReleased())
                case Invite():
                    self._standing.invited(name)
                case Home():
                    self._standing.at_home(name, order.home)
                case Close():
                    self.supervise_worker(name, worker_slot.JobOver(complete=order.exit_code == 0))
            if (worker := self.workers.get(name)) is not None:
                worker.order(order)

    # ------------------------------------------------------------------------------------------- streams

    def lost_stream(self, stream: Stream) -> None:
        if self.stream is stream:
            self.stream = None
            self._led_s = self.clock.now_s
            self.reconnect_soon()

    def reconnect_soon(self) -> None:
        self.after(self.world.clock.between(0.05, 0.5), self.connect)

    def connect(self) -> None:
        leader = self.world.leader
        if not self.alive or self.stream is not None or self.world.over:
            return
        away = leader is None or not leader.alive or leader.paused
        if leader is None or away or self.world.is_blocked(self.node, leader.host):
            self.reconnect_soon()
            return
        self.stream = Stream(self, leader)
        self.world.hook("connected")
        self._orphaned = False
        self.stream.say(AgentUp(self.node, self.slots))
        for worker in self._announced() if self.draining else ():
            self._standing.heard(self._wish(worker))
        for word in self._standing.words():
            self.stream.say(word)
