"""One term of a replica as leader: the group, its mailbox, the agents that attend, and the thread of the store.

A leader relies on its lease by its own clock only. Its effects on others are fenced too: a record and the end of the
job are transactions of its term, and orders carry the term, so that agents refuse the orders of an earlier leader.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, TypeVar

from elastic.checkpoints.naming import PERIODIC
from elastic.checkpoints.pointer import Pointer
from elastic.config import JobSpec
from elastic.errors import CheckpointCorrupt, CompareFailed, StoreError, StoreUnavailable
from elastic.protocol import membership
from elastic.protocol.failure_detector import AgentMonitor
from elastic.protocol.messages import Generation, Order, Pointed, Progress
from elastic.protocol.worker_id import node_of
from elastic.records.journal import Journal
from elastic.rendezvous.served_stream import ServedStream
from elastic.store.election import LeadershipLost
from elastic.store.lease import RETRY_S, LeaseKeeper
from elastic.wire import elastic_pb2 as pb
from elastic.wire.broadcast import Publisher

TICK_S = 0.05
"""Least seconds between two ticks, so that a deadline which cannot be acted on yet does not spin."""

END_HEARD_S = 5.0
"""Seconds for which the leader of an ended job waits until its agents have heard of the end."""

LOOK_S = 20e-6
"""Seconds for each worker between two looks at the group's deadlines, because each look is one at all silent agents:
while thousands of them find a new leader one by one, it would do little else. A tick is late by no more than that.
Words of progress, which are most of what agents say, wait as long, because each reading of the mailbox has a price."""

LOOK_SHARE = 20
"""Between two looks the leader does other work for at least this many times as long as the earlier look took."""

LEAST_WAIT_S = 1e-3
"""Shorter waits are left out: the event loop's timers are no finer."""

TOLD_AT_ONCE = 64
"""So many agents are told before other tasks go on: the first list of 10,000 members is a gigabyte for all of them, and
a loop that writes it at once stands still for longer than a leader may."""

MAILBOX_LIMIT = 65_536

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class AgentSession(ServedStream[pb.LeaderOrder]):
    """One agent's stream. known: number -> digest of the agent's generations. token: the agent's proof of admission."""

    refused_event: ClassVar[str] = "agent_refused"
    broke_event: ClassVar[str] = "agent_stream_broke"
    node: str
    known: dict[int, str] = field(default_factory=dict)
    token: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class JobOrigin:
    """From what a job goes on. checkpoint: from which this run of it begins, or "". revives: if every copy of the state
    is lost, the job goes on from what its nodes have kept."""

    checkpoint: str = ""
    revives: bool = False


