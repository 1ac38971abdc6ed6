"""Streams between a leader and its agents. An agent tries the last leader, then each replica, and the leader it
names."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from elastic.rendezvous.operator_client import plainly
from elastic.wire import codec

CONNECT_MS = 1000
"""Milliseconds in which a replica has to accept a connection. A machine that is gone does not even refuse it."""

CONNECT_TIMES = 3
"""The most times CONNECT_MS that agents of a large job wait: thousands of agents connect at the same time."""

PING_MS = 1000
"""How often a silent leader is asked for a sign of life, and how long it may take to answer, in milliseconds."""


def leader_options(patience: int = 1) -> Sequence[tuple[str, object]]:
    """The options of a channel to a replica for a lasting stream. patience: an agent of a large job asks its leader for
    signs of life so many times less often."""
    return (
        ("grpc.max_receive_message_length", codec.MESSAGE_LIMIT),
        ("grpc.max_send_message_length", codec.MESSAGE_LIMIT),
        # By default each side answers words with pings, to measure the bandwidth. Thousands of agents say little.
        ("grpc.http2.bdp_probe", 0),
        # A frozen or cut-off leader is noticed within 2 s; without ping_timeout it never is.
        ("grpc.keepalive_time_ms", PING_MS * patience),
        ("grpc.keepalive_timeout_ms", PING_MS * patience),
        ("grpc.http2.ping_timeout_ms", PING_MS * patience),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.min_reconnect_backoff_ms", CONNECT_MS * min(patience, CONNECT_TIMES)),
    )


FIRST_RETRY_S = 0.05
LONGEST_RETRY_S = 0.5
"""Also limited to a third of fence_grace_s, so that a worker that has to be fenced hears of it in time."""


async def speak(stream: Any, outbox: asyncio.Queue[Any]) -> None:
    """Write what is put into the outbox to a stream, on either side. Never returns."""
    while True:
        await stream.write(await outbox.get())


class LeaderStream:
    """Finds the leader. addresses: returns the replicas' "host:port" known now; empty ones are left out. If a stream
    broke, its leader is asked first; a leader that has ended it in order leads no more."""

    def __init__(self, addresses: Callable[[], Sequence[str]]) -> None:
        self._addresses = addresses
        self._last = ""

    async def attend(self, attend: Callable[[str], Awaitable[str]], welcomed: Callable[[], bool]) -> str:
        """Attend one address after the other until a leader has welcomed this client. Returns why that stream ended, or
        why no leader was found. attend: keeps one stream until it ends, and returns why it ended."""
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
