"""The communicator of one generation on CPUs: a stream connection between every two members.

`Ring` runs one operation at a time over them and can be aborted from any thread. ring_builder.py makes the
connections, over_mesh.py decides what an operation sends.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import sleep
from typing import Any, Protocol

from elastic.errors import LinkSilent, RingBroken
from runtime.allreduce.ring.frames import Frame, FrameKind, FrameSink, LinkError, PeerLink
from runtime.allreduce.ring.link_poller import LinkPoller
from runtime.allreduce.ring.tcp_liveness import KERNEL_CHECK_S, PeerWatch
from runtime.allreduce.ring.transport import Transport
from runtime.script_end import TorchThread

_LEAVES_S = 0.1
_NOTHING = memoryview(b"")

ENDS_POLL_S = 0.02

GATHER_S = 2e-3
"""An operation that nobody waits for yet is looked after once in so many seconds, so that more bytes have come by each
time: a look at a few packets takes as long as one at many."""
MUCH_BYTES = 64 << 10
"""Where so many bytes are moved in one look, it was not too early; so a fast network is not held up."""

PARTS = 4
"""An operation is at most so many Operations of a ring, one after the other; their numbers follow each other."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A member and the address of its listener."""

    worker_id: str
    host: str
    port: int


class Operation(FrameSink, Protocol):
    """One collective operation, driven by Ring.run."""

    @property
    def op(self) -> int: ...

    def needs(self, peer: str) -> bool:
        """Whether anything more must come from this peer, as far as is known now."""

    def advance(self) -> bool:
        """Do what the frames so far allow; True once nothing more has to come or to be queued."""

    @property
    def may_gather(self) -> bool:
        """Whether the operation goes on later anyway, so that it may be late by GATHER_S now."""


