"""One connection of a ring: typed frames over a non-blocking stream socket, without a copy of the payload.

A frame is a fixed header and `length` bytes. The sender chooses the order; the receiver decides per frame where the
bytes go (straight into a tensor), or that it cannot take them yet, which stops the stream at that frame.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import socket
import struct
import termios
from collections import deque
from collections.abc import Callable, Iterator
from enum import IntEnum
from functools import partial
from typing import NamedTuple, Protocol

from runtime.allreduce.ring import tcp_liveness

_HEAD = struct.Struct("<4sB3xIIQQQ")
_MAGIC = b"ERF2"
_BATCH_BYTES = 1 << 20
_BATCH_FRAMES = 8
_DROPPED = bytearray(1 << 16)
"""Takes what nobody wants, of all connections."""

UNREAD_MAX = 1 << 16
"""Bytes that a connection may still carry when its ring is left, to be used for the next ring: a new connection takes
longer than these."""

Payload = bytes | memoryview


class FrameKind(IntEnum):
    """The content of a frame."""

    HEADER = 1
    """What members bring to an operation, see reduction/headers.py; the first frame of it between some members."""
    SCATTER = 2
    """One piece of one term (root) of the sender, for the receiver's slice."""
    GATHER = 3
    """One summed piece of the sender's slice."""
    ACKNOWLEDGE = 4
    """No payload: the sender holds the result of the operation."""
    LEAVE = 5
    """No payload: the sender has left the ring, and keeps the connection. The last frame of this ring; what follows is
    a handshake for the next one."""


_KINDS = frozenset(int(kind) for kind in FrameKind)


class Frame(NamedTuple):
    kind: FrameKind
    generation: int
    op: int
    length: int = 0
    term: int = 0
    piece: int = 0


class LinkError(Exception):
    """The peer does not speak the protocol; the message is for people."""


class FrameSink(Protocol):
    """Takes the frames of a link."""

    def accept(self, peer: str, frame: Frame) -> memoryview | None:
        """The memory for the payload, exactly frame.length bytes; None to stop the stream here until asked again.

        Raises LinkError if the frame is out of place.
        """

    def complete(self, peer: str, frame: Frame, payload: memoryview) -> None:
        """The payload has arrived in the memory that accept returned."""


class SendQueue:
    """The frames that wait to be sent over one connection, in batches of urgent ones or of bulk ones."""

    def __init__(self) -> None:
        self.sending: list[memoryview] = []
        """What is left of the current batch."""
        self._sending_urgent = False
        self._urgent: deque[tuple[Frame, Payload]] = deque()
        self.tickets = 0
        """How many urgent frames there were so far; the last one has this ticket."""
        self._bulk: Iterator[tuple[Frame, Payload] | None] | None = None
        self._paused = False

    @property
    def has_any(self) -> bool:
        """Whether something can be sent."""
        return bool(self.sending or self._urgent or (self._bulk is not None and not self._paused))

    @property
    def has_urgent(self) -> bool:
        return bool(self._urgent or (self.sending and self._sending_urgent))

    def put(self, frame: Frame, payload: Payload) -> None:
        self._urgent.append((frame, payload))
        self.tickets += 1

    def put_bulk(self, frames: Iterator[tuple[Frame, Payload] | None]) -> None:
        self._bulk, self._paused = frames, False

    def resume_bulk(self) -> bool:
        """Whether there is a sequence that had come to a None."""
        if not self._paused or self._bulk is None:
            return False
        self._paused = False
        return True

    def has_sent(self, ticket: int) -> bool:
        waiting = len(self._urgent) + (len(self.sending) if self._sending_urgent else 0)
        return ticket <= self.tickets - waiting

    def refill(self) -> None:
        """Take one batch of urgent or of bulk frames, so that `has_urgent` can tell them apart."""
        self._sending_urgent = bool(self._urgent)
        size = 0
        while size < _BATCH_BYTES and len(self.sending) < 2 * _BATCH_FRAMES:
            item = self._next()
            if item is None:
                return
            frame, payload = item
            self.sending.append(memoryview(packed(frame)))
            if frame.length:
                self.sending.append(memoryview(payload))
            size += _HEAD.size + frame.length

    def _next(self) -> tuple[Frame, Payload] | None:
        if self._sending_urgent:
            return self._urgent.popleft() if self._urgent else None
        if self._bulk is None:
            return None
        try:
            item = next(self._bulk)
        except StopIteration:
            self._bulk = None
            return None
        self._paused = item is None
        return item

    def drop_sent(self, sent: int) -> None:
        """sent: bytes of the current batch."""
        whole = 0
        for view in self.sending:
            if sent < view.nbytes:
                break
            sent -= view.nbytes
            whole += 1
        del self.sending[:whole]
        if sent:
            self.sending[0] = self.sending[0][sent:]

    def clear(self) -> None:
        self._urgent.clear()
        self._bulk = None
        self.sending = []


