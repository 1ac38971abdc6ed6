"""TLS on the connections between workers of different hosts, if the node has certificates.

A sealed socket, with TLS, is used as any other: it raises BlockingIOError if it is not ready, and takes and fills
several buffers at once. Both sides show the certificate of a worker, which names its node; connections within a host
and user need none.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar, cast

from elastic.errors import CertificateOver
from elastic.security.roles import Role, from_uris
from runtime.allreduce.ring.handshake import HelloRefused

RECORD_BYTES = 1 << 14
"""Bytes that TLS sends at once, and the size of pieces: unsent bytes must be offered again unchanged."""

RENEWED_POLL_S = 1.0
"""Seconds between two looks whether a certificate that is over has been replaced."""


P = ParamSpec("P")
T = TypeVar("T")


def _not_waiting(method: Callable[P, T]) -> Callable[P, T]:
    """The method, but that it raises BlockingIOError where ssl has an error of its own."""

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error

    return call


class SealedSocket(ssl.SSLSocket):
    """Made by TlsContexts, before its handshake. Used by one thread at a time; `shutdown` may come from others."""

    node = ""
    """The node that the other side's certificate names, after the handshake."""

    def shake_hands(self) -> None:
        """Go on with the handshake; does nothing once it is done. Raises BlockingIOError while the other side has to
        send, HelloRefused for a certificate that is not a worker's, and OSError."""
        if self.node:
            return
        self.do_handshake()
        names = cast(dict[str, Any], self.getpeercert() or {}).get("subjectAltName", ())
        identity = from_uris(name for kind, name in names if kind == "URI")
        if identity is None or identity.role is not Role.WORKER:
            raise HelloRefused(f"a certificate of {identity or 'no role'}, where a worker's is wanted")
        self.node = identity.name

    def check_owner(self, node: str) -> None:
        """Raise HelloRefused unless the other side is that node."""
        if self.node != node:
            raise HelloRefused(f"the certificate is that of node {self.node}, not of {node!r:.64}")

    do_handshake = _not_waiting(ssl.SSLSocket.do_handshake)
    send = _not_waiting(ssl.SSLSocket.send)
    recv = _not_waiting(ssl.SSLSocket.recv)
    recv_into = _not_waiting(ssl.SSLSocket.recv_into)

    def sendmsg(self, buffers: Iterable[Any]) -> int:  # type: ignore[override]  # ssl has none
        """Send as many bytes of these buffers as the socket takes; the rest must be offered again unchanged."""
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

    def recvmsg_into(self, buffers: Iterable[Any]) -> Any:  # type: ignore[override]  # ssl has none
        """Fill the buffers one after the other; the number of bytes comes first, as with a plain socket."""
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
        """Shut down the connection below. A thread inside a call finds it ended, and ends the TLS session."""
        socket.socket.shutdown(self, how)


class TlsContexts:
    """directory: of this node's certificates; None: no TLS. New certificates are used from the next connection on. Any
    thread. Raises ConfigError if the certificates cannot be used."""

    def __init__(self, directory: Path | None = None) -> None:
        self._lock = threading.Lock()
        self._keyring: Any = None
        self._made: tuple[Any, dict[bool, ssl.SSLContext]] = (None, {})
        if directory is not None:
            from elastic.security.keyring import of_role  # most jobs have no certificates, and need not read any

            self._keyring = of_role(directory, Role.WORKER)

    @classmethod
    def when_valid(cls, directory: Path | None, waits: Callable[[str], None]) -> Self:
        """Wait for another certificate if that of the node is over: a worker that ended for that would end again at
        once, and its slot would be given up for good. waits: called once, with the reason."""
        said = False
        while True:
            try:
                return cls(directory)
            except CertificateOver as error:
                if not said:
                    waits(str(error))
                said = True
            time.sleep(RENEWED_POLL_S)

    def as_caller(self, sock: socket.socket) -> socket.socket:
        """The socket for the calling side, which replaces `sock`."""
        return self._wrap(sock, called=False)

    def as_called(self, sock: socket.socket) -> socket.socket:
        """The socket for the called side, which replaces `sock`; a socket of this host is not changed."""
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
    """One record's worth of bytes, the same for the same buffers."""
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
