"""Calling one peer: connect, say hello, read the answer, without blocking; tries again while the peer is not there."""

from __future__ import annotations

import errno
import math
import select
import socket
import time

from elastic.protocol.worker_id import node_of
from runtime.allreduce.ring import handshake
from runtime.allreduce.ring.frames import LinkError, PeerLink
from runtime.allreduce.ring.tls import PLAIN, SealedSocket, TlsContexts
from runtime.allreduce.ring.unix_socket import connect_local, tune

_RETRY_MIN_S = 0.01
_RETRY_MAX_S = 0.2
KEPT_S = 1.0
"""Seconds that a peer has for its challenge on a connection that was kept; then it is called anew. It has not taken the
connection for one of the new ring by then: it would have to hear a hello."""


class Dial:
    """A call that `advance` drives until it returns a connection. hello: without its proof, which is made from `token`.
    local: try the unix socket of this host first, which needs no seal. kept: the connection of the ring before, which
    is tried first, and belongs to this call; `leave` was said on it."""

    def __init__(
        self,
        host: str,
        port: int,
        hello: handshake.Hello,
        token: str,
        *,
        local: bool,
        seal: TlsContexts = PLAIN,
        kept: PeerLink | None = None,
    ) -> None:
        self._host, self._port, self._hello, self._local = host, port, hello, local
        self._token, self._seal = token, seal
        self._kept, self._kept_until_s = kept, time.monotonic() + KEPT_S
        self._challenged = False
        self._sock: socket.socket | None = None
        self._connected = False
        self._unsent = b""
        self._inbox = handshake.Inbox()
        self._retry_s = _RETRY_MIN_S
        self.retry_at_s = 0.0
        self.problem = "no answer"
        self.offer = ""
        """The offer of the peer that has accepted: see handshake.Welcome."""
        self.nobody_listens = False
        """Whether the host has answered that no process listens on the port."""

    def fileno(self) -> int:
        """The descriptor that `advance` waits for; -1: it waits until retry_at_s."""
        waits_for = self._kept or self._sock
        return -1 if waits_for is None else waits_for.fileno()

    def register(self, poller: select.poll) -> None:
        """Register the event of that descriptor that `advance` waits for, if there is one."""
        if (descriptor := self.fileno()) >= 0:
            sends = self._kept is None and (not self._connected or bool(self._unsent))
            poller.register(descriptor, select.POLLOUT if sends else select.POLLIN)

    def advance(self, now_s: float) -> socket.socket | None:
        """The non-blocking connection once the peer has accepted; the caller owns it then.

        Raises HelloRefused if the peer refused: another call would not help.
        """
        try:
            if self._kept is not None and not self._take_kept(self._kept, now_s):
                return None
            if self._sock is None and now_s >= self.retry_at_s:
                self._open()
            if self._sock is None or not self._finish_connect(self._sock):
                return None
            if isinstance(self._sock, SealedSocket):
                self._sock.shake_hands()
                self._sock.check_owner(node_of(self._hello.to))
            if not self._challenged:
                self._answer(self._inbox.read(self._sock))
            if not self._challenged and now_s >= self._kept_until_s:
                raise EOFError("no challenge on the connection that was kept")
            if self._unsent:
                self._unsent = self._unsent[self._sock.send(self._unsent) :]
            message = self._inbox.read(self._sock) if self._challenged else None
            if message is None:
                return None
            welcome = handshake.decode_answer(message)
            handshake.check_welcome(welcome, self._hello, self._token)
            self.offer = welcome.offer
        except BlockingIOError:
            return None
        except (OSError, EOFError) as error:
            self._try_later(now_s, str(error))
            return None
        except handshake.HelloRefused:
            self.close()
            raise
        sock, self._sock = self._sock, None
        return sock

    def _answer(self, challenge: bytes | None) -> None:
        if challenge is None:
            return
        self._hello = handshake.proven_hello(self._hello, handshake.decode_challenge(challenge), self._token)
        self._unsent, self._inbox, self._challenged = handshake.encode(self._hello), handshake.Inbox(), True

    def _take_kept(self, kept: PeerLink, now_s: float) -> bool:
        """Whether it is clear what becomes of the kept connection."""
        try:
            self._sock = kept.drain()
            if self._sock is None and not kept.ended and now_s < self._kept_until_s:
                return False
        except LinkError:
            pass  # as good as closed
        self._kept, self._connected = None, self._sock is not None
        if self._sock is None:
            kept.close()
        return True

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _open(self) -> None:
        self._kept_until_s = math.inf
        self._unsent, self._inbox, self._challenged = b"", handshake.Inbox(), False
        self._sock = connect_local(self._host, self._port) if self._local else None
        self._connected = self._sock is not None
        if self._sock is None:
            family = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)[0][0]
            self._sock = socket.socket(family, socket.SOCK_STREAM)
            self._sock.setblocking(False)

    def _finish_connect(self, sock: socket.socket) -> bool:
        if self._connected:
            return True
        code = sock.connect_ex((self._host, self._port))
        if code in (errno.EINPROGRESS, errno.EALREADY):
            return False
        self.nobody_listens = code == errno.ECONNREFUSED
        if code not in (0, errno.EISCONN):
            raise OSError(code, errno.errorcode.get(code, str(code)))
        self._connected = True
        tune(sock)
        self._sock = self._seal.as_caller(sock)
        return True

    def _try_later(self, now_s: float, problem: str) -> None:
        self.close()
        self.problem = problem
        self.retry_at_s = now_s + self._retry_s
        self._retry_s = min(2 * self._retry_s, _RETRY_MAX_S)