def packed(frame: Frame) -> bytes:
    """The frame without its payload, as it is sent."""
    return _HEAD.pack(_MAGIC, frame.kind, frame.term, frame.piece, frame.generation, frame.op, frame.length)


_CLOSED = frozenset({0, errno.ECONNRESET, errno.EPIPE})
"""The errors of a connection after its other end was closed."""


class PeerLink:
    """Used by one thread at a time. sock: connected, owned by the link from now on. queued: the link adds itself when a
    frame is queued."""

    def __init__(self, peer: str, sock: socket.socket, generation: int, queued: set[PeerLink] | None = None) -> None:
        sock.setblocking(False)
        self.peer = peer
        self.ended = ""
        """Why nothing more can come; "" while something can."""
        self.stalled = False
        self.moved = 0
        """Bytes that were sent and received."""
        self._left = False
        """Whether the peer has sent LEAVE."""
        self._torn = False
        """Whether frames were dropped of which a part may have been sent."""
        self._deaf = False
        self._closed_by_peer: bool | None = None
        self._sock = sock
        self._sealed_bytes: Callable[[], int] = getattr(sock, "pending", int)
        self._generation = generation
        self._queue = SendQueue()
        self._queued_links = set() if queued is None else queued
        self._head = memoryview(bytearray(_HEAD.size))
        self._head_got = 0
        self._frame: Frame | None = None
        self._payload: memoryview | None = None
        self._payload_got = 0

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def address(self) -> tuple[str, int]:
        """The address of the other end, while connected; ("", 0) within one host."""
        return tcp_liveness.address(self._sock)

    def counters(self) -> tcp_liveness.Counters:
        """The kernel's counters of this connection: see tcp_liveness.py."""
        return tcp_liveness.counters(self._sock)

    def is_closed_by_peer(self) -> bool:
        """Whether the peer, or its kernel, has closed its end; False if this kernel has given the connection up for
        lack of answers. For a connection that has ended; received bytes may still be unread."""
        if self._closed_by_peer is None:  # reading the error clears it
            self._closed_by_peer = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _CLOSED
        return self._closed_by_peer

    def close(self) -> None:
        """Close the connection for both sides, and for a child that has inherited it."""
        self._drop_unsent()
        self._payload = None
        hang_up(self._sock)

    @property
    def holds(self) -> bool:
        """Whether bytes have been read that poll will not report: a frame's header that was not accepted yet, or bytes
        inside the TLS session."""
        return not self.ended and (self.stalled or self._head_got == _HEAD.size or self._sealed_bytes() > 0)

    @property
    def unsent(self) -> bool:
        return self._queue.has_any

    @property
    def unsent_urgent(self) -> bool:
        return self._queue.has_urgent

    def send(self, frame: Frame, payload: Payload = b"") -> int:
        """Queue a frame before all bulk frames. The payload must not change until `has_sent` of the returned ticket, or
        until `unsent` is False."""
        if not self._deaf:
            self._queue.put(frame, payload)
            self._queued_links.add(self)
        return self._queue.tickets

    def has_sent(self, ticket: int) -> bool:
        """Whether the frame with this ticket was sent, or never will be."""
        return self._queue.has_sent(ticket)

    def send_bulk(self, frames: Iterator[tuple[Frame, Payload] | None]) -> None:
        """Queue frames that are generated as the connection takes them, one sequence at a time. A None among them: the
        next one is not known before `resume_bulk`."""
        if not self._deaf:
            self._queue.put_bulk(frames)
            self._queued_links.add(self)

    def resume_bulk(self) -> None:
        """There may be more of a sequence that had come to a None."""
        if self._queue.resume_bulk():
            self._queued_links.add(self)

    def flush(self) -> None:
        """Send until the connection takes no more.

        A peer that has closed its end is no error here, because it may have sent all that is wanted from it; frames
        that are queued for it are dropped.
        """
        queue = self._queue
        while True:
            if not queue.sending:
                queue.refill()
                if not queue.sending:
                    return
            try:
                sent = self._sock.sendmsg(queue.sending)
            except BlockingIOError:
                return
            except OSError as error:
                self._failed(error)
                self._deaf = True
                self._drop_unsent()
                return
            self.moved += sent
            queue.drop_sent(sent)

    def leave(self) -> bool:
        """Say that this worker leaves the ring. Whether the connection may be used for the next one, see `drain`: it is
        whole, and hardly anything waits in it that the peer would have to read first."""
        if self._torn or self.unsent or (self._deaf and not self._left):
            return False
        try:
            if tcp_liveness.counters(self._sock).asks or _unread(self._sock) > UNREAD_MAX:
                return False
            return self._sock.send(packed(Frame(FrameKind.LEAVE, self._generation, 0))) == _HEAD.size
        except OSError:  # it has ended, or takes nothing now
            return False

    def drain(self) -> socket.socket | None:
        """After `leave`: drop what the peer has sent in this ring. The socket once the peer has left too, which belongs
        to the caller then; None while more is to come, or nothing can come any more (`ended`). Raises LinkError."""
        while not self._left:
            if self._frame is None:
                if self._head_got < _HEAD.size and not self._read_head():
                    return None
                self._frame = self._parse()
                self._left = self._frame.kind is FrameKind.LEAVE
            if self._payload is None:
                self._payload_got = 0
            # Not into the memory that an operation gave for it, which may be in use again.
            self._payload = memoryview(_DROPPED)
            while rest := self._frame.length - self._payload_got:
                got = self._take(partial(self._sock.recv_into, self._payload[:rest]))
                if not got:
                    return None
                self._payload_got += got
            self._frame = self._payload = None
        return self._sock

    def _drop_unsent(self) -> None:
        self._torn = self._torn or bool(self._queue.sending)
        self._queue.clear()

    def receive(self, sink: FrameSink) -> bool:
        """Receive until one frame is complete (True), or the stream is empty, stops or has ended (False).

        Raises LinkError.
        """
        while True:
            if self._frame is None:
                if self._head_got < _HEAD.size and not self._read_head():
                    return False
                self._frame = self._parse()
            frame = self._frame
            if frame.kind is FrameKind.LEAVE:
                self._left, self._frame = True, None
                self._end(f"{self.peer} has left this ring")
                return False
            if self._payload is None:
                self._payload = sink.accept(self.peer, frame)
                self.stalled = self._payload is None
                if self._payload is None:
                    return False
                self._payload_got = 0
            if self._payload_got < frame.length and not self._read_payload(self._payload, frame.length):
                return False
            if self._payload_got == frame.length:
                payload, self._frame, self._payload = self._payload, None, None
                sink.complete(self.peer, frame, payload)
                return True

    def _read_head(self) -> bool:
        got = self._take(lambda: self._sock.recv_into(self._head[self._head_got :]))
        self._head_got += got
        return self._head_got == _HEAD.size

    def _read_payload(self, payload: memoryview, length: int) -> bool:
        """Read the payload, and the next frame's header with it, which saves a system call per frame."""
        rest = length - self._payload_got
        got = self._take(lambda: self._sock.recvmsg_into([payload[self._payload_got :], self._head])[0])
        self._payload_got += min(got, rest)
        self._head_got = max(0, got - rest)
        return got > 0

    def _take(self, read: Callable[[], int]) -> int:
        """Number of bytes read; 0 if there are none yet or never will be."""
        try:
            got = read()
        except BlockingIOError:
            return 0
        except OSError as error:
            self._failed(error)
            self._end(f"the connection to {self.peer} failed: {error.strerror}")
            return 0
        if got == 0:
            self._end(f"{self.peer} closed the connection")
        self.moved += got
        return got

    def _failed(self, error: OSError) -> None:
        """Note the first error, which says how the connection ended."""
        if self._closed_by_peer is None:
            self._closed_by_peer = error.errno in _CLOSED

    def _end(self, because: str) -> None:
        """Note the end: a peer closes both directions at once. Drop queued frames, which would never be sent, so that
        no operation waits for that for ever."""
        self.ended = because
        self._deaf = True
        self._drop_unsent()

    def _parse(self) -> Frame:
        magic, kind, term, piece, generation, op, length = _HEAD.unpack(self._head)
        self._head_got = 0
        if magic != _MAGIC or kind not in _KINDS:
            raise LinkError(f"{self.peer} sent no frame of this protocol")
        if generation != self._generation:
            raise LinkError(f"{self.peer} sent a frame of generation {generation} in {self._generation}")
        return Frame(FrameKind(kind), generation, op, length, term, piece)


def hang_up(sock: socket.socket) -> None:
    """Close a connection also where a child process has inherited it: close alone has no effect then."""
    with contextlib.suppress(OSError):  # the other side has closed already
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def _unread(sock: socket.socket) -> int:
    """Bytes that were sent and are not acknowledged over TCP, or not read within a host, where the kernel adds some."""
    (waiting,) = struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, b"\0" * 4))
    return int(waiting)
