"""Whether the host of a peer can still be reached, as the kernel of this one knows.

A link that loses everything ends no connection: TCP sends again for a quarter of an hour before it says so. But the
kernel counts. What was sent is answered by the kernel over there, however busy the process is that it was sent to; so
data, or a probe, to which nothing came back for seconds means that the host is gone or the way to it is cut.

Or that the link is full. TCP that has lost a packet and its repetition waits for longer each time, so for seconds it
asks hardly ever. Therefore a host is judged by what any connection to it acknowledges, and while one has to repeat
itself the host is *asked*: new connections are opened to it, whose small packets get through where some of its data
does. Its kernel answers those too, if only with a refusal. A link that is cut answers none of them.

Nothing is said of a connection on which nobody waits for an answer: `probe` makes the kernel ask now and then.
"""

from __future__ import annotations

import errno
import select
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, Self

SILENT_S = 3.0
"""So long nothing may come back. Longer than a machine pauses, and about as long as an agent may be silent."""

KERNEL_CHECK_S = 1.0
"""Between two looks. Two in a row have to say so, because an answer may just be under way."""

STUCK_S = 60.0
"""So long nothing may come back on one connection, although its host answers others: something between drops it."""

ASKED_AT_ONCE = 3
"""How many connections are opened at each look to a host that is to answer. With those of the looks before and the
repetitions of each, a host is asked about 15 times in SILENT_S."""

PROBE_IDLE_S = 2
PROBE_EVERY_S = 1

_COUNTERS = struct.Struct("=xxBB52xI60xQ")
"""What is read of Linux's struct tcp_info: retransmits, probes, and, 52 bytes on, milliseconds since the last
acknowledgement, and, 60 bytes on, bytes acknowledged."""

_ANSWERS = frozenset({0, errno.ECONNREFUSED, errno.ECONNRESET})
"""How a connection ends, or begins, to which the other host has said something."""


class Counters(NamedTuple):
    """repeats: how often in a row the oldest data was sent again. probes: sent and not answered. answered_ms: since
    anything was acknowledged. acknowledged: bytes since the beginning."""

    repeats: int
    probes: int
    answered_ms: int
    acknowledged: int = 0

    @property
    def asks(self) -> bool:
        """Whether something was sent again."""
        return self.repeats > 0 or self.probes > 0

    @property
    def insists(self) -> bool:
        """One that went unanswered may be a lost packet, or one too many for a kernel that limits such answers."""
        return self.repeats > 1 or self.probes > 1


@dataclass(frozen=True, slots=True)
class CountersSeen:
    """A connection at one look. host: of the peer; "": this one. waited: somebody waits for the peer."""

    peer: str
    host: str
    waited: bool
    counters: Counters


@dataclass(slots=True)
class Judge:
    """Judges all connections of a ring, from one look to the next. Pure."""

    began_s: float
    _answered_s: dict[str, float] = field(default_factory=dict)
    """Host -> when something last came back from it."""
    _silent: frozenset[str] = frozenset()
    _first: dict[str, int] = field(default_factory=dict)
    """Peer -> bytes acknowledged at the first look."""

    def answered(self, host: str, now_s: float) -> None:
        """It answers a question."""
        self._answered_s[host] = max(now_s, self._answered_s.get(host, now_s))

    def look(self, seen: Iterable[CountersSeen], now_s: float) -> str:
        """The peer that cannot be reached any more, or ""."""
        silent = set()
        connections = [one for one in seen if one.host]
        for one in connections:
            self.answered(one.host, now_s - one.counters.answered_ms / 1000)
            self._first.setdefault(one.peer, one.counters.acknowledged)
        for one in connections:
            stuck = one.counters.answered_ms >= 1000 * STUCK_S
            if one.waited and one.counters.insists and (stuck or self.silent_s(one.host, now_s) >= SILENT_S):
                silent.add(one.peer)
        before, self._silent = self._silent, frozenset(silent)
        return min(before & self._silent, default="")

    def silent_s(self, host: str, now_s: float) -> float:
        return now_s - self._answered_s.get(host, now_s)

    def to_ask(self, seen: Iterable[CountersSeen], now_s: float) -> set[str]:
        """The hosts that have to show that they can be reached."""
        asking = {one.host for one in seen if one.host and one.waited and one.counters.asks}
        return {host for host in asking if self.silent_s(host, now_s) >= SILENT_S / 4}

    def told(self, one: CountersSeen, now_s: float) -> str:
        """What is known of that connection, for people."""
        sent = one.counters.acknowledged - self._first.get(one.peer, 0)
        for_s = max(1e-3, now_s - self.began_s)
        silent_s = one.counters.answered_ms / 1000
        rate = f"{sent / 1e6:.1f} MB in {for_s:.1f} s, {8e-6 * sent / for_s:.2f} Mbit/s"
        return f"{one.host} has acknowledged nothing for {silent_s:.1f} s; {rate}"


