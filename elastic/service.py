"""What a replica of the rendezvous answers: the streams of agents, and `elastic status`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from elastic import codec, membership
from elastic.journal import Journal
from elastic.membership import AgentUp
from elastic.messages import Word, node_of
from elastic.reign import AgentSession, Reign, happened
from elastic.wire import elastic_pb2 as pb
from elastic.wire.elastic_pb2_grpc import RendezvousServicer

SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", codec.MESSAGE_LIMIT),
    ("grpc.max_send_message_length", codec.MESSAGE_LIMIT),
    ("grpc.so_reuseport", 0),
    # A frozen or cut-off peer is noticed within 2 s; without ping_timeout it never is.
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_ping_strikes", 0),
)


class Service(RendezvousServicer):
    """What a replica answers to agents and to `elastic status`."""

    def __init__(self, job: str, journal: Journal) -> None:
        self._job = job
        self._journal = journal
        self.reign: Reign | None = None
        self.leader = ""
        """Address of the leader as far as this replica knows, or empty."""

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:
        if self.reign is None:
            return pb.StatusReply(leading=False, leader=self.leader)
        known = {"term": self.reign.term, "checkpoint": self.reign.checkpoint}
        document = {**membership.status(self.reign.group), **known}
        return pb.StatusReply(leading=True, leader=self.leader, document=json.dumps(document))

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainReply:
        """Pass the wish on to the agent of that node, which says it again from then on."""
        if self.reign is None:
            return pb.DrainReply(leading=False, leader=self.leader)
        self.reign.drain(request.node, request.drain_node)
        return pb.DrainReply(leading=True, leader=self.leader, nodes=self.reign.nodes)

    async def Attend(self, words: AsyncIterator[pb.AgentWord], context: Any) -> None:
        reign = self.reign
        if reign is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.leader)
            return
        try:
            node, slots = await self._hello(words)
        except codec.WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            return
        session = reign.attach(node)
        await reign.post(AgentUp(node, slots))
        tasks = [
            asyncio.create_task(self._listen(reign, session, words)),
            asyncio.create_task(_speak(session, context)),
            asyncio.create_task(happened(session.ended)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            session.ended.set()
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            await reign.detach(session)
        for result in results:
            if isinstance(result, codec.WireError):
                self._journal.write("agent_refused", node=node, because=str(result))
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(result))
            elif isinstance(result, Exception):
                self._journal.write("agent_stream_broke", node=node, because=f"{type(result).__name__}: {result}")

    async def _hello(self, words: AsyncIterator[pb.AgentWord]) -> tuple[str, int]:
        async for word in words:
            if word.WhichOneof("content") != "hello":
                break
            if word.hello.job != self._job:
                raise codec.WireError(f"this is the rendezvous of job {self._job!r}, not of {word.hello.job!r:.64}")
            return codec.identifier("node", word.hello.node), word.hello.slots
        raise codec.WireError("the first word of an agent must be its hello")

    async def _listen(self, reign: Reign, session: AgentSession, words: AsyncIterator[pb.AgentWord]) -> None:
        async for word in words:
            if not reign.is_current(session):
                return
            reign.beat(session)
            match word.WhichOneof("content"):
                case "word":
                    await reign.post(_own_word(session.node, codec.word_from_wire(word.word)))
                case "goodbye":
                    return
                case "hello" | None:
                    raise codec.WireError("an agent says hello once and nothing empty")


async def _speak(session: AgentSession, context: Any) -> None:
    while True:
        await context.write(await session.outbox.get())


def _own_word(node: str, word: Word) -> Word:
    """The word, if it speaks of that node's workers. Raises WireError otherwise."""
    about = getattr(word, "node", None) or node_of(getattr(word, "worker_id", ""))
    if about != node:
        raise codec.WireError(f"the agent of {node} spoke for {about!r}")
    return word