class Ring:
    """members: worker ids in rank order. hosts: the address of each. Operations run one at a time; if one raises, the
    ring becomes unusable."""

    def __init__(
        self,
        generation: int,
        members: Sequence[str],
        hosts: Sequence[str],
        me: str,
        connections: Mapping[str, socket.socket],
    ) -> None:
        self.generation = generation
        self.members = tuple(members)
        self.hosts = tuple(hosts)
        self.rank = self.members.index(me)
        self._queued: set[PeerLink] = set()
        self.links = {peer: PeerLink(peer, sock, generation, self._queued) for peer, sock in connections.items()}
        self._poller = LinkPoller(self.links.values())
        self._using = threading.Lock()
        self._ending = threading.Lock()
        self._aborted = False
        self._closed = False
        self._broken = False
        self._acknowledged = dict.fromkeys(self.links, -1)
        self._scratch: dict[str, bytearray] = {}
        self.said: dict[int, dict[int, Any]] = {}
        """By part of an operation and rank: what the headers of the last one said. Kept for reduction/headers.py, by
        members alike."""
        self.transport: Transport | None = None
        """What carries the tensors of reductions; None: this mesh does. Set before any other thread has the ring."""
        self.because = ""
        """Why there is no transport although a transport was asked for."""
        self.offer = ""
        """The offer of rank 0: see handshake.Welcome."""

    @property
    def world_size(self) -> int:
        return len(self.members)

    @property
    def me(self) -> str:
        return self.members[self.rank]

    def abort(self) -> None:
        """Make every present and future operation raise RingBroken. Any thread; at once. The connections stay open
        until `close`, so that a closed connection means that its peer is gone or has closed its ring."""
        with self._ending:
            if self._aborted:
                return
            self._aborted = True
            self._poller.wake()
            if self.transport is not None:
                self.transport.abort()

    def wake(self) -> None:
        """Have the operation that runs look again at what it can do. Any thread; at once."""
        with self._ending:
            if not self._closed:
                self._poller.wake()

    def closed_by_peers(self) -> tuple[str, ...]:
        """The members that have closed their ends of the connections, or whose kernels have, by this kernel's word,
        whether or not all received bytes were read. Any thread; at once."""
        with self._ending:
            if self._closed:
                return ()
            poller = select.poll()
            by_fd = {link.fileno(): link for link in self.links.values()}
            for descriptor in by_fd:
                poller.register(descriptor, select.POLLRDHUP)
            return tuple(sorted(link.peer for fd, _ in poller.poll(0) if (link := by_fd[fd]).is_closed_by_peer()))

    def watch_ends(self) -> Iterator[tuple[str, ...]]:
        """Yield `closed_by_peers` whenever it has grown, until it names all peers, or the ring is closed. For a ring
        that was aborted: everything but the connections is freed meanwhile, as soon as no operation uses it any more,
        which may take long."""
        TorchThread(target=self._free_all_but_links, name="ring-free").start()
        known: tuple[str, ...] = ()
        while not self._closed and len(known) < len(self.links):
            if len(closed := self.closed_by_peers()) > len(known):
                yield (known := closed)
            sleep(ENDS_POLL_S)

    def close(self) -> None:
        """Abort and free the connections, and then the transport, which may take long; returns when no operation uses
        them any more. Any thread."""
        self.abort()
        with self._using, self._ending:
            if not self._closed:
                self._closed = True
                for link in self.links.values():
                    link.close()
                self._free()
        if self.transport is not None:
            self.transport.close()

    def hand_over(self, peers: Sequence[str]) -> dict[str, PeerLink]:
        """Abort, and close the connections, but for those to these peers that the next ring may use: they are the
        caller's, which closes them or gives them to `build`. Waits for an operation that is under way; {} if that does
        not end soon. `close` has still to be called, for the transport, which may take long. Any thread."""
        self.abort()
        if not self._using.acquire(timeout=_LEAVES_S):
            return {}
        try:
            with self._ending:
                if self._closed:
                    return {}
                self._closed = True
                kept = {peer: link for peer, link in self.links.items() if peer in peers and link.leave()}
                for peer in self.links.keys() - kept.keys():
                    self.links[peer].close()
                self._free()
                return kept
        finally:
            self._using.release()

    def _free_all_but_links(self) -> None:
        if self.transport is not None:
            self.transport.close()
        with self._using:
            self._scratch.clear()
            self.said.clear()

    def _free(self) -> None:
        self._poller.close()
        self._scratch.clear()
        self.said.clear()

    def scratch(self, name: str, size: int) -> memoryview:
        """At least ``size`` bytes of memory, reused by the next operation under the same name."""
        held = self._scratch.get(name)
        if held is None or len(held) < size:
            held = self._scratch[name] = bytearray(size)
        return memoryview(held)

    def acknowledge(self, op: int, to: Sequence[str]) -> None:
        """Tell peers that this worker holds the result of ``op``. Never waits; a peer that is gone is no error."""
        peers = [peer for peer in to if peer in self.links]
        if not peers:
            return
        if self._using.acquire(blocking=False):
            try:
                if self._aborted or self._broken or self._send_acknowledgements(op, peers):
                    return
                peers = []
            finally:
                self._using.release()
        threading.Thread(target=self._acknowledge_later, args=(op, peers), name="acknowledge", daemon=True).start()

    def await_acknowledgements(self, op: int, of: Sequence[str]) -> None:
        """Wait until these peers have acknowledged ``op`` or a later one.

        Raises RingBroken if one of them is gone before, or on abort.
        """
        waiting = set(of) & self.links.keys()
        self.run(_Waiting((op + 1) * PARTS - 1, lambda: {peer for peer in waiting if self._acknowledged[peer] < op}))

    def run(self, operation: Operation) -> None:
        """Send what the operation queues on `links`, and pass it what comes, until it is complete and all is sent.

        Raises RingBroken when the ring is aborted or a needed peer is gone, and what the operation raises.
        """
        with self._using:
            if self._aborted:
                raise self._end()
            if self._broken:
                raise RingBroken(f"the ring of generation {self.generation} failed in an earlier operation")
            try:
                with PeerWatch(self.links) as lookout:
                    self._pump(operation, lookout)
            except BaseException:
                self._broken = True
                raise

    def _pump(self, operation: Operation, lookout: PeerWatch) -> None:
        gate, moved, poller = _Gate(operation, self._acknowledged), MUCH_BYTES, self._poller
        while True:
            if self._aborted:
                raise self._end()
            complete = operation.advance()
            while self._queued:
                link = self._queued.pop()
                link.flush()
                poller.note(link)
            for link in poller.ended:
                if operation.needs(link.peer):
                    raise RingBroken(f"generation {self.generation}: {link.ended}", peer=link.peer)
            if complete and not poller.unsent:
                return
            # poll does not report bytes that a link has read already, which may have become acceptable just now, nor an
            # end of the connection that is found while they are read.
            if any([self._receive(link, gate) or bool(link.ended) for link in list(poller.holding)]):
                continue
            waits_for = (link for link in self.links.values() if link.unsent or operation.needs(link.peer))
            lost, because = lookout.lost(waits_for)
            if lost:
                said = f"generation {self.generation}: {lost} cannot be reached any more: {because}"
                raise LinkSilent(said, peer=lost)
            events = poller.poll(1000 * KERNEL_CHECK_S)
            if moved < MUCH_BYTES and operation.may_gather:
                sleep(GATHER_S)
                events = poller.poll(0)
            moved = 0
            for link, event in events:
                moved -= link.moved
                if event & select.POLLOUT:
                    link.flush()
                if event & ~select.POLLOUT:
                    self._receive(link, gate)
                else:
                    poller.note(link)
                moved += link.moved

    def _receive(self, link: PeerLink, gate: FrameSink) -> bool:
        """Receive from a link. Whether a frame became complete."""
        try:
            return link.receive(gate)
        except LinkError as error:
            raise RingBroken(f"generation {self.generation}: {error}", peer=link.peer) from error
        finally:
            self._poller.note(link)

    def _end(self) -> RingBroken:
        return RingBroken(f"the ring of generation {self.generation} was aborted")

    def _send_acknowledgements(self, op: int, peers: Sequence[str]) -> bool:
        """Whether all acknowledgements were sent; the rest is queued. The caller holds _using."""
        links = [self.links[peer] for peer in peers]
        for link in links:
            link.send(Frame(FrameKind.ACKNOWLEDGE, self.generation, op))
            link.flush()
        return not any(link.unsent for link in links)

    def _acknowledge_later(self, op: int, peers: Sequence[str]) -> None:
        with self._using:
            if self._aborted or self._broken:
                return
            self._send_acknowledgements(op, peers)
        with contextlib.suppress(RingBroken):  # a peer that waits sees the connection end
            self.run(_Waiting((op + 1) * PARTS - 1, set))


