"""Messages with tensors over a copy connection: the transport for state, results, and questions about them.

    message = magic, bytes of head, bytes of all blobs; head (JSON: the caller's header, the size of each blob);
              then of each blob its bytes and their checksum (see checksum.py)

Bytes are sent and received in pieces that fit into a core's cache; the checksum runs over all pieces.
"""

from __future__ import annotations

import contextlib
import json
import math
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from elastic.errors import ElasticError
from runtime.allreduce.reduction.entries import MAX_HEADER_BYTES
from runtime.allreduce.reduction.flat_pool import room_for
from runtime.allreduce.reduction.partial_sum import Json
from runtime.allreduce.ring.dialer import Dial
from runtime.allreduce.ring.handshake import Hello, HelloRefused
from runtime.allreduce.ring.ring import Peer
from runtime.allreduce.ring.tls import PLAIN, TlsContexts
from runtime.recovery.transfer.checksum import checksum

MAX_HEAD_BYTES = 4 * MAX_HEADER_BYTES
"""A newcomer is told all values of job.shared at once, each of which the members' own headers have carried."""
MAX_BLOBS = 1 << 20
MAX_TOTAL_BYTES = 1 << 42
ANSWER_S = 600.0
"""Seconds before the other side's answer has to begin; keep-alive finds a host that is gone."""
STALL_S = 30.0
"""Seconds for which a message that has begun may make no progress."""
_CHUNK_BYTES = 1 << 18
"""Must be the same on both sides, because the checksum depends on it."""
_PREFIX = struct.Struct(">4sIQ")
_SUM = struct.Struct(">I")
_MAGIC = b"ERC1"

Allocate = Callable[[dict[str, Json], list[int]], Sequence[Tensor]]
"""(header, size of each blob in bytes) -> a contiguous 1-D uint8 CPU tensor of that size for each."""


class CopyFailed(ElasticError):
    """Ask another member, or this one again; what was received so far is worthless."""


def open_copy(
    peer: Peer,
    *,
    job: str,
    generation: int,
    me: str,
    plan: str,
    token: str,
    deadline_s: float,
    seal: TlsContexts = PLAIN,
) -> CopyConnection:
    """Connect to a member's listener. deadline_s: seconds from now in which a failed connection is tried again.

    Raises CopyFailed if there is no connection by then, or at once if the member refuses or its process has ended: a
    worker listens before any list names it, for as long as it lives.
    """
    hello = Hello(job, generation, me, peer.worker_id, "copy", plan)
    dial = Dial(peer.host, peer.port, hello, token, local=False, seal=seal)
    end_s = time.monotonic() + deadline_s
    try:
        while True:
            now_s = time.monotonic()
            sock = dial.advance(now_s)
            if sock is not None:
                return CopyConnection(sock)
            if dial.nobody_listens:
                raise CopyFailed(f"{peer.worker_id} is gone: {dial.problem}")
            if now_s >= end_s:
                raise CopyFailed(f"no copy connection to {peer.worker_id} in {deadline_s} s: {dial.problem}")
            poller = select.poll()
            dial.register(poller)
            until_s = min(end_s, dial.retry_at_s) if dial.retry_at_s > now_s else end_s
            poller.poll(1000 * (until_s - now_s))
    except HelloRefused as refusal:
        raise CopyFailed(f"{peer.worker_id} refused a copy connection: {refusal}") from refusal
    finally:
        dial.close()


