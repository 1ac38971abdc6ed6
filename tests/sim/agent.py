"""A node's agent: it owns processes, forwards words, and says again to every new leader what still holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic.membership import AgentDown, AgentUp, Event
from elastic.messages import (
    Announce,
    Close,
    DrainOver,
    DrainWish,
    Finished,
    Invite,
    Kill,
    Left,
    Order,
    Publish,
    Quiesce,
    Word,
    WorkerDead,
    WorkerFrozen,
)
from elastic.publishing import Reader
from elastic.standing import Standing
from elastic.wire import elastic_pb2 as pb
from tests.sim.clock import Lane

if TYPE_CHECKING:
    from tests.sim.leader import Leader
    from tests.sim.worker import Worker
    from tests.sim.world import World


class Stream:
    """One connection of an agent to one leader; what is under way when it is cut is lost, both ways."""

    def __init__(self, agent: Agent, leader: Leader) -> None:
        self.agent, self.leader = agent, leader
        self.open = True
        self._known = agent.reader.known
        self._up = Lane(agent.world.clock, 0.0002, 0.003)
        self._down = Lane(agent.world.clock, 0.0002, 0.003)
        leader.streams[agent.node] = self

    def say(self, event: Event) -> None:
        if self.open:
            self._up.send(lambda: self.leader.post(event))

    def tell(self, to: tuple[str, ...], order: Order) -> None:
        """On the wire as in earnest: a generation travels as its difference to one that the agent has."""
        if not self.open:
            return
        addressed = self.leader.publisher.addressed(order, to, self._known)
        document = addressed.SerializeToString()
        if addressed.delta:
            self.agent.world.reach("a generation was told as a difference")
        self._down.send(lambda: self.agent.obey(to, self.agent.reader.read(pb.Addressed.FromString(document))))

    def cut(self, because: str) -> None:
        if not self.open:
            return
        self.open = False
        self._up.lose()
        self._down.lose()
        if self.leader.streams.get(self.agent.node) is self:
            del self.leader.streams[self.agent.node]
        self.agent.world.say(self.agent.node, f"stream to leader {self.leader.term} ends: {because}")
        self.leader.post(AgentDown(self.agent.node))
        self.agent.reconnect_soon()


class Agent:
    def __init__(self, world: World, node: str, slots: int) -> None:
        self.world, self.node, self.slots = world, node, slots
        self.alive = True
        self.workers: dict[str, Worker] = {}
        self.draining = False
        self._gone_s = 0.0
        self.stream: Stream | None = None
        self.reader = Reader()
        self._term = 0
        self._incarnation = 0
        self._standing = Standing()
        self._last_words: list[Finished | Left] = []
        """Of workers that may be gone by now: without them an exit looks like a loss."""
        for slot in range(slots + world.spec.spares):
            self.spawn(slot)
        self.connect()

    # ------------------------------------------------------------------------------------------ processes

    def spawn(self, slot: int) -> None:
        occupied = any(worker.slot == slot for worker in self.workers.values())
        if self.alive and not self.draining and not self.world.over and not occupied:
            worker = self.world.new_worker(self, slot, self._incarnation)
            self._incarnation += 1
            self.workers[worker.me] = worker
            worker.start()

    def saw_exit(self, worker: Worker, because: str) -> None:
        if not self.alive:
            return
        self.workers.pop(worker.me, None)
        self.hear(WorkerDead(worker.me, because))
        if because != "exit 0" or worker.p.leaving:
            self.world.clock.after(self.world.clock.between(0.3, 1.0), lambda: self.spawn(worker.slot))

    def saw_frozen(self, worker: Worker) -> None:
        """Silent and using no CPU for as long as the detector waits."""
        if self.alive and worker.alive and worker.paused:
            self.hear(WorkerFrozen(worker.me, "silent and using no CPU"))

    def saw_thawed(self, worker: Worker) -> None:
        self._standing.thawed(worker.me)

    def crash(self) -> None:
        """The whole node: workers die with their agent, and nobody is left to say so."""
        self.alive = False
        for worker in list(self.workers.values()):
            worker.die("its node died")
        if self.stream:
            self.stream.cut("the node died")

    def drain(self, left_s: float) -> None:
        """left_s: until the node may be gone. Of some notices nothing comes, and the node is there again."""
        clock = self.world.clock
        self.draining, self._gone_s = True, clock.now_s + left_s
        for worker in list(self.workers):
            self.hear(self._wish(worker))
        if clock.chance(0.3):
            clock.after(clock.between(0.0, 2 * left_s), self.undrain)

    def undrain(self) -> None:
        if not (self.alive and self.draining):
            return
        self.world.reach("a drain was taken back")
        self.draining = False
        for worker in list(self.workers):
            self.hear(DrainOver(worker))
        for slot in range(self.slots + self.world.spec.spares):
            self.spawn(slot)

    def _wish(self, worker: str) -> DrainWish:
        left_ms = max(0, round(1000 * (self._gone_s - self.world.clock.now_s)))
        return DrainWish(worker, "asked for", left_ms)

    # --------------------------------------------------------------------------------------------- words

    def hear(self, word: Word) -> None:
        """From one of its workers, or about it."""
        if not self.alive or self.world.over:
            return
        self._standing.heard(word)
        if isinstance(word, Finished | Left):
            self._last_words.append(word)
        self._say(word)
        if isinstance(word, Announce) and self.draining:
            self.hear(self._wish(word.worker_id))

    def _say(self, word: Event) -> None:
        if self.stream:
            self.stream.say(word)

    def obey(self, to: tuple[str, ...], order: Order) -> None:
        if not self.alive:
            return
        if order.term < self._term:
            self.world.reach("an order of an older term was refused")
            return
        self._term = order.term
        if isinstance(order, Publish):
            self._standing.published(order.generation)
        if isinstance(order, Invite):
            self._standing.invited(order.worker_id)
        for name in to:
            worker = self.workers.get(name)
            if worker is None:
                continue
            match order:
                case Kill():
                    if worker.newcomer.stuck:
                        self.world.reach("a stuck newcomer was replaced")
                    if worker.stalled:
                        self.world.reach("a stuck member was replaced")
                    if worker.newcomer.hung:
                        self.world.reach("a newcomer whose set-up hung was replaced")
                    worker.die("killed by its agent")
                case Close() if worker.paused and self.world.over:
                    worker.die("the job is over")
                case Publish() | Quiesce() | Close():
                    worker.order(order)
                case _:
                    if order.worker_id == name:
                        worker.order(order)

    # ------------------------------------------------------------------------------------------- streams

    def reconnect_soon(self) -> None:
        self.stream = None
        self.world.clock.after(self.world.clock.between(0.05, 0.5), self.connect)

    def connect(self) -> None:
        leader = self.world.leader
        if not self.alive or self.stream is not None or self.world.over:
            return
        if leader is None or not leader.alive or leader.paused:
            self.reconnect_soon()
            return
        self.stream = Stream(self, leader)
        self._say(AgentUp(self.node, self.slots))
        for worker in self.workers if self.draining else ():
            self._standing.heard(self._wish(worker))
        for word in (*self._last_words, *self._standing.words()):
            self._say(word)
