"""Whom an agent asks first for its leader, after what it has heard last."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio

from elastic.rendezvous.leader_stream import LeaderStream

REPLICAS = ("one", "two", "three")


def broken() -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "the stream broke", "")


def asked_after(*, sent_away: bool) -> list[str]:
    """The replica two has led until its stream ended, in order or not; nobody leads now."""

    async def seek() -> list[str]:
        asked: list[str] = []
        leader = "two"

        async def attend(address: str) -> str:
            asked.append(address)
            if address == leader and sent_away:
                return "the leader ended the stream"
            raise broken()

        stream = LeaderStream(lambda: REPLICAS)
        await stream.attend(attend, lambda: asked[-1] == leader)
        asked.clear()
        leader = ""
        await stream.attend(attend, lambda: False)
        return asked

    return asyncio.run(seek())


def test_a_leader_whose_stream_broke_is_asked_first() -> None:
    assert asked_after(sent_away=False) == ["two", "one", "three"]


def test_a_leader_that_has_sent_its_agents_away_is_not() -> None:
    assert asked_after(sent_away=True) == ["one", "two", "three"]
