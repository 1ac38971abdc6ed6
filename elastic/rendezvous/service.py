"""The answers of a replica of the rendezvous: the streams of agents, and `elastic status`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio

from elastic.errors import ElasticError
from elastic.protocol import membership
from elastic.protocol.membership import AgentUp, Stopped
from elastic.protocol.messages import Word
from elastic.protocol.worker_id import node_of
from elastic.records.journal import Journal
from elastic.rendezvous.leader import END_HEARD_S, AgentSession, JobLeader
from elastic.rendezvous.served_stream import serve
from elastic.security.interceptor import caller_of
from elastic.wire import codec
from elastic.wire import elastic_pb2 as pb

PENDING_LIMIT = 16_384
"""Calls that may wait to be looked at. By default gRPC turns some away above 1000, and all above 3000: if thousands of
agents come at once, most would come again and again, which takes more time than to answer them."""

HELLO_S = 30.0
"""Seconds for a caller's first word; then the call ends, because one certificate may have only so many open calls."""

T = TypeVar("T")

SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", codec.MESSAGE_LIMIT),
    ("grpc.max_send_message_length", codec.MESSAGE_LIMIT),
    ("grpc.so_reuseport", 0),
    ("grpc.server.max_pending_requests", PENDING_LIMIT),
    ("grpc.server.max_pending_requests_hard_limit", PENDING_LIMIT),
    ("grpc.http2.bdp_probe", 0),  # as in leader_options
    # A frozen or cut-off peer is noticed within 13 s (without ping_timeout never); an agent sooner, by its beats. Up to
    # 5000 agents of a job beat often enough to need no pings. With thousands of agents an answer takes its time, and an
    # agent that is cut off for that comes again and takes more.
    ("grpc.keepalive_time_ms", 6000),
    ("grpc.keepalive_timeout_ms", 7000),
    ("grpc.http2.ping_timeout_ms", 7000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_ping_strikes", 0),
)


@dataclass(slots=True)
class JobEntry:
    """A replica's knowledge of one job: whether it leads the job, or which replica does, or how the job ended."""

    journal: Journal
    leader: JobLeader | None = None
    address: str = ""
    """Address of the leader, as far as this replica knows, or ""."""
    ended: pb.End | None = None
    result: dict[str, object] | None = None


class NotKnown(ElasticError):
    """Try again: whether an agent may attend is not known now."""


class AttendanceCheck(Protocol):
    """Decides which agents may attend the jobs of a fleet (elastic/fleet/replica/admission.py)."""

    async def objection(self, job: str, node: str, token: str, peer: str) -> str:
        """Why this agent may not attend, or "". A refusal is journalled. peer: the agent's address. Raises NotKnown."""


