"""Connecting the members of a generation, over connections of the ring before that both sides have kept, and new ones.

The younger of two members calls. After a loss most connections are whole and idle. The handshake of the next ring goes
over them, after a frame from each side that is the last one of the old ring.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic.errors import BuildFailed, GenerationEnded
from runtime.allreduce.ring import handshake
from runtime.allreduce.ring.dialer import Dial
from runtime.allreduce.ring.frames import LinkError, PeerLink, hang_up
from runtime.allreduce.ring.listener import Arrivals, IncomingPeer, Listener
from runtime.allreduce.ring.ring import Peer, Ring
from runtime.allreduce.ring.unix_socket import tune

_CANCEL_CHECK_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSpec:
    """The ring of one generation, as one member sees it.

    base: as in Generation. peers: all members in rank order, this one included. plan: hash of the generation's plan.
    token: the members' secret. Both must be equal on all members. offer: rank 0's, sent to all others.
    """

    job: str
    generation: int
    base: int
    me: str
    peers: Sequence[Peer]
    plan: str
    token: str
    offer: str = ""

    @property
    def members(self) -> list[str]:
        return [peer.worker_id for peer in self.peers]

    @property
    def rank(self) -> int:
        return self.members.index(self.me)


def build(
    listener: Listener,
    spec: RingSpec,
    *,
    deadline_s: float,
    cancelled: threading.Event,
    kept: dict[str, PeerLink] | None = None,
) -> Ring:
    """Connect this worker with all others of its generation; every member calls this.

    deadline_s: seconds from now. kept: connections of the ring before, by peer, from `Ring.hand_over`; they belong to
    this call, which empties the dict. Where both sides have kept one the handshake goes over it, else the younger of
    the two connects anew. Raises BuildFailed naming the members without a connection, GenerationEnded soon after
    `cancelled` is set.
    """
    links = dict(kept or {})
    if kept:
        kept.clear()
    builder = _Builder(spec, listener, links)
    try:
        with listener.expecting(spec.generation, spec.base) as arrivals:
            builder.connect(arrivals, time.monotonic() + deadline_s, cancelled)
        hosts = [peer.host for peer in spec.peers]
        ring = Ring(spec.generation, spec.members, hosts, spec.me, builder.connections)
        ring.offer = builder.offer
        return ring
    except BaseException:
        for sock in builder.connections.values():
            hang_up(sock)
        raise
    finally:
        for dial in builder.dials.values():
            dial.close()
        for unused in builder.kept.values():
            unused.close()


class _Builder:
    def __init__(self, spec: RingSpec, listener: Listener, kept: Mapping[str, PeerLink]) -> None:
        self._spec, self._listener = spec, listener
        self._welcome = handshake.Welcome(spec.generation, spec.me, spec.plan, spec.offer)
        rank = spec.rank
        self.offer = spec.offer if rank == 0 else ""
        self._younger = set(spec.members[rank + 1 :])
        self.connections: dict[str, socket.socket] = {}
        self.dials = {
            peer.worker_id: Dial(
                peer.host,
                peer.port,
                handshake.Hello(spec.job, spec.generation, spec.me, peer.worker_id, "ring", spec.plan),
                spec.token,
                local=peer.host == listener.address[0],
                seal=listener.seal,
                kept=kept.get(peer.worker_id),
            )
            for peer in spec.peers[:rank]
        }
        self.kept = {peer: _KeptLink(link) for peer, link in kept.items() if peer not in self.dials}
        """Connections to younger members, which use them or call anew."""

    def connect(self, arrivals: Arrivals, deadline_s: float, cancelled: threading.Event) -> None:
        missing = self._younger | self.dials.keys()
        ready: set[int] = set()
        while True:
            now_s = time.monotonic()
            for sock, hello in arrivals.take():
                self._admit(sock, hello)
            for peer, kept in list(self.kept.items()):
                if not ready or kept.fileno() in ready:
                    self._hear(peer, kept)
            for peer, dial in list(self.dials.items()):
                if not ready or (descriptor := dial.fileno()) < 0 or descriptor in ready:
                    self._advance(peer, dial, now_s)
            absent = missing - self.connections.keys()
            if not absent:
                return
            if cancelled.is_set():
                raise GenerationEnded(f"generation {self._spec.generation} ended while its ring was built")
            if now_s >= deadline_s:
                raise BuildFailed(self._explain(absent), unreachable=sorted(absent))
            ready = self._wait(arrivals, now_s, deadline_s)

    def _wait(self, arrivals: Arrivals, now_s: float, deadline_s: float) -> set[int]:
        """The descriptors on which something has happened; none: all have to be looked at, because time has passed."""
        poller = select.poll()
        poller.register(arrivals.wake, select.POLLIN)
        until_s = min(now_s + _CANCEL_CHECK_S, deadline_s)
        for kept in self.kept.values():
            poller.register(kept, select.POLLIN)
        for dial in self.dials.values():
            dial.register(poller)
            if dial.retry_at_s > now_s:
                until_s = min(until_s, dial.retry_at_s)
        return {descriptor for descriptor, _ in poller.poll(1000 * (until_s - now_s))}

    def _advance(self, peer: str, dial: Dial, now_s: float) -> None:
        try:
            sock = dial.advance(now_s)
        except handshake.HelloRefused as refusal:
            raise BuildFailed(f"{peer} refused the connection: {refusal}", unreachable=(peer,)) from refusal
        if sock is not None:
            self.connections[peer] = sock
            if peer == self._spec.peers[0].worker_id:
                self.offer = dial.offer
            del self.dials[peer]

    def _hear(self, peer: str, kept: _KeptLink) -> None:
        """Go on with the handshake on a connection that was kept. If nothing comes of it, the peer calls anew."""
        wanted = (self._spec.job, self._spec.generation, peer, self._spec.me)
        try:
            heard = kept.hear()
            if heard is None:
                return
            sock, hello = heard
            if (hello.job, hello.generation, hello.worker_id, hello.to) != wanted:
                raise handshake.HelloRefused("it is for another ring")
        except (OSError, EOFError, handshake.HelloRefused, LinkError):
            kept.close()
        else:
            self._admit(sock, hello)
        del self.kept[peer]

    def _admit(self, sock: socket.socket, hello: handshake.Hello) -> None:
        objection = self._objection(hello)
        if objection:
            self._listener.refused(objection, sock)
            answer = handshake.encode_refusal(objection)
        else:
            answer = handshake.encode(handshake.proven_welcome(self._welcome, hello, self._spec.token))
        try:
            sock.send(answer)
        except OSError:  # the caller has hung up, and calls again if it lives
            hang_up(sock)
            return
        if objection:
            hang_up(sock)
            return
        tune(sock)
        earlier = self.connections.get(hello.worker_id)
        if earlier is not None:
            hang_up(earlier)
        self.connections[hello.worker_id] = sock

    def _objection(self, hello: handshake.Hello) -> str:
        if not handshake.is_proven(hello, self._spec.token):
            return "the token is not the generation's"
        if hello.worker_id not in self._younger:
            return f"{hello.worker_id} is no younger member of generation {hello.generation}"
        if hello.plan != self._spec.plan:
            return f"the plan here is {self._spec.plan!r}, not {hello.plan!r}"
        return ""

    def _explain(self, absent: set[str]) -> str:
        reasons = [
            f"{peer} ({self.dials[peer].problem})" if peer in self.dials else f"{peer} (it did not call)"
            for peer in sorted(absent)
        ]
        return f"generation {self._spec.generation}: no connection to {', '.join(reasons)}"


class _KeptLink:
    """A connection of the ring before to a younger member, which is expected to say hello on it."""

    def __init__(self, link: PeerLink) -> None:
        self._link = link
        self._caller = IncomingPeer("", float("inf"))

    def fileno(self) -> int:
        return self._link.fileno()

    def hear(self) -> tuple[socket.socket, handshake.Hello] | None:
        """The socket and the hello, once it is complete; None while there is more to come.

        Raises EOFError, LinkError, HelloRefused and OSError if nothing comes of it.
        """
        sock = self._link.drain()
        if sock is None:
            if self._link.ended:
                raise EOFError(self._link.ended)
            return None
        try:
            hello = self._caller.hear(sock)
        except BlockingIOError:
            return None
        return None if hello is None else (sock, hello)

    def close(self) -> None:
        self._link.close()
