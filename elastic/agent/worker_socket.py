"""The unix socket between an agent and its workers: one stream each, words up, orders down."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import grpc
import grpc.aio

from elastic.protocol.messages import Order, Word
from elastic.records import temp_dirs
from elastic.records.journal import Journal
from elastic.rendezvous.served_stream import ServedStream, serve
from elastic.security.interceptor import AuthInterceptor
from elastic.security.rejection_log import RejectionLog
from elastic.wire import codec
from elastic.wire import elastic_pb2 as pb
from elastic.wire.services import add_to_server

SOCKET_PATH_MAX = 100
"""Bytes of a unix socket's path; Linux allows 107, and gRPC adds a few."""

SOCKET_OPTIONS = (
    ("grpc.max_receive_message_length", codec.MESSAGE_LIMIT),
    ("grpc.max_send_message_length", codec.MESSAGE_LIMIT),
)

STOP_S = 0.2
"""Seconds that open streams may take to end when the agent stops."""


class SocketEvents(Protocol):
    """The receiver of the workers' words. A WireError that it raises ends the stream of the worker that spoke."""

    def employs(self, worker_id: str) -> bool:
        """Whether this is a worker of the agent whose process has not ended."""

    def on_word(self, worker_id: str, word: Word) -> None: ...
    def on_goodbye(self, worker_id: str) -> None: ...


@dataclass(eq=False, slots=True)
class WorkerLink(ServedStream[pb.AgentOrder]):
    """A worker's stream. A stopped worker's stream is not cut off: when it goes on, it hears that it is fenced."""

    refused_event: ClassVar[str] = "worker_refused"
    broke_event: ClassVar[str] = "worker_stream_broke"
    worker_id: str
    outbox: asyncio.Queue[pb.AgentOrder] = field(default_factory=asyncio.Queue, kw_only=True)


class WorkerSocket:
    """Used on the event loop only, between `listen` and `close`."""

    def __init__(
        self,
        job: str,
        job_dir: Path,
        node: str,
        journal: Journal,
        events: SocketEvents,
        keep: Callable[[str, str], None],
    ) -> None:
        """keep: takes a worker's step record, as JSON; it is acknowledged to the worker when this returns."""
        self._job = job
        self._journal = journal
        self._events = events
        self._keep = keep
        self._links: dict[str, WorkerLink] = {}
        usual = str(job_dir / f"{node}.sock")
        self._own: temp_dirs.TempDirectory | None = None
        """Where the socket is, if it can be there."""
        self.path = self._path_of_its_own(usual)
        """The path to which the workers connect."""

    def _path_of_its_own(self, usual: str) -> str:
        """Not in the job's directory, if possible: successors of lost workers come also when that was removed."""
        fits = len(os.fsencode(usual)) <= SOCKET_PATH_MAX
        try:
            self._own = temp_dirs.in_tmp(temp_dirs.AGENT_PREFIX)
        except OSError:
            if fits:
                return usual
            raise
        path = f"{self._own.path}/agent.sock"
        if fits and len(os.fsencode(path)) > SOCKET_PATH_MAX:
            self._own.remove()
            self._own, path = None, usual
        return path

    async def listen(self) -> None:
        """Begin to listen; only this user may connect."""
        self._refusals = RejectionLog(self._journal)
        guard = AuthInterceptor(self._refusals, asks_roles=False)
        self._server = grpc.aio.server(options=SOCKET_OPTIONS, interceptors=(guard,))
        add_to_server("Agent", self, self._server)
        Path(self.path).unlink(missing_ok=True)
        mask = os.umask(0o177)
        try:
            self._server.add_insecure_port(f"unix:{self.path}")
            await self._server.start()
        finally:
            os.umask(mask)

    async def close(self) -> None:
        await self._server.stop(grace=STOP_S)
        self._refusals.flush(last=True)
        Path(self.path).unlink(missing_ok=True)
        if self._own is not None:
            self._own.remove()

    def order(self, worker_id: str, order: Order) -> None:
        """Send an order to a worker that has a stream. A later worker hears from its leader what still holds."""
        if (link := self._links.get(worker_id)) is not None:
            link.post(pb.AgentOrder(order=codec.order_to_wire(order)))

    def order_all(self, order: Order) -> None:
        for worker_id in list(self._links):
            self.order(worker_id, order)

    async def Serve(self, words: AsyncIterator[pb.WorkerWord], context: Any) -> None:
        """One worker's stream (see the protocol definition)."""
        try:
            worker_id = await self._hello(words)
        except codec.WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            return
        link = WorkerLink(worker_id)
        if (older := self._links.get(worker_id)) is not None:
            older.ended.set()
        self._links[worker_id] = link

        def leave() -> None:
            if self._links.get(worker_id) is link:
                del self._links[worker_id]

        await serve(context, link, self._hear(link, words), leave, self._journal, worker_id=worker_id)

    async def _hello(self, words: AsyncIterator[pb.WorkerWord]) -> str:
        async for word in words:
            hello = word.hello
            if word.WhichOneof("content") != "hello":
                break
            if hello.job != self._job or not self._events.employs(hello.worker_id):
                raise codec.WireError(f"{hello.worker_id!r:.64} of job {hello.job!r:.64} is no worker of this agent")
            return hello.worker_id
        raise codec.WireError("the first word of a worker must be its hello")

    async def _hear(self, link: WorkerLink, words: AsyncIterator[pb.WorkerWord]) -> None:
        async for message in words:
            match message.WhichOneof("content"):
                case "word":
                    word = codec.word_from_wire(message.word)
                    if getattr(word, "worker_id", None) != link.worker_id:
                        raise codec.WireError(f"{link.worker_id} spoke for another worker")
                    self._events.on_word(link.worker_id, word)
                case "record":
                    self._keep(link.worker_id, message.record.line)
                    kept = pb.RecordsKept(up_to=message.record.number)
                    link.post(pb.AgentOrder(kept=kept))
                case "goodbye":
                    self._events.on_goodbye(link.worker_id)
                    return
                case _:
                    raise codec.WireError("a worker says hello once and nothing empty")
