"""TLS on the connections between workers of different hosts, where the node has certificates.

A sealed socket is used as any other: not ready is BlockingIOError, and bytes go to and from several buffers at once.
Both sides show the certificate of a worker, which names its node; a connection within a host and a user needs none.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from elastic.security.roles import Role, from_uris
from runtime.ring.handshake import HelloRefused

RECORD_BYTES = 1 << 14
"""What TLS sends at once. What could not be sent must be offered again as it was, so pieces are of this size."""


class SealedSocket(ssl.SSLSocket):
    """Made by TlsContexts, not yet shaken hands. Used by one thread at a time; `shutdown` may come from others."""

    node = ""
    """That the other side's certificate names, once hands are shaken."""

    def shake_hands(self) -> None:
        """Go on with it; nothing once that is done. Raises BlockingIOError while the other side has to say something,
        HelloRefused for a certificate that is none of a worker, and OSError."""
        if self.node:
            return
        try:
            self.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error
        names = cast(dict[str, Any], self.getpeercert() or {}).get("subjectAltName", ())
        identity = from_uris(name for kind, name in names if kind == "URI")
        if identity is None or identity.role is not Role.WORKER:
            raise HelloRefused(f"a certificate of {identity or 'no role'}, where a worker's is wanted")
        self.node = identity.name

    def check_owner(self, node: str) -> None:
        """Raises HelloRefused unless the other side is that node."""
        if self.node != node:
            raise HelloRefused(f"the certificate is that of node {self.node}, not of {node!r:.64}")

    def send(self, data: Any, flags: int = 0) -> int:
        try:
            return super().send(data, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error

    def sendmsg(self, buffers: Iterable[Any]) -> int:  # type: ignore[override]  # ssl has none
        """As much as is taken at once of the bytes in these buffers, which are the same when they are offered again."""
        rest, sent = [memoryview(buffer) for buffer in buffers], 0
        while rest:
            piece = _first(rest)
            try:
                sent += self.send(piece)
            except BlockingIOError:
                if sent:
                    return sent
                raise
            _drop(rest, len(piece))
        return sent

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        try:
            return super().recv(buflen, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        try:
            return super().recv_into(buffer, nbytes, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error

    def recvmsg_into(self, buffers: Iterable[Any]) -> Any:  # type: ignore[override]  # ssl has none
        """Fill them one after the other; the number of bytes comes first, as of a plain socket."""
        got = 0
        for buffer in buffers:
            view, filled = memoryview(buffer), 0
            while filled < len(view):
                try:
                    part = self.recv_into(view[filled:])
                except BlockingIOError:
                    if got:
                        return got, [], 0, None
                    raise
                if part == 0:
                    return got, [], 0, None
                got, filled = got + part, filled + part
        return got, [], 0, None

    def shutdown(self, how: int) -> None:
        """Shut down the connection below. A thread that is within a call finds it ended, and ends the TLS session."""
        socket.socket.shutdown(self, how)


class TlsContexts:
    """directory: of this node's certificates; None: nothing is sealed. New certificates are used from the next
    connection on. From any thread. Raises ConfigError if they cannot be used."""

    def __init__(self, directory: Path | None = None) -> None:
        self._lock = threading.Lock()
        self._keyring: Any = None
        self._made: tuple[Any, dict[bool, ssl.SSLContext]] = (None, {})
        if directory is not None:
            from elastic.security.keyring import of_role  # most jobs have no certificates, and need not read any

            self._keyring = of_role(directory, Role.WORKER)

    def as_caller(self, sock: socket.socket) -> socket.socket:
        """Takes the socket over."""
        return self._wrap(sock, called=False)

    def as_called(self, sock: socket.socket) -> socket.socket:
        """Takes the socket over; one of this host is left as it is."""
        return self._wrap(sock, called=True)

    def _wrap(self, sock: socket.socket, *, called: bool) -> socket.socket:
        if self._keyring is None or sock.family == socket.AF_UNIX:
            return sock
        return self._context(called).wrap_socket(sock, server_side=called, do_handshake_on_connect=False)

    def _context(self, called: bool) -> ssl.SSLContext:
        with self._lock:
            current = self._keyring.current()
            if self._made[0] is not current:
                self._made = (current, {})
            contexts = self._made[1]
            if called not in contexts:
                contexts[called] = current.context(called=called)
                contexts[called].sslsocket_class = SealedSocket
            return contexts[called]


PLAIN = TlsContexts()


def _first(buffers: list[memoryview]) -> memoryview | bytes:
    """One record's worth, the same for the same buffers."""
    if len(buffers[0]) >= RECORD_BYTES or len(buffers) == 1:
        return buffers[0][:RECORD_BYTES]
    piece = b""
    for buffer in buffers:
        piece += buffer[: RECORD_BYTES - len(piece)]
        if len(piece) == RECORD_BYTES:
            break
    return piece


def _drop(buffers: list[memoryview], size: int) -> None:
    while buffers and size >= len(buffers[0]):
        size -= len(buffers.pop(0))
    if size:
        buffers[0] = buffers[0][size:]