class Connection(Protocol):
    """As Link."""

    @property
    def peer(self) -> str: ...

    @property
    def address(self) -> tuple[str, int]:
        """The address of the other end; ("", 0) within one host."""
        ...

    def counters(self) -> Counters: ...


class PeerWatch:
    """Watches the connections for one thread that waits for peers: looks every KERNEL_CHECK_S. connections: all of
    them, by peer."""

    def __init__(self, connections: Mapping[str, Connection]) -> None:
        now_s = time.monotonic()
        self._connections = connections
        self._next_s = now_s + KERNEL_CHECK_S
        self._judge = Judge(now_s)
        self._asked: list[tuple[str, socket.socket]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        for _, sock in self._asked:
            sock.close()

    def lost(self, waits_for: Iterable[Connection]) -> tuple[str, str]:
        """The peer that cannot be reached any more, and what is known of the way to it, or two times "". Costs nothing
        between two looks."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return "", ""
        self._next_s = now_s + KERNEL_CHECK_S
        waited = {one.peer for one in waits_for}
        at: dict[str, tuple[str, int]] = {peer: one.address for peer, one in self._connections.items()}
        seen = {
            peer: CountersSeen(peer, at[peer][0], peer in waited, one.counters())
            for peer, one in self._connections.items()
        }
        self._hear(now_s)
        if lost := self._judge.look(seen.values(), now_s):
            return lost, self._judge.told(seen[lost], now_s)
        to_ask = self._judge.to_ask(seen.values(), now_s)
        for where in {host: port for host, port in at.values() if host in to_ask}.items():
            self._ask(*where)
        return "", ""

    def _ask(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        for _ in range(ASKED_AT_ONCE):
            try:
                sock = socket.socket(family, socket.SOCK_STREAM)
            except OSError:  # no descriptor is left
                return
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if sock.connect_ex((host, port)) in (0, errno.EINPROGRESS):
                self._asked.append((host, sock))
            else:  # this host knows no way there
                sock.close()

    def _hear(self, now_s: float) -> None:
        """What became of the questions; whose host has answered is not asked on."""
        if not self._asked:
            return
        poller = select.poll()
        for _, sock in self._asked:
            poller.register(sock, select.POLLOUT)
        ended = {fd for fd, _ in poller.poll(0)}
        over = [(host, sock) for host, sock in self._asked if sock.fileno() in ended]
        answered = {host for host, sock in over if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _ANSWERS}
        for name in answered:
            self._judge.answered(name, now_s)
        left = [(host, sock) for host, sock in self._asked if host not in answered and sock.fileno() not in ended]
        for one in self._asked:
            if one not in left:
                one[1].close()
        self._asked = left


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


def address(sock: socket.socket) -> tuple[str, int]:
    """The address of the other end; ("", 0) if that is on this host, or gone."""
    if sock.family == socket.AF_UNIX:
        return "", 0
    try:
        host, port, *_ = sock.getpeername()
    except OSError:
        return "", 0
    return host, port
