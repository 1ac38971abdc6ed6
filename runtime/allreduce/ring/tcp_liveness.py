"""Whether the host of a peer can still be reached, by the counters of this host's kernel.

A link that loses everything ends no connection: TCP repeats for a quarter of an hour before it reports an error. But
the kernel counts. The peer's kernel acknowledges what was sent, however busy the receiving process is; so data, or a
probe, without an answer for seconds means that the host is gone or the way to it is cut.

Or that the link is full. TCP that has lost a packet and its repetition waits longer each time, so for seconds it sends
hardly anything. Therefore a host is judged by the acknowledgements on all connections to it, and while a connection has
to repeat data the host is *asked*: new connections are opened to it, whose small packets get through if any data does.
Its kernel answers them, if only with a refusal. On a link that is cut there are no answers.

`probe` makes the kernel ask now and then, also on a connection without data in flight.
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
"""Seconds without an answer: longer than a machine pauses, and about as long as an agent may be silent."""

KERNEL_CHECK_S = 1.0
"""Seconds between two looks. Two looks in a row have to agree, because an answer may just be under way."""

STUCK_S = 60.0
"""Seconds without an answer on one connection although its host answers others: something in between drops it."""

ASKED_AT_ONCE = 3
"""How many connections each look opens to a host that has to answer. With those of earlier looks and the repetitions of
each, a host is asked about 15 times in SILENT_S."""

PROBE_IDLE_S = 2
PROBE_EVERY_S = 1

_COUNTERS = struct.Struct("=xxBB52xI60xQ")
"""The part of Linux's struct tcp_info that is read: retransmits, probes, 52 bytes later milliseconds since the last
acknowledgement, and 60 bytes later bytes acknowledged."""

_ANSWERS = frozenset({0, errno.ECONNREFUSED, errno.ECONNRESET})
"""Errors of a connection attempt that the other host has answered."""


class Counters(NamedTuple):
    """repeats: how often in a row the oldest data was sent again. probes: probes sent without an answer. answered_ms:
    milliseconds since the last acknowledgement. acknowledged: bytes acknowledged since the beginning."""

    repeats: int
    probes: int
    answered_ms: int
    acknowledged: int = 0

    @property
    def asks(self) -> bool:
        """Whether anything was sent again."""
        return self.repeats > 0 or self.probes > 0

    @property
    def insists(self) -> bool:
        """Whether it was sent again more than once: a lone answer may be lost, or dropped by a kernel's limit."""
        return self.repeats > 1 or self.probes > 1


@dataclass(frozen=True, slots=True)
class CountersSeen:
    """A connection at one look. host: the peer's; "": this host. waited: this worker waits for the peer."""

    peer: str
    host: str
    waited: bool
    counters: Counters


@dataclass(slots=True)
class Judge:
    """Judges all connections of a ring, from one look to the next. Pure."""

    began_s: float
    _answered_s: dict[str, float] = field(default_factory=dict)
    """Host -> when it last answered."""
    _silent: frozenset[str] = frozenset()
    _first: dict[str, int] = field(default_factory=dict)
    """Peer -> bytes acknowledged at the first look."""

    def answered(self, host: str, now_s: float) -> None:
        """Note that the host has answered."""
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
        """The facts about that connection, for people."""
        sent = one.counters.acknowledged - self._first.get(one.peer, 0)
        for_s = max(1e-3, now_s - self.began_s)
        silent_s = one.counters.answered_ms / 1000
        rate = f"{sent / 1e6:.1f} MB in {for_s:.1f} s, {8e-6 * sent / for_s:.2f} Mbit/s"
        return f"{one.host} has acknowledged nothing for {silent_s:.1f} s; {rate}"


class Connection(Protocol):
    """The part of PeerLink that is watched."""

    @property
    def peer(self) -> str: ...

    @property
    def address(self) -> tuple[str, int]:
        """The address of the other end; ("", 0) within one host."""

    def counters(self) -> Counters: ...


class PeerWatch:
    """Watches connections, by peer, for one thread that waits for peers. It looks every KERNEL_CHECK_S."""

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
        """The peer that cannot be reached any more, and the facts, or ("", ""). Between two looks it costs nothing."""
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
            else:  # this host has no route to it
                sock.close()

    def _hear(self, now_s: float) -> None:
        """Collect the answers; a host that has answered is not asked further."""
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
    """Let the kernel ask the other side also while nothing is sent. sock: a TCP socket."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)


def counters(sock: socket.socket) -> Counters:
    """The counters of a connection; all zero within one host."""
    if sock.family == socket.AF_UNIX:
        return Counters(0, 0, 0)
    return Counters(*_COUNTERS.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTERS.size)))


def address(sock: socket.socket) -> tuple[str, int]:
    """The address of the other end; ("", 0) if it is on this host, or gone."""
    if sock.family == socket.AF_UNIX:
        return "", 0
    try:
        host, port, *_ = sock.getpeername()
    except OSError:
        return "", 0
    return host, port
