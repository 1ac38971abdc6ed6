"""Rare paths: what a search has to have been through, told from what it sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic.protocol.membership import Group, State
from elastic.protocol.membership.newcomers import OUTDATED
from elastic.protocol.messages import ANEW, Generation, Kind
from elastic.protocol.worker_state import Phase, WorkerState
from tests.sim.worker import Worker

if TYPE_CHECKING:
    from tests.sim.leader import Leader
    from tests.sim.world import World

MOMENT_S = 0.02


class Paths:
    def __init__(self, world: World) -> None:
        self.world = world
        self._leaver_died_s = self._leader_died_s = -1.0

    def committed(self, record: Generation) -> None:
        reach, world = self.world.reach, self.world
        reach(f"committed {record.kind}")
        if record.kind is not Kind.FORM and record.plan.paces:
            reach(f"shards by speed in a {record.kind} generation")
        before = world.records.all.get(record.number - 1, record)
        if record.kind is Kind.FORM and record.began:
            self._went_on(record, before)
        if world.size and len(record.ids) == world.size != world.spec.workers:
            reach(f"a job was made {'larger' if world.size > world.spec.workers else 'smaller'}")
        if record.kind is not Kind.LOSS:
            return
        if before.kind is Kind.FORM and before.began:
            reach("a member of a revived job died at once")
        if before.kind is Kind.PLANNED:
            reach("a planned change was voided by a loss")
        if before.kind is Kind.LOSS:
            reach("a loss right after a loss")
        if before.kind is not Kind.PLANNED:
            dead = [worker for worker in before.ids if not world.workers[worker].alive]
            stepped = any(world.workers[worker].p.reduced > before.plan.op for worker in before.ids)
            if len(dead) > 1 and not stepped:
                reach("a double loss during SYNC")
        if record.hold:
            reach("a generation below quorum")
        if record.plan.units:
            reach("redo rule: the operation is redone")
        if any(lag.source == "" for lag in record.plan.laggards):
            reach("plan: a laggard without a source")
        behind = {lag.worker_id for lag in record.plan.laggards}
        ahead = [world.workers[worker] for worker in record.ids if worker not in behind]
        if behind and all(worker.newcomer.holds == record.plan.op for worker in ahead):
            reach("a newcomer is the only one past k")
        if all(world.workers[worker].p.phase is Phase.FRESH for worker in record.ids):
            reach("newcomers are the only holders")
        if world.network.is_parted:
            inside = {world.network.side(world.workers[worker].agent.node) for worker in record.ids}
            left = [world.workers[worker] for worker in before.ids if worker not in record.ids]
            outside = {world.network.side(worker.agent.node) for worker in left if worker.alive}
            if len(inside) == 1 and outside and not inside & outside:
                reach("two halves that see no common member")

    def _went_on(self, record: Generation, before: Generation) -> None:
        """Every copy of the state was lost."""
        reach, workers = self.world.reach, self.world.workers
        if record.began.startswith(ANEW):
            reach(f"a job began again {'twice' if before.began else 'before its first step'}")
            return
        newest = {workers[worker].agent.memory.newest for worker in record.ids}
        reach(f"a job went on from a {'snapshot' if record.began in newest else 'checkpoint'}")
        if before.began:
            reach("a job went on twice")
        others = [agent for agent in self.world.agents if agent.alive and agent.memory.newest not in ("", record.began)]
        if others:
            reach("a job went on where another node kept something older")
        if record.hold:
            reach("a job went on below quorum")

    def told(self, group: Group) -> None:
        """Of a change of state."""
        if group.because.endswith("holds the state after all"):
            self.world.reach("a member held the state after all")
        if group.state is State.CLOSED and "is kept on the nodes" in group.because:
            self.world.reach("a job to be revived had nothing to go on from")

    def saw(self, worker: Worker, before: WorkerState) -> None:
        after, reach = worker.p, self.world.reach
        record = after.record
        if after.entered == before.entered or record is None:
            return
        if record.kind is not Kind.PLANNED:
            self.world.hook("entered_loss", worker)
            return
        self.world.hook("entered_planned", worker)
        if before.record and before.record.ids == record.ids and before.record.plan.paces != record.plan.paces:
            reach("shards followed speed")
        if record.early:
            reach("a drained member did not wait for a newcomer")
            copying = [w for w in self.world.workers.values() if w.alive and w.p.phase is Phase.FRESH]
            if any(w.newcomer.asks for w in copying):
                reach("an early generation takes effect while a newcomer copies")

    def died(self, worker: Worker) -> None:
        world = self.world
        if worker.copies.serving:
            world.reach("a donor lost in mid-copy")
        others = [other for other in world.workers.values() if other.alive and other.p.laggard == worker.me]
        if others:
            world.reach("an ahead-by-one survivor dies before its result is copied")
        if worker.p.leaving:
            self._leaver_died_s = world.clock.now_s
            self._in_one_moment()

    def lost_leader(self, group: Group) -> None:
        if group.state is State.QUIESCING:
            self.world.reach("a leader change inside QUIESCING")
        if group.state is State.FORMING and group.lost:
            self.world.reach("a leader change while every copy of the state is lost")
        self._leader_died_s = self.world.clock.now_s
        self._in_one_moment()

    def _in_one_moment(self) -> None:
        both = self._leaver_died_s, self._leader_died_s
        if min(both) >= 0 and abs(both[0] - both[1]) <= MOMENT_S:
            self.world.reach("drainer and leader die in one moment")

    def read(self, worker: Worker, carried: tuple[tuple[int, ...], ...]) -> None:
        """The headers of an operation."""
        highest = max((number for numbers in carried for number in numbers), default=0)
        if len(worker.p.pending) > 1 and highest and not all(highest in numbers for numbers in carried):
            self.world.reach("two pending generations, and the highest is not in all headers")

    def killed(self, worker: Worker) -> None:
        """By order of the leader."""
        reach = self.world.reach
        if worker.newcomer.stuck:
            reach("a stuck newcomer was replaced")
        if worker.stalled:
            reach("a stuck member was expelled and replaced")
        if self.world.leader is not None and worker.me in self.world.leader.group.hung:
            reach(f"nobody {'answered' if worker.paused else 'got on'}, and all were ended")
        if worker.newcomer.hung:
            reach("a newcomer whose set-up hung was replaced")
        if worker.agent.uncarried and not worker.p.entered:
            reach("a newcomer that could not be connected was replaced")

    def joined(self, worker: Worker, leader: Leader | None, waited_s: float, outdated: int) -> None:
        reach = self.world.reach
        reach("a newcomer joined")
        if waited_s > 1.0:
            reach("a spare joined")
        if leader and leader.group.awaited.slot == worker.me.rpartition(".")[0]:
            its_copy = outdated >= OUTDATED or worker.script.program.hold
            reach(f"a newcomer joined a ring that waited for {'its copy' if its_copy else 'it'}")
            if worker.script.program.hold and not worker.newcomer.follows:
                reach("a newcomer joined the first step that it copied")