class JobLeader:
    """One term of this replica as leader: the group, its mailbox, and the agents that attend."""

    def __init__(
        self, spec: JobSpec, tenure: LeaseKeeper, journal: Journal, store: StoreThread, origin: JobOrigin = JobOrigin()
    ) -> None:
        self.term = tenure.term
        seed = secrets.token_hex(16)
        self.group = membership.Group(spec, seed, revives=origin.revives, resumed=origin.checkpoint)
        self._tenure = tenure
        self._candidate = tenure.candidate
        self._journal = journal
        self._store = store
        self._mailbox: asyncio.Queue[membership.Event] = asyncio.Queue(MAILBOX_LIMIT)
        self._agents: dict[str, AgentSession] = {}
        self._publisher = Publisher()
        self._monitor = AgentMonitor(spec.timing, self.group.agents, time.monotonic())
        self._tasks: set[asyncio.Task[None]] = set()
        self._deposed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Kept apart from the mailbox, which may be full, and whose content does not matter any more."""
        self._last_tick_s = -math.inf
        self._due_s = math.inf
        """When the group wants its next tick, as of the last look."""
        self._look_s = -math.inf
        """When to look again, at the earliest."""
        self._read_s = math.inf
        """When the mailbox is to be read; inf: it is empty."""
        self._asleep: asyncio.Future[None] | None = None

    # ------------------------------------------------------------------------------------------- the owner

    async def lead(self, chain: tuple[Generation, ...]) -> membership.End | str:
        """Step the group until the job is over, or this replica must not lead any more, and why."""
        self._start(self._watch_tenure())
        self._start(self._watch_agents())
        self._start(self._find_pointer())
        self._publisher.remember(chain)
        try:
            events: list[membership.Event] = [membership.Elected(self.term, chain)]
            while True:
                actions = membership.advance(self.group, events, time.monotonic())
                if (deposed := self._is_deposed()) is not None:
                    return deposed
                end = next((action for action in actions if isinstance(action, membership.End)), None)
                if end is not None and (deposed := await self._finish(end)) is not None:
                    return deposed
                for action in actions:
                    if not isinstance(action, membership.End):
                        await self._perform(action)
                if end is not None:
                    return end
                events = await self._next()
                if (deposed := self._is_deposed()) is not None:
                    return deposed
        finally:
            for task in (tasks := [*self._tasks]):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _is_deposed(self) -> str | None:
        if because := self._tenure.over:
            self._depose(because)
        return self._deposed.result() if self._deposed.done() else None

    def _depose(self, because: str) -> None:
        """End this term. The first reason counts."""
        if not self._deposed.done():
            self._deposed.set_result(because)
            self._rouse()

    async def _watch_tenure(self) -> None:
        self._depose(await self._tenure.end())

    async def _next(self) -> list[membership.Event]:
        """The next events, or a tick if a deadline is over or this replica is deposed."""
        await asyncio.sleep(0)  # the tasks that hear words and write orders have their turn
        changed = True
        while True:
            now_s = time.monotonic()
            # Due ticks come first: a mailbox that never empties must not hold up a deadline.
            if now_s >= self._due_s or self._deposed.done():
                self._last_tick_s, self._due_s, self._look_s = now_s, math.inf, -math.inf
                return [membership.GroupTick()]
            if changed and now_s >= self._look_s:
                self._due_s = max(membership.deadline_s(self.group), self._last_tick_s + TICK_S)
                took_s = time.monotonic() - now_s
                self._look_s = now_s + max(LOOK_S * len(self.group.workers), LOOK_SHARE * took_s)
                changed = False
            elif now_s >= self._read_s:
                break
            else:
                await self._sleep(min(self._due_s, self._read_s, self._look_s if changed else math.inf))
        events: list[membership.Event] = []
        while len(events) < events_at_once(len(self.group.workers)) and not self._mailbox.empty():
            events.append(self._mailbox.get_nowait())
        if self._mailbox.empty():
            self._read_s = math.inf
        return events

    async def _sleep(self, until_s: float) -> None:
        """Sleep until then, or until `_rouse`."""
        loop = asyncio.get_running_loop()
        self._asleep = loop.create_future()
        timer = None if math.isinf(until_s) else loop.call_at(until_s, self._rouse)
        try:
            await self._asleep
        finally:
            self._asleep = None
            if timer is not None:
                timer.cancel()

    def _rouse(self) -> None:
        if self._asleep is not None and not self._asleep.done():
            self._asleep.set_result(None)

    async def _perform(self, action: membership.Commit | membership.Point | membership.Tell | membership.Note) -> None:
        match action:
            case membership.Note(event, fields):
                known: dict[str, Any] = fields
                self._journal.write(event, **known)
            case membership.Tell(to, order):
                await self._tell(to, order)
            case membership.Commit(generation):
                self._start(self._commit(generation))
            case membership.Point(series, pointer):
                self._start(self._point(series, pointer))

    async def _tell(self, to: tuple[str, ...], order: Order) -> None:
        by_node: dict[str, list[str]] = {}
        for worker_id in to:
            by_node.setdefault(node_of(worker_id), []).append(worker_id)
        for count, (node, workers) in enumerate(by_node.items(), 1):
            if count % TOLD_AT_ONCE == 0:
                await asyncio.sleep(0)
            if (session := self._agents.get(node)) is not None:
                addressed = self._publisher.addressed(order, workers, session.known)
                session.post(pb.LeaderOrder(addressed=addressed))

    async def post(self, event: membership.Event) -> None:
        """Put an event into the mailbox; waits while it is full."""
        await self._mailbox.put(event)
        self._arrived(event)

    def _arrived(self, event: membership.Event) -> None:
        """Have the mailbox read: at once, but for progress only so late that many words of it are read together."""
        wait_s = LOOK_S * len(self.group.workers) if isinstance(event, Progress) else 0.0
        read_s = time.monotonic() + (wait_s if wait_s > LEAST_WAIT_S else 0.0)
        if read_s < self._read_s:
            self._read_s = read_s
            self._rouse()

    # --------------------------------------------------------------------------------------------- the store

    async def _commit(self, generation: Generation) -> None:
        """Commit a record, until it is known whether it is durable. Nothing is announced before."""
        while True:
            try:
                await self._store.call(self._candidate.commit, generation)
            except StoreUnavailable as error:
                self._journal.write("commit_unanswered", generation.number, because=str(error))
                await asyncio.sleep(RETRY_S)
            except CompareFailed as error:
                await self.post(membership.CommitRefused(generation.number, str(error)))
                return self._depose(str(error))
            except (LeadershipLost, StoreError) as error:
                return self._depose(str(error))
            else:
                return await self.post(membership.Committed(generation.number))

    async def _find_pointer(self) -> None:
        """Ask the store for the newest automatic checkpoint until it answers: a leader that does not know it may have
        to give the job up for lost. A store that has none is told of the one from which this run goes on."""
        while True:
            try:
                known = await self._store.call(self._candidate.pointer, PERIODIC)
                break
            except StoreUnavailable:
                await asyncio.sleep(RETRY_S)
            except (StoreError, CheckpointCorrupt) as error:
                self._journal.write("pointer_unknown", because=str(error))
                return
        if known is not None:
            await self.post(membership.PointerAt(known.entry))
        elif self.group.resumed:
            await self._point(PERIODIC, Pointer(self.group.resumed, "", 0))

    async def _point(self, series: str, pointer: Pointer) -> None:
        """Try once to move the pointer: the next checkpoint moves it all the same, and nothing is removed meanwhile."""
        try:
            now = await self._store.call(self._candidate.point, series, pointer)
        except (StoreUnavailable, CompareFailed, CheckpointCorrupt) as error:
            self._journal.write("pointer_not_moved", series=series, entry=pointer.entry, because=str(error))
            return
        except (LeadershipLost, StoreError) as error:
            return self._depose(str(error))
        holds = now == pointer
        if series == PERIODIC:
            await self.post(membership.PointerAt(now.entry))
        self._journal.write("pointer_moved" if holds else "pointer_stays", series=series, entry=now.entry)
        if pointer.holder:
            await self._tell((pointer.holder,), Pointed(self.term, pointer.holder, series, pointer.entry, holds))

    async def _finish(self, end: membership.End) -> str | None:
        """Make the end of the job durable before any agent hears of it. Returns why not, if another leader decides."""
        while True:
            try:
                await self._store.call(self._candidate.finish, self.result(end))
            except StoreUnavailable as error:
                if because := self._tenure.over:
                    return f"{because}; the end of the job is not stored: {error}"
                await asyncio.sleep(RETRY_S)
            except (LeadershipLost, StoreError) as error:
                return str(error)
            else:
                return None

    def result(self, end: membership.End) -> dict[str, object]:
        """The document that says how the job ended."""
        return {**asdict(end), "generation": self.generation}

    @property
    def generation(self) -> int:
        """The number of the newest generation known to be in effect, or 0."""
        running = self.group.running
        return running.number if running else 0

    def _start(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._depose(f"{type(error).__name__}: {error}")

    # ---------------------------------------------------------------------------------------------- agents

    def attach(self, node: str, known: dict[int, str] | None = None, token: str = "") -> AgentSession:
        """Begin a new stream of that node's agent, which has given up an older one. known, token: as in
        AgentSession."""
        if node in self._agents:
            self._agents[node].ended.set()
        session = self._agents[node] = AgentSession(node, known or {}, token)
        self._monitor.watch(node, time.monotonic())
        session.post(self._welcome())
        return session

    def is_older(self, node: str, known: dict[int, str]) -> str:
        """A sentence if that agent has had generations that are not in the store, else "". known: as in AgentSession.
        What those generations decided cannot be found out, so nothing may be decided after them."""
        chain = {record.number: record for record in self.group.chain}
        top = max(chain, default=0)
        strange = [n for n, digest in known.items() if n > top or (n in chain and chain[n].digest() != digest)]
        if not strange:
            return ""
        return (
            f"etcd holds an older state than this job: node {node} has had another generation {max(strange)}, and the "
            f"newest in etcd is {top}. It was restored from a backup, and what was decided since is lost, so the job "
            f"ends here; submitted again with --resume {self.group.spec.name} it goes on from its newest checkpoint"
        )

    def surpass(self, term: int) -> None:
        """An agent has seen this term, which is later than the leader's own."""
        self._start(self._surpass(term))

    async def _surpass(self, term: int) -> None:
        try:
            because = await self._store.call(self._candidate.surpass, term)
        except (StoreError, LeadershipLost):
            return  # the agent that has seen it comes again
        if because:
            self._depose(because)

    def _welcome(self) -> pb.LeaderOrder:
        beat_ms = round(1000 * self._monitor.beat_s)
        return pb.LeaderOrder(welcome=pb.Welcome(term=self.term, beat_ms=beat_ms, infers_rings=True))

    @property
    def nodes(self) -> list[str]:
        """The nodes whose agents attend."""
        return sorted(self._agents)

    def drain(self, node: str, wish: pb.DrainNode, *, caller: str, peer: str) -> None:
        """Tell a node's agent, if it attends, that the node shall be empty, or no longer. caller, peer: for the
        journal."""
        if node in self._agents:
            self._journal.write(
                "drain_asked", node=node, over=wish.over, because=wish.because, caller=caller, peer=peer
            )
            self._agents[node].post(pb.LeaderOrder(drain_node=wish))

    def signal_worker(self, asked: pb.WorkerSignal, *, caller: str, peer: str) -> list[str]:
        """Pass on to a worker's agent what an operator asks of the worker, if it lives and its agent attends. Returns
        the workers that live, as far as this leader knows. caller, peer: for the journal."""
        alive = list(self.group.alive(self.group.workers))
        node = self.group.workers[asked.worker_id].member.node if asked.worker_id in alive else ""
        if node in self._agents:
            kind = pb.WorkerSignal.Kind.Name(asked.kind).lower()
            self._journal.write("worker_signal_asked", worker_id=asked.worker_id, kind=kind, caller=caller, peer=peer)
            self._agents[node].post(pb.LeaderOrder(worker_signal=asked))
        return alive

    def keep(self, stands: Callable[[str, str], bool]) -> None:
        """End the streams of agents that may not attend any more. stands: (node, token) -> whether it may."""
        for session in self._agents.values():
            if not session.ended.is_set() and not stands(session.node, session.token):
                because = "its node has no place in this job any more"
                self._journal.write("agent_dismissed", node=session.node, because=because)
                session.ended.set()

    def is_current(self, session: AgentSession) -> bool:
        return self._agents.get(session.node) is session

    def detach(self, session: AgentSession) -> None:
        """End a session whose stream is over. If no side has ended it in order, the agent's kernel has closed it."""
        closed = not session.ended.is_set()
        session.ended.set()
        if self.is_current(session):
            del self._agents[session.node]
            self._monitor.forget(session.node)
            down = membership.AgentDown(session.node, ended=closed)
            try:
                self._mailbox.put_nowait(down)  # before the words of the agent's next stream
            except asyncio.QueueFull:
                self._start(self.post(down))
            else:
                self._arrived(down)

    def beat(self, session: AgentSession) -> None:
        self._monitor.beat(session.node, time.monotonic())

    async def _watch_agents(self) -> None:
        """Post AgentDown once for an agent whose stream is silent, and AgentUp when it speaks again."""
        while True:
            await asyncio.sleep(self._monitor.look_s)
            if self._monitor.follow(self.group.agents, time.monotonic()):
                self._journal.write("beat_changed", beat_s=self._monitor.beat_s)
                for session in self._agents.values():
                    session.post(self._welcome())
            silent, back = self._monitor.look(time.monotonic())
            for node, because in silent.items():
                self._journal.write("agent_silent", node=node, because=because)
                await self.post(membership.AgentDown(node, self._monitor.silence_s))
            for node in back:
                await self.post(membership.AgentUp(node))

    def dismiss(self) -> None:
        """End all streams; the agents look for the next leader."""
        for session in self._agents.values():
            session.ended.set()

    async def announce_end(self, end: membership.End) -> None:
        """Give every agent its last order, and wait until it has left, at most for END_HEARD_S."""
        last = pb.End(term=self.term, exit_code=end.exit_code, because=end.because, digest=end.digest)
        sessions = list(self._agents.values())
        for session in sessions:
            session.post(pb.LeaderOrder(end=last))
        waiting = [asyncio.create_task(session.ended.wait()) for session in sessions]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=END_HEARD_S)
            for task in late:
                task.cancel()
        self.dismiss()


class StoreThread:
    """The only thread that speaks to the store."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "store")

    async def call(self, function: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def close(self) -> None:
        self._thread.shutdown()


def events_at_once(workers: int) -> int:
    """How many events of a full mailbox are taken between two looks at the deadlines. Those look at all silent agents,
    which would be most of the work if it were more often while agents find a new leader."""
    return max(256, workers // 8)
