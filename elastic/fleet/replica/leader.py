"""A replica while it leads a fleet: it hands out slots, and tells the nodes what to run.

A new leader has nothing but the documents: it reads them when it is elected, and nodes announce themselves to it. A
node that is away for a moment keeps its jobs; its absence is timed on this process's clock, from the election at the
earliest. All writes are fenced by the term, so a leader that was replaced without noticing writes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeVar

from elastic.errors import CheckpointCorrupt, CompareFailed, ConfigError, ExitCode, StoreError, StoreUnavailable
from elastic.fleet import documents, registry
from elastic.fleet.documents import FleetJob, FleetState, Grant, Placement, Result
from elastic.fleet.queue.scheduler import OfferedNode, Schedule, schedule
from elastic.fleet.registry import Registry
from elastic.records.journal import Journal
from elastic.rendezvous.leader import StoreThread
from elastic.rendezvous.served_stream import ServedStream
from elastic.store.base import Store
from elastic.store.election import LeadershipLost
from elastic.store.lease import RETRY_S, LeaseKeeper
from elastic.wire import codec
from elastic.wire import elastic_pb2 as pb

ABSENT_S = 30.0
"""Seconds after which a node that does not attend is no part of the fleet, and its slots are looked for elsewhere."""

AWAY_S = 120.0
"""Least seconds for which a job's agent may go on where the job has no share any more, unless the node's daemon says
that the agent has left."""

LEAVE_LIMIT_S = 3600.0
"""Most seconds that a daemon may ask for, for an agent that leaves."""

ABSENT_NODES_CHECK_S = 1.0
"""Seconds between two looks at absent nodes, if nothing else happens."""

ANSWER_S = 5.0
"""Most seconds that a node may take to read a piece of a log, or to look around."""


T = TypeVar("T")


@dataclass(eq=False, slots=True)
class NodeSession(ServedStream[pb.NodeOrder]):
    """One daemon's stream. troubles: job -> why its agent there does not run as it should. holds: the jobs whose agents
    have not left the node; None: the daemon has not said so yet."""

    refused_event: ClassVar[str] = "node_refused"
    broke_event: ClassVar[str] = "node_stream_broke"
    hello: pb.NodeHello
    leaves: str = ""
    notice: str = ""
    troubles: dict[str, str] = field(default_factory=dict)
    holds: frozenset[str] | None = None
    told: pb.Duties | None = None
    queries: dict[int, asyncio.Future[pb.LogPiece | pb.Examined]] = field(default_factory=dict)
    asked: int = 0

    async def ask(
        self, order: pb.NodeOrder, query: pb.LogQuery | pb.ExamineNode, within_s: float = ANSWER_S
    ) -> pb.LogPiece | pb.Examined | None:
        """Send a query to the node. query: a part of the order; gets the number that its answer repeats. Returns None
        if no answer comes in time."""
        self.asked += 1
        query.number = self.asked
        answer = self.queries[query.number] = asyncio.get_running_loop().create_future()
        try:
            self.post(order)
            await asyncio.wait([answer], timeout=within_s)
        finally:  # also if the caller was cancelled
            self.queries.pop(query.number, None)
        return answer.result() if answer.done() and not answer.cancelled() else None

    def answered(self, answer: pb.LogPiece | pb.Examined) -> None:
        query = self.queries.pop(answer.number, None)
        if query is not None and not query.done():
            query.set_result(answer)


class FleetLeader:
    """One term of a fleet's leader, on the event loop. store: the thread that speaks to the store for it."""

    def __init__(self, tenure: LeaseKeeper, etcd: Store, store: StoreThread, journal: Journal) -> None:
        self.term = tenure.term
        self.state = FleetState()
        self.sessions: dict[str, NodeSession] = {}
        self.planned = Schedule({}, {}, {})
        """What is carried out."""
        self.ready = asyncio.Event()
        """Set when the documents have been read: before, no node may be told what to run."""
        self._tenure = tenure
        self._registry = Registry(etcd, tenure.candidate)
        self._etcd = etcd
        self._store = store
        self._journal = journal
        self._revision = 0
        self._seen = asyncio.Event()
        self._seen_term = 0
        self._unforgotten = ""
        """Why ended jobs could not be forgotten, as it is in the journal, or ""."""
        self.stranded: dict[str, str] = {}
        """Preempted job -> why it cannot wait again."""
        self._changed = asyncio.Event()
        self._left: dict[str, tuple[float, NodeSession]] = {}
        """Node -> when its last stream ended, and that stream."""
        self._withdrawn_s: dict[tuple[str, str], float] = {}
        """(job, node) -> when the job lost its share there, while its agent may still attend."""
        self._began_s = time.monotonic()

    async def lead(self) -> str:
        """Lead until this replica must not lead any more. Returns why."""
        tasks = [asyncio.create_task(duty) for duty in (self._watch_tenure(), self._work(), self._surpass())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            for session in self.sessions.values():
                session.ended.set()
        reasons = [error for error in results if isinstance(error, Exception)]
        for error in reasons:
            if not isinstance(error, StoreError | LeadershipLost | codec.WireError):
                raise error
        return "; ".join(str(error) for error in reasons)

    def read(self, state: FleetState, revision: int) -> None:
        """Take the documents of that revision; older ones are ignored."""
        if revision > self._revision and self.ready.is_set():
            self.state, self._revision = state, revision
            self._changed.set()

    # ------------------------------------------------------------------------------------------------ nodes

    def attach(self, hello: pb.NodeHello) -> NodeSession:
        """Begin a new stream of that node's daemon; an older stream is ended. Raises WireError if a daemon on another
        machine or directory attends under that name."""
        if hello.term > self.term:
            self._seen_term = max(self._seen_term, hello.term)
            self._seen.set()
            raise codec.WireError(f"term {self.term} is older than one that node {hello.node} has seen")
        known = self.sessions.get(hello.node)
        if known is not None and known.hello.lock != hello.lock:
            raise codec.WireError(
                f"a node {hello.node} attends from {known.hello.address} already; give this one another --node"
            )
        if known is not None:
            known.ended.set()
        session = self.sessions[hello.node] = NodeSession(hello)
        session.post(pb.NodeOrder(welcome=pb.Welcome(term=self.term)))
        self._journal.write("node_up", node=hello.node, slots=hello.slots, address=hello.address)
        self._changed.set()
        return session

    def detach(self, session: NodeSession) -> None:
        for query in session.queries.values():
            query.cancel()
        if self.sessions.get(session.hello.node) is session:
            del self.sessions[session.hello.node]
            self._left[session.hello.node] = time.monotonic(), session
            self._journal.write("node_down", node=session.hello.node)
            self._changed.set()

    def heard(self, session: NodeSession, word: pb.NodeWord) -> None:
        """Handle a daemon's message. Raises WireError for a message that is not allowed here."""
        match word.WhichOneof("content"):
            case "troubles":
                session.troubles = {trouble.job: trouble.because for trouble in word.troubles.troubles}
                if session.holds != (holds := frozenset(word.troubles.holds)):
                    session.holds = holds
                    self._changed.set()
            case "piece":
                session.answered(word.piece)
            case "examined":
                session.answered(word.examined)
            case "leaves":
                if word.leaves.notice:
                    session.notice = word.leaves.because
                else:
                    session.leaves = word.leaves.because
                self._changed.set()
            case _:
                raise codec.WireError("a daemon says hello once and nothing empty")

    async def read_log(self, node: str, query: pb.LogQuery) -> pb.LogPiece | None:
        """A piece of a node's log, or None if the node does not answer."""
        if (session := self.sessions.get(node)) is None:
            return None
        order = pb.NodeOrder(log=query)
        answer = await session.ask(order, order.log)
        return answer if isinstance(answer, pb.LogPiece) else None

    async def examine(self, node: str) -> str | None:
        """The facts that a node's daemon finds, as JSON, or None if it does not answer."""
        if (session := self.sessions.get(node)) is None:
            return None
        order = pb.NodeOrder(examine=pb.ExamineNode())
        answer = await session.ask(order, order.examine)
        return answer.document if isinstance(answer, pb.Examined) else None

    # ----------------------------------------------------------------------------------------------- writing

    async def change(self, write: Callable[[Registry], T]) -> T:
        """Write an operator's change, and read the documents again. Raises StoreError, LeadershipLost and ConfigError,
        each only if the writing fails; a failed reading is made up for later."""
        done = await self._store.call(write, self._registry)
        try:
            await self._reread()
        except StoreError as error:
            self._journal.write("fleet_store_unanswered", because=str(error))
        self._changed.set()
        return done

    async def _work(self) -> None:
        await self._patiently(self._reread)
        self.ready.set()
        while True:
            self._changed.clear()
            if await self._patiently(self._hand_out):
                await self._patiently(self._reread)
            for node, session in self.sessions.items():
                self._tell(node, session)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(
                    ABSENT_NODES_CHECK_S
                ):  # wait_for of Python 3.11 loses a cancel that comes with the event
                    await self._changed.wait()

    async def _surpass(self) -> None:
        """Wait for a node that has seen a later term. Raises LeadershipLost if etcd is behind that term."""
        while True:
            await self._seen.wait()
            self._seen.clear()
            ask = partial(self._store.call, self._tenure.candidate.surpass, self._seen_term)
            if because := await self._patiently(ask):
                raise LeadershipLost(because)

    async def _patiently(self, act: Callable[[], Any]) -> Any:
        """Repeat the action until the store answers; `_watch_tenure` ends this when the lease is over."""
        while True:
            try:
                return await act()
            except (StoreUnavailable, CompareFailed) as error:
                self._journal.write("fleet_store_unanswered", because=str(error))
                await asyncio.sleep(RETRY_S)

    async def _reread(self) -> None:
        state, revision = await self._store.call(registry.read, self._etcd)
        if revision >= self._revision:
            self.state, self._revision = state, revision

    async def _hand_out(self) -> bool:
        """Write the places and grants that have changed. Returns whether anything was written."""
        plan = self.planned = self.plan()
        written = False
        for job in self.state.jobs:
            placement = plan.placements.get(job.name)
            granted = self._granted(job, placement)
            if placement is not None and placement != job.placement:
                await self._place(job, placement, granted)
                written = True
            elif granted != job.grants:
                await self._store.call(self._registry.grant, job.name, granted)
                written = True
            elif job.name in plan.preempted and job.stop is None:
                because = f"preempted for {plan.preempted[job.name]}"
                await self._store.call(partial(self._registry.stop, job.name, because, preempts=True))
                self._journal.write("preempted", job=job.name, because=because)
                written = True
            elif job.waits_again and self.state.after(job.name) is None:
                if not registry.unread_alike(self.state, job.name):  # it may have been written already
                    written = await self._wait_again(job) or written
            elif job.waits and job.stop is not None:
                stopped = Result(int(ExitCode.TERMINATED), f"stopped before it began: {job.stop.because}")
                await self._store.call(self._registry.end, job.name, stopped)
                written = True
        return await self._forget() or written

    async def _wait_again(self, job: FleetJob) -> bool:
        """Write the job as which a preempted one goes on. Returns whether it is written. What is wrong with this job,
        or with the count of all, is no reason to lead nobody: the next look tries again."""
        try:
            name = await self._store.call(self._registry.resubmit, job)
        except (ConfigError, CheckpointCorrupt) as error:
            if self.stranded.get(job.name) != str(error):
                self._journal.write("not_waiting_again", job=job.name, because=str(error))
            self.stranded[job.name] = str(error)
            return False
        self.stranded.pop(job.name, None)
        self._journal.write("waits_again", job=job.name, goes_on_as=name)
        return True

    async def _forget(self) -> bool:
        """Forget old ended jobs. Returns whether there were any. If the store refuses, the next look tries again: nodes
        and jobs do not wait for that."""
        if not self.state.forgettable(registry.ENDED_KEPT):
            return False
        try:
            await self._store.call(self._registry.forget, self.state)
        except StoreError as error:
            if str(error) != self._unforgotten:
                self._journal.write("ended_jobs_not_forgotten", because=str(error))
            self._unforgotten = str(error)
            return False
        self._unforgotten = ""
        return True

    def _granted(self, job: FleetJob, placement: Placement | None) -> tuple[Grant, ...]:
        placed = placement.slots if placement is not None else {}
        left = {grant.node for grant in job.grants if grant.node not in placed and self._has_left(job.name, grant.node)}
        for node in placed:
            self._withdrawn_s.pop((job.name, node), None)
        return documents.granted(job, placement, left, lambda: secrets.token_hex(32))

    def _has_left(self, job: str, node: str) -> bool:
        """Whether a job's agent has left a node where the job has no share, or has had time for that."""
        now_s, session = time.monotonic(), self.sessions.get(node)
        since_s = self._withdrawn_s.setdefault((job, node), now_s)
        leave_s = min(session.hello.leave_ms / 1000, LEAVE_LIMIT_S) if session is not None else 0.0
        said = session is not None and session.holds is not None and job not in session.holds
        if gone := said or now_s >= since_s + max(leave_s, AWAY_S):
            del self._withdrawn_s[job, node]
        return gone

    async def _place(self, job: FleetJob, placement: Placement, granted: tuple[Grant, ...]) -> None:
        await self._store.call(self._registry.place, job.name, placement, granted)
        self._journal.write("placed", job=job.name, began=job.waits, slots=placement.slots)

    def plan(self) -> Schedule:
        """The schedule as of now. While nodes may still be looking for this leader, no job counts as larger than the
        fleet."""
        now_s = time.monotonic()
        nodes = [self._node(name, session) for name, session in sorted(self.sessions.items())]
        for name, (since_s, session) in sorted(self._left.items()):
            if name not in self.sessions and now_s < since_s + ABSENT_S:
                node = self._node(name, session, away=True)
                nodes += [node] if node.counts or node.leaves else []  # who has left comes back to nothing
        quotas = {owner: quota.slots for owner, quota in self.state.quotas.items()}
        return schedule(self.state.jobs, nodes, self._gone(now_s), quotas, awaited=now_s < self._began_s + ABSENT_S)

    def _gone(self, now_s: float) -> set[str]:
        placed = {share.node for job in self.state.jobs if job.runs for share in job.shares}
        since_s = {name: since_s for name, (since_s, _) in self._left.items()}
        return {node for node in placed - self.sessions.keys() if now_s >= since_s.get(node, self._began_s) + ABSENT_S}

    def _node(self, name: str, session: NodeSession, *, away: bool = False) -> OfferedNode:
        return OfferedNode(
            name,
            session.hello.slots,
            frozenset(session.hello.labels),
            leaves=bool(session.leaves) or name in self.state.cordons,
            goes=bool(session.notice or self.unread_on(name, session)),
            away=away,
        )

    def unread_on(self, node: str, session: NodeSession) -> list[str]:
        """The jobs that cannot be read, and have slots there, or may have: nobody knows how many are free."""
        holds, found = session.holds, self.state.left_out.items()
        return sorted(job for job, nodes in found if node in nodes or holds is None or job in holds)

    def _tell(self, node: str, session: NodeSession) -> None:
        """Send the node its jobs, if they have changed."""
        duties = pb.Duties(
            term=self.term,
            duties=[
                pb.Duty(
                    job=job.name,
                    slots=share.slots,
                    leave=job.stop is not None,
                    document=codec.to_json(job.submission).decode(),
                    token=documents.token_of(job, node),
                )
                for job in self.state.jobs
                if job.runs
                for share in job.shares
                if share.node == node
            ],
            over=[
                pb.Over(job=job.name, result=codec.to_json(job.result).decode())
                for job in self.state.jobs
                if job.result and any(share.node == node for share in job.shares)
            ],
            keeps=sorted(self.state.left_out),
        )
        if duties != session.told:
            session.told = duties
            session.post(pb.NodeOrder(duties=duties))

    async def _watch_tenure(self) -> None:
        """Raise LeadershipLost when the term is over, also by this process's own clock."""
        raise LeadershipLost(await self._tenure.end())
