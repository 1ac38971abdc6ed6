"""Whoever has called this worker, until it is known who it is: TLS, the challenge, the hello."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from elastic.messages import node_of
from runtime.hello import Hello, HelloRefused, Inbox, decode_hello, encode_challenge, new_challenge
from runtime.seal import SealedSocket


@dataclass(slots=True)
class Caller:
    """host: its address; empty on this host."""

    host: str
    expires_s: float
    _challenge: str = field(default_factory=new_challenge)
    _challenged: bool = False
    _inbox: Inbox = field(default_factory=Inbox)

    def hear(self, sock: socket.socket) -> Hello | None:
        """The hello once all of it is here: in answer to our challenge, and by the node of whom it says it comes from.

        Raises BlockingIOError while the caller has to say something, HelloRefused, EOFError, and OSError of the socket.
        """
        if isinstance(sock, SealedSocket):
            sock.shake_hands()
        if not self._challenged:
            sock.send(encode_challenge(self._challenge))  # less than the buffer of any socket
            self._challenged = True
        message = self._inbox.read(sock)
        if message is None:
            return None
        hello = decode_hello(message)
        if hello.challenge != self._challenge:
            raise HelloRefused("it answers another challenge")
        if isinstance(sock, SealedSocket):
            sock.check_owner(node_of(hello.worker_id))
        return hello


def host_of(sock: socket.socket) -> str:
    """Of the other side; empty for one on this host."""
    if sock.family == socket.AF_UNIX:
        return ""
    try:
        return str(sock.getpeername()[0])
    except OSError:  # it has hung up
        return ""