class CopyConnection:
    """Used by one thread; abort() and close() may come from others. sock: connected, owned from now on."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._using = threading.Lock()
        self._ending = threading.Lock()
        self._aborted = False
        self.received = 0
        """Bytes received so far."""
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)

    def send(self, header: dict[str, Json], blobs: Sequence[Tensor] = ()) -> None:
        """Send one message. blobs: contiguous 1-D uint8 CPU tensors that do not change meanwhile.

        Raises CopyFailed if the other side is gone, takes nothing for STALL_S, or on abort.
        """
        views = [_view(blob) for blob in blobs]
        head = json.dumps({"header": header, "sizes": [view.nbytes for view in views]}, separators=(",", ":")).encode()
        if len(head) > MAX_HEAD_BYTES:
            raise ValueError(f"header of {len(head)} bytes, at most {MAX_HEAD_BYTES} allowed")
        with self._using, _failures():
            self._sock.settimeout(STALL_S)
            self._send_all(memoryview(_PREFIX.pack(_MAGIC, len(head), sum(view.nbytes for view in views)) + head))
            for view in views:
                running = 0
                for start in range(0, view.nbytes, _CHUNK_BYTES):
                    chunk = view[start : start + _CHUNK_BYTES]
                    running = checksum(chunk, running)
                    self._send_all(chunk)
                self._send_all(memoryview(_SUM.pack(running)))

    def receive(
        self, into: Allocate | None = None, within_s: float | None = None
    ) -> tuple[dict[str, Json], list[Tensor]]:
        """The next message: its header and its blobs, in the memory that ``into`` gives or in new tensors.

        Raises CopyFailed if the other side is gone, says nothing for within_s (None: ANSWER_S; inf: no limit), stops
        within a message for STALL_S, sends bytes that do not fit their announcement or checksums, or on abort; NoMemory
        if there is not enough for the announced bytes.
        """
        with self._using, _failures():
            magic, head_size, total = _PREFIX.unpack(self._take(_PREFIX.size, within_s or ANSWER_S))
            if magic != _MAGIC or head_size > MAX_HEAD_BYTES or total > MAX_TOTAL_BYTES:
                raise CopyFailed(f"no message of this protocol, or too large: {head_size} and {total} bytes")
            header, sizes = _parse_head(self._take(head_size, STALL_S), total)
            blobs = list(into(header, sizes)) if into else room_for(sizes)
            if [blob.numel() for blob in blobs] != sizes:
                raise ValueError(f"destinations of {[blob.numel() for blob in blobs]} bytes for blobs of {sizes}")
            for number, blob in enumerate(blobs):
                self._receive_blob(number, _view(blob))
            return header, blobs

    def abort(self) -> None:
        """Make a blocked and every later send and receive raise CopyFailed, on both sides. Any thread; at once."""
        with self._ending:
            if not self._aborted:
                self._aborted = True
                with contextlib.suppress(OSError):  # the other side has closed already
                    self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Abort, and free the socket once no thread uses it. Any thread; may be called again."""
        self.abort()
        with self._using:
            self._sock.close()

    def _receive_blob(self, number: int, view: memoryview) -> None:
        running = 0
        for start in range(0, view.nbytes, _CHUNK_BYTES):
            chunk = view[start : start + _CHUNK_BYTES]
            self._fill(chunk, STALL_S)
            running = checksum(chunk, running)
        (announced,) = _SUM.unpack(self._take(_SUM.size, STALL_S))
        if running != announced:
            raise CopyFailed(f"blob {number} of {view.nbytes} bytes has checksum {running:08x}, not {announced:08x}")

    def _send_all(self, view: memoryview) -> None:
        """Send all bytes. Unlike in sendall, the time limit holds for every part and not for the whole."""
        sent = 0
        while sent < view.nbytes:
            sent += self._sock.send(view[sent:])

    def _take(self, size: int, within_s: float) -> bytes:
        buffer = bytearray(size)
        self._fill(memoryview(buffer), within_s)
        return bytes(buffer)

    def _fill(self, view: memoryview, within_s: float) -> None:
        """Fill the view. within_s: seconds for the first bytes; STALL_S holds between later ones."""
        self._sock.settimeout(within_s if within_s < math.inf else None)
        got = 0
        while got < view.nbytes:
            part = self._sock.recv_into(view[got:])
            if part == 0:
                raise CopyFailed("the other side closed the connection, or it was aborted")
            if got == 0:
                self._sock.settimeout(STALL_S)
            got += part
            self.received += part


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CopyFailed(f"copy connection: {error}") from error


def _parse_head(encoded: bytes, total: int) -> tuple[dict[str, Json], list[int]]:
    try:
        head = json.loads(encoded)
        header, sizes = head["header"], head["sizes"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CopyFailed(f"malformed head: {error}") from error
    whole = isinstance(header, dict) and isinstance(sizes, list) and len(sizes) <= MAX_BLOBS
    if not whole or not all(type(size) is int and size >= 0 for size in sizes) or sum(sizes) != total:
        raise CopyFailed(f"the head does not fit the {total} bytes announced")
    return header, sizes


def _view(blob: Tensor) -> memoryview:
    """The memory of a blob. Raises ValueError for anything but a contiguous 1-D uint8 CPU tensor."""
    if blob.dtype != torch.uint8 or blob.dim() != 1 or blob.device.type != "cpu" or not blob.is_contiguous():
        raise ValueError(f"blob is {blob.dtype} {tuple(blob.shape)} on {blob.device}; wanted contiguous 1-D uint8, cpu")
    return blob.detach().numpy().data if blob.numel() else memoryview(bytearray())
