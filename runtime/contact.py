"""Whether the host of a peer can still be reached, as the kernel of this one knows.

A link that loses everything ends no connection: TCP sends again for a quarter of an hour before it says so. But the
kernel counts. What was sent is answered by the kernel over there, however busy the process is that it was sent to; so
data, or a probe, to which nothing came back for seconds means that the host is gone or the way to it is cut.

Nothing is said of a connection on which nobody waits for an answer: `probe` makes the kernel ask now and then.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterable
from typing import NamedTuple, Protocol

SILENT_S = 3.0
"""So long nothing may come back. Longer than a machine pauses, and about as long as an agent may be silent."""

LOOK_S = 1.0
"""Between two looks. Two in a row have to say so, because an answer may just be under way."""

PROBE_IDLE_S = 2
PROBE_EVERY_S = 1

_COUNTERS = struct.Struct("=xxBB52xI")
"""Of Linux's struct tcp_info: retransmits, probes, and, 52 bytes on, milliseconds since the last acknowledgement."""


class Counters(NamedTuple):
    """repeats: how often in a row the oldest data was sent again. probes: sent and not answered."""

    repeats: int
    probes: int
    answered_ms: int

    @property
    def silent(self) -> bool:
        """One that went unanswered may be a lost packet, or one too many for a kernel that limits such answers."""
        return (self.repeats > 1 or self.probes > 1) and self.answered_ms >= 1000 * SILENT_S


class Connection(Protocol):
    @property
    def peer(self) -> str: ...

    def silent(self) -> bool: ...


class Lookout:
    """Of one thread that waits for peers: looks every LOOK_S at those for whom it waits."""

    def __init__(self) -> None:
        self._next_s = time.monotonic() + LOOK_S
        self._silent: set[str] = set()

    def lost(self, connections: Iterable[Connection]) -> str:
        """The peer that cannot be reached any more, or "". Costs nothing between two looks."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return ""
        self._next_s = now_s + LOOK_S
        before, self._silent = self._silent, {one.peer for one in connections if one.silent()}
        return min(before & self._silent, default="")


def probe(sock: socket.socket) -> None:
    """Let the kernel ask the other side also where nothing is sent. sock: of TCP."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)


def counters(sock: socket.socket) -> Counters:
    """All zero for a connection within one host."""
    if sock.family == socket.AF_UNIX:
        return Counters(0, 0, 0)
    return Counters(*_COUNTERS.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTERS.size)))