class _Waiting:
    """An operation that exchanges acknowledgements only."""

    may_gather = False

    def __init__(self, op: int, missing: Callable[[], set[str]]) -> None:
        self.op = op
        self._missing = missing

    def needs(self, peer: str) -> bool:
        return peer in self._missing()

    def advance(self) -> bool:
        return not self._missing()

    def accept(self, peer: str, frame: Frame) -> memoryview | None:
        raise LinkError(f"{peer} sent {frame.kind.name} of operation {frame.op}, which is complete")

    def complete(self, peer: str, frame: Frame, payload: memoryview) -> None:
        raise AssertionError("nothing was accepted")


class _Gate:
    """Keeps acknowledgements and the frames of other operations away from the current operation."""

    def __init__(self, operation: Operation, acknowledged: dict[str, int]) -> None:
        self._operation = operation
        self._acknowledged = acknowledged

    def accept(self, peer: str, frame: Frame) -> memoryview | None:
        current = self._operation.op
        if frame.kind is FrameKind.ACKNOWLEDGE:
            if frame.length:
                raise LinkError(f"{peer} sent an acknowledgement of {frame.length} bytes")
            return _NOTHING
        if frame.op == current:
            return self._operation.accept(peer, frame)
        if frame.op < current or self._operation.needs(peer):
            raise LinkError(f"{peer} is at operation {frame.op}, this worker at {current}")
        return None

    def complete(self, peer: str, frame: Frame, payload: memoryview) -> None:
        if frame.kind is FrameKind.ACKNOWLEDGE:
            self._acknowledged[peer] = max(self._acknowledged[peer], frame.op)
        else:
            self._operation.complete(peer, frame, payload)