class RendezvousService:
    """A replica's answers about its jobs. leads: job name -> entry, kept by the replica's part in the job. admission:
    None for the job of one machine, whose agents reach its rendezvous from that machine only."""

    def __init__(self, admission: AttendanceCheck | None = None) -> None:
        self._admission = admission
        self.leads: dict[str, JobEntry] = {}

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:
        entry = await self._entry_of(request.job, context)
        if entry.result is not None:
            document = json.dumps(_closed(request.job, entry.result))
            return pb.StatusReply(leading=True, leader=entry.address, document=document)
        if entry.leader is None:
            return pb.StatusReply(leading=False, leader=entry.address)
        known = {"leader": entry.address, "term": entry.leader.term, "checkpoint": entry.leader.group.checkpoint}
        told = {**membership.status(entry.leader.group), **known}
        return pb.StatusReply(leading=True, leader=entry.address, document=json.dumps(told))

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainReply:
        """Pass the wish on to that node's agent, which repeats it from then on."""
        entry = await self._entry_of(request.job, context)
        if entry.leader is None:
            return pb.DrainReply(leading=False, leader=entry.address)
        caller = caller_of(context)
        entry.leader.drain(request.node, request.drain_node, caller=str(caller), peer=caller.address)
        return pb.DrainReply(leading=True, leader=entry.address, nodes=entry.leader.nodes)

    async def SignalWorker(self, request: pb.SignalWorkerRequest, context: Any) -> pb.SignalWorkerReply:
        entry = await self._entry_of(request.job, context)
        if request.signal.kind not in (pb.WorkerSignal.STACKS, pb.WorkerSignal.KILL):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"no signal {request.signal.kind} is known here")
        if entry.leader is None:
            return pb.SignalWorkerReply(leading=False, leader=entry.address)
        caller = caller_of(context)
        alive = entry.leader.signal_worker(request.signal, caller=str(caller), peer=caller.address)
        return pb.SignalWorkerReply(leading=True, leader=entry.address, workers=alive)

    async def Attend(self, words: AsyncIterator[pb.AgentWord], context: Any) -> None:
        try:
            hello = await _hello(words)
            node = codec.identifier("node", hello.node)
            entry = self._named(hello.job)
        except codec.WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            return
        if entry.ended is None and entry.leader is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, entry.address)
            return
        if self._admission is not None:
            try:
                peer = str(context.peer()).partition(":")[2]
                objection = await self._admission.objection(hello.job, node, hello.token, peer)
            except NotKnown as error:
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
                return
            if objection:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, objection)
                return
        if entry.ended is not None:
            await context.write(pb.LeaderOrder(welcome=pb.Welcome(term=entry.ended.term)))
            await context.write(pb.LeaderOrder(end=entry.ended))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(_goodbye(words), END_HEARD_S)
            return
        leader = entry.leader
        if leader is None:  # the leader was deposed meanwhile
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, entry.address)
            return
        if hello.term > leader.term:
            leader.surpass(hello.term)
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"term {leader.term} is older than one that was seen")
            return
        known = {known.number: known.digest for known in hello.known}
        if older := leader.is_older(node, known):
            await leader.post(Stopped(older, at_once=True))
        session = leader.attach(node, known, hello.token)
        hearing = self._listen(leader, session, AgentUp(node, hello.slots), words)
        await serve(context, session, hearing, lambda: leader.detach(session), entry.journal, node=node)

    def _named(self, job: str) -> JobEntry:
        """The entry of a job. Raises WireError if there is none."""
        if (entry := self.leads.get(job)) is None:
            known = ", ".join(sorted(self.leads)) or "of none"
            raise codec.WireError(f"no job {job!r:.64} here; this is the rendezvous of {known}")
        return entry

    async def _entry_of(self, job: str, context: Any) -> JobEntry:
        """The entry of a job. job: "" for the only one."""
        if not job and len(self.leads) == 1:
            return next(iter(self.leads.values()))
        try:
            return self._named(job)
        except codec.WireError as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
            raise  # abort has raised already

    async def _listen(
        self, leader: JobLeader, session: AgentSession, begins: AgentUp, words: AsyncIterator[pb.AgentWord]
    ) -> None:
        await leader.post(begins)
        try:
            async for word in words:
                if not leader.is_current(session):
                    return
                leader.beat(session)
                match word.WhichOneof("content"):
                    case "word":
                        await leader.post(_own_word(session.node, codec.word_from_wire(word.word)))
                    case "goodbye":
                        session.ended.set()
                        return
                    case "hello" | None:
                        raise codec.WireError("an agent says hello once and nothing empty")
        except codec.WireError:  # this side ends the stream
            session.ended.set()
            raise


async def _hello(words: AsyncIterator[pb.AgentWord]) -> pb.AgentHello:
    word = await first(words)
    if word.WhichOneof("content") != "hello":
        raise codec.WireError("the first word of an agent must be its hello")
    return word.hello


async def first(words: AsyncIterator[T]) -> T:
    """The first word. Raises WireError if there is none within HELLO_S."""
    try:
        async with asyncio.timeout(HELLO_S):
            async for word in words:
                return word
    except TimeoutError:
        pass
    raise codec.WireError(f"no hello within {HELLO_S:g} s")


async def _goodbye(words: AsyncIterator[pb.AgentWord]) -> None:
    async for word in words:
        if word.WhichOneof("content") == "goodbye":
            return


def _closed(job: str, result: dict[str, object]) -> dict[str, object]:
    told = {name: result[name] for name in ("generation", "because", "exit_code", "digest")}
    return {"job": job, "state": "closed", "members": [], **told}


def _own_word(node: str, word: Word) -> Word:
    """The word, if it is about that node's workers. Raises WireError otherwise."""
    worker_id = getattr(word, "worker_id", None)
    for about in (getattr(word, "node", node), node if worker_id is None else node_of(worker_id)):
        if about != node:
            raise codec.WireError(f"the agent of {node} spoke for {about!r}")
    return word
