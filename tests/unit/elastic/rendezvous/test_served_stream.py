"""A stream that a server ends, also in the middle of a write: the other side hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from elastic.records.journal import Journal
from elastic.rendezvous.served_stream import ServedStream, serve
from elastic.wire import elastic_pb2 as pb
from elastic.wire.services import RendezvousStub, add_to_server

STREAMS = 100
HEARD_S = 60.0


class _Brief:
    """Ends each stream a few turns of the event loop after it has begun to write."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._served = 0

    async def Attend(self, words: AsyncIterator[pb.AgentWord], context: Any) -> None:
        stream = ServedStream[pb.LeaderOrder]()
        for _ in range(3):
            stream.post(pb.LeaderOrder())
        self._served += 1
        ending = asyncio.create_task(_end(stream, turns=self._served % 9))
        await serve(context, stream, _hear(words), lambda: None, self._journal)
        await ending


async def _hear(words: AsyncIterator[pb.AgentWord]) -> None:
    async for _ in words:
        pass


async def _end(stream: ServedStream[pb.LeaderOrder], turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)
    stream.ended.set()


async def _attend(stub: Any) -> grpc.StatusCode:
    never = asyncio.Event()

    async def words() -> AsyncIterator[pb.AgentWord]:
        yield pb.AgentWord()
        await never.wait()

    call = stub.Attend(words())
    async for _ in call:
        pass
    code: grpc.StatusCode = await call.code()
    return code


def test_a_stream_that_is_ended_in_the_middle_of_a_write_ends_on_the_other_side_too(tmp_path: Path) -> None:
    async def story() -> list[grpc.StatusCode]:
        with Journal(tmp_path / "server.jsonl", "job", "server", "server") as journal:
            server = grpc.aio.server()
            add_to_server("Rendezvous", _Brief(journal), server)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            try:
                async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(HEARD_S):
                    stub = RendezvousStub(channel)
                    return [await _attend(stub) for _ in range(STREAMS)]
            finally:
                await server.stop(None)

    assert asyncio.run(story()) == [grpc.StatusCode.OK] * STREAMS
