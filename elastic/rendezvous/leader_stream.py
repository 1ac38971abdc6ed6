"""Streams between a leader and its agents. How an agent finds the leader among the replicas: the last one first, then
each, and whom they name."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from elastic.rendezvous.operator_client import plainly
from elastic.wire import codec

CONNECT_MS = 1000
"""How long a replica may take to accept a connection. One on a machine that is gone does not even refuse it."""

CONNECT_BEATS = 3
"""Up to so many times as long where each of thousands of agents speaks as rarely: at the start all come at once."""

PING_MS = 1000
"""How often a silent leader is asked for a sign of life, and how long it may take to give it."""


def leader_options(beats: int = 1) -> Sequence[tuple[str, object]]:
    """The options of a channel to a replica whose stream is to be kept. beats: where agents are so many that each
    speaks only with one beat of so many, a leader is asked for signs of life as rarely."""
    return (
        ("grpc.max_receive_message_length", codec.MESSAGE_LIMIT),
        ("grpc.max_send_message_length", codec.MESSAGE_LIMIT),
        # A frozen or cut-off leader is noticed within 2 s; without ping_timeout it never is.
        ("grpc.keepalive_time_ms", PING_MS * beats),
        ("grpc.keepalive_timeout_ms", PING_MS * beats),
        ("grpc.http2.ping_timeout_ms", PING_MS * beats),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.min_reconnect_backoff_ms", CONNECT_MS * min(beats, CONNECT_BEATS)),
    )


FIRST_RETRY_S = 0.05
LONGEST_RETRY_S = 0.5
"""Also below a third of fence_grace_s, so that a worker which has to be fenced hears of it in time."""


async def speak(stream: Any, outbox: asyncio.Queue[Any]) -> None:
    """Write to a stream, either side's, what is put into the outbox. Never returns."""
    while True:
        await stream.write(await outbox.get())


class LeaderStream:
    """addresses: the replicas' "host:port" as known now; empty ones are left out. Where a stream broke, its leader is
    asked first; one that has ended it in order leads no more."""

    def __init__(self, addresses: Callable[[], Sequence[str]]) -> None:
        self._addresses = addresses
        self._last = ""

    async def attend(self, attend: Callable[[str], Awaitable[str]], welcomed: Callable[[], bool]) -> str:
        """Attend one address after the other until a leader has welcomed us. Returns why that ended, or why nobody
        did. attend: one stream, until it ends; it returns why it did."""
        because, asked = "no rendezvous has written its address yet", set[str]()
        waiting = [address for address in (self._last, *self._addresses()) if address]
        while waiting:
            address = waiting.pop(0)
            if address in asked:
                continue
            asked.add(address)
            sent_away = False
            try:
                because = await attend(address)
                sent_away = True
            except grpc.aio.AioRpcError as error:
                because = f"{address}: {plainly(error.code(), error.details() or '')}"
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION and (leader := error.details()):
                    waiting.insert(0, leader)
            except codec.WireError as error:
                because = f"{address}: {error}"
            if welcomed():
                self._last = "" if sent_away else address
                return because
        self._last = ""
        return because
