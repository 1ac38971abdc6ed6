"""The listening port of a worker: it accepts connections, checks their hello, and hands them on.

A caller goes through TLS, the challenge and the hello before it is known. Peers with the same address are on the same
host and use the unix socket beside the TCP port (unix_socket.py).
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from elastic.protocol.worker_id import node_of
from runtime.allreduce.ring import handshake
from runtime.allreduce.ring.tls import PLAIN, SealedSocket, TlsContexts
from runtime.allreduce.ring.unix_socket import is_same_user, listen_locally, tune
from runtime.script_end import TorchThread

HELLO_S = 5.0
"""Seconds within which a caller has to send all of its hello; then it is dropped."""
ACCEPT_AGAIN_S = 0.05
"""Seconds for which callers wait at a port that finds no descriptor for them."""
PARKED_S = 60.0
"""Seconds for which a ring connection waits for this worker to begin its generation; above any ring's build time."""
MAX_PENDING = 512
MAX_PENDING_OF_A_HOST = 64
"""Callers that have not sent their hello yet. A caller that sends none takes places of its own host only."""
MAX_PARKED = 256
MAX_UNCHECKED_OF_A_HOST = 8
"""Ring connections for generations that this worker does not know, so that it cannot check the callers. A caller that
finds no place calls again (dialer.py). Within a host, where only processes of its user can call, the limit is
MAX_PENDING_OF_A_HOST: all workers of a large machine may call before this worker knows the generation."""
MAX_COPIES = 256
"""Every newcomer keeps one connection to the donor until it is a member, and newcomers become members together."""
_WAKE, _LISTENING = "wake", "listening"

ServeCopy = Callable[[socket.socket, handshake.Hello], None]
TokenOf = Callable[[int], str | None]
Refused = Callable[[str, str], None]
"""Called with (why, address of the caller)."""


@dataclass(slots=True)
class _Parked:
    """A ring connection that waits. checked: its caller has proved the generation's token. host: as in IncomingPeer."""

    sock: socket.socket
    hello: handshake.Hello
    expires_s: float
    checked: bool
    host: str


class Arrivals:
    """Ring connections of one generation, for its builder. `wake` becomes readable when there is a new one."""

    def __init__(self, take: Callable[[], list[tuple[socket.socket, handshake.Hello]]]) -> None:
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._take = take

    def take(self) -> list[tuple[socket.socket, handshake.Hello]]:
        """The connections since the last call, oldest first, non-blocking; the caller owns and answers them."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake)
        return self._take()


class Listener:
    """Accepts on host, port 0, in one thread, from construction until close().

    host: the address under which peers reach this worker. me: its worker_id. token_of(generation): the members' secret,
    None if unknown here; may be set later, since callers may come at once. serve_copy(sock, hello): called for every
    accepted copy connection in a thread of its own, at most MAX_COPIES at once; sock is blocking, and closed when it
    returns. seal: TLS for connections with other hosts. on_refused: called for every refused caller. Raises OSError if
    host cannot be bound.
    """

    def __init__(
        self,
        host: str,
        *,
        job: str,
        me: str,
        serve_copy: ServeCopy,
        token_of: TokenOf = lambda generation: None,
        seal: TlsContexts = PLAIN,
        on_refused: Refused = lambda because, caller: None,
    ) -> None:
        self._host, self._job, self._me = host, job, me
        self.seal, self._on_refused = seal, on_refused
        self.token_of, self._serve_copy = token_of, serve_copy
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, 0), family=family, backlog=MAX_PENDING)
        self._port: int = listening.getsockname()[1]
        self._sockets = [listening, *listen_locally(host, self._port)]
        self._resting: dict[socket.socket, float] = {}
        """Those that found no descriptor for a caller, and when they are taken up again."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._lock = threading.Lock()
        self._parked: list[_Parked] = []
        self._expecting: dict[int, Arrivals] = {}
        self._floor = 0
        self._copies: dict[threading.Thread, socket.socket] = {}
        self._thread = threading.Thread(target=self._run, name="ring-listener", daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """(host, port) for the peers."""
        return self._host, self._port

    def refused(self, because: str, sock: socket.socket) -> None:
        """Report a refused caller to on_refused. sock: still open."""
        self._on_refused(because, host_of(sock))

    @contextlib.contextmanager
    def expecting(self, generation: int, base: int) -> Iterator[Arrivals]:
        """Receive the ring connections of one generation. Those of generations older than its base are refused from now
        on; planned ones of one base may be built side by side, and members may come to them in any order."""
        arrivals = Arrivals(lambda: self._claim(generation))
        with self._lock:
            self._floor = max(self._floor, base)
            stale = [parked for parked in self._parked if parked.hello.generation < self._floor]
            self._parked = [parked for parked in self._parked if parked.hello.generation >= self._floor]
            self._expecting[generation] = arrivals
        for parked in stale:
            self._refuse(parked.sock, self._too_old(parked.hello))
        try:
            yield arrivals
        finally:
            with self._lock:
                del self._expecting[generation]
            for sock, _ in self._claim(generation):
                sock.close()
            os.close(arrivals.wake)

    def close(self) -> None:
        """Stop accepting, close connections that nothing took, end the copies; returns when the threads are gone."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        with self._lock:
            copies = dict(self._copies)
        for sock in copies.values():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in copies:
            thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        pending: dict[socket.socket, IncomingPeer] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ, _WAKE)
            for listening in self._sockets:
                listening.setblocking(False)
                selector.register(listening, selectors.EVENT_READ, _LISTENING)
            while not self._closing:
                for key, _ in selector.select(self._next_expiry(pending)):
                    if key.data == _LISTENING and isinstance(key.fileobj, socket.socket):
                        self._accept(key.fileobj, pending, selector)
                    elif isinstance(key.fileobj, socket.socket):
                        self._read(key.fileobj, pending, selector)
                self._expire(pending, selector)
        for sock in (*pending, *self._sockets):
            sock.close()
        with self._lock:
            parked, self._parked = self._parked, []
        for entry in parked:
            entry.sock.close()

    def _next_expiry(self, pending: dict[socket.socket, IncomingPeer]) -> float | None:
        with self._lock:
            times = [parked.expires_s for parked in self._parked]
        times += [*self._resting.values(), *(entry.expires_s for entry in pending.values())]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _expire(self, pending: dict[socket.socket, IncomingPeer], selector: selectors.BaseSelector) -> None:
        now_s = time.monotonic()
        for listening in [sock for sock, until_s in self._resting.items() if until_s <= now_s]:
            del self._resting[listening]
            selector.register(listening, selectors.EVENT_READ, _LISTENING)
        for sock in [sock for sock, entry in pending.items() if entry.expires_s <= now_s]:
            del pending[sock]
            selector.unregister(sock)
            self.refused(f"no hello within {HELLO_S:g} s", sock)
            sock.close()
        with self._lock:
            over = [parked for parked in self._parked if parked.expires_s <= now_s]
            self._parked = [parked for parked in self._parked if parked.expires_s > now_s]
        for parked in over:
            parked.sock.close()

    def _accept(
        self, listening: socket.socket, pending: dict[socket.socket, IncomingPeer], selector: selectors.BaseSelector
    ) -> None:
        try:
            sock, _ = listening.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # the caller stays there, so select() would return at once
                selector.unregister(listening)
                self._resting[listening] = time.monotonic() + ACCEPT_AGAIN_S
            return  # or it hung up, and calls again
        host = host_of(sock)
        of_host = sum(entry.host == host for entry in pending.values())
        if len(pending) >= MAX_PENDING or of_host >= MAX_PENDING_OF_A_HOST or not is_same_user(sock):
            self.refused("too many callers that have said nothing yet, or another user", sock)
            sock.close()
            return
        sock.setblocking(False)
        try:
            sock = self.seal.as_called(sock)
        except OSError as error:  # the caller has sent bytes and hung up already
            self._on_refused(f"the caller's TLS: {getattr(error, 'reason', None) or error}", host)
            sock.close()
            return
        pending[sock] = IncomingPeer(host, time.monotonic() + HELLO_S)
        selector.register(sock, selectors.EVENT_READ, None)
        self._read(sock, pending, selector)

    def _read(
        self, sock: socket.socket, pending: dict[socket.socket, IncomingPeer], selector: selectors.BaseSelector
    ) -> None:
        try:
            hello = pending[sock].hear(sock)
            if hello is None:
                return
            checked = self._check(hello)
        except BlockingIOError:
            return
        except handshake.HelloRefused as refusal:
            refused: str | None = str(refusal)
        except ssl.SSLError as error:
            self.refused(f"the caller's TLS: {error.reason or error}", sock)
            refused = None
        except (OSError, EOFError):
            refused = None
        except Exception as error:  # of token_of, say: the thread goes on for the other callers
            self.refused(f"its hello could not be checked: {error!r}", sock)
            refused = None
        else:
            host = pending.pop(sock).host
            selector.unregister(sock)
            self._hand_over(sock, hello, host, checked)
            return
        del pending[sock]
        selector.unregister(sock)
        if refused is None:
            sock.close()
        else:
            self._refuse(sock, refused)

    def _refuse(self, sock: socket.socket, because: str) -> None:
        self.refused(because, sock)
        with contextlib.suppress(OSError):
            sock.send(handshake.encode_refusal(because))
        sock.close()

    def _check(self, hello: handshake.Hello) -> bool:
        """Whether the caller has proved the token; False: the token is not known here yet. Raises HelloRefused."""
        if hello.job != self._job:
            raise handshake.HelloRefused(f"this worker belongs to job {self._job!r}")
        if hello.to != self._me:
            raise handshake.HelloRefused(f"this is {self._me}, not {hello.to}")
        token = self.token_of(hello.generation)
        if token is None and hello.purpose == "copy":
            raise handshake.HelloRefused(f"{self._me} does not know generation {hello.generation}")
        if token is not None and not handshake.is_proven(hello, token):
            raise handshake.HelloRefused("the token is not the generation's")
        return token is not None

    def _hand_over(self, sock: socket.socket, hello: handshake.Hello, host: str, checked: bool) -> None:
        tune(sock)
        if hello.purpose == "ring":
            self._park(_Parked(sock, hello, time.monotonic() + PARKED_S, checked, host))
        else:
            self._start_copy(sock, hello)

    def _park(self, new: _Parked) -> None:
        """Park a ring connection, or turn it away; without an answer if the caller shall call again."""
        dropped, because = new, ""
        of_host = MAX_UNCHECKED_OF_A_HOST if new.host else MAX_PENDING_OF_A_HOST
        with self._lock:
            unchecked = [parked for parked in self._parked if not parked.checked]
            if new.hello.generation < self._floor:
                because = self._too_old(new.hello)
            elif new.checked or sum(parked.host == new.host for parked in unchecked) < of_host:
                self._parked.append(new)
                arrivals = self._expecting.get(new.hello.generation)
                if arrivals is not None:
                    os.eventfd_write(arrivals.wake, 1)
                if len(self._parked) <= MAX_PARKED:
                    return
                dropped = unchecked[0] if unchecked else self._parked[0]
                self._parked.remove(dropped)
        if because:
            self._refuse(new.sock, because)
            return
        self.refused(f"too many that wait for generations which {self._me} does not know", dropped.sock)
        dropped.sock.close()

    def _claim(self, generation: int) -> list[tuple[socket.socket, handshake.Hello]]:
        with self._lock:
            mine = [(parked.sock, parked.hello) for parked in self._parked if parked.hello.generation == generation]
            self._parked = [parked for parked in self._parked if parked.hello.generation != generation]
        return mine

    def _too_old(self, hello: handshake.Hello) -> str:
        return f"generation {hello.generation} is over, {self._me} is at {self._floor}"

    def _start_copy(self, sock: socket.socket, hello: handshake.Hello) -> None:
        thread = TorchThread(target=self._copy, args=(sock, hello), name=f"copy-{hello.worker_id}")
        with self._lock:
            full = len(self._copies) >= MAX_COPIES
            if not full:
                self._copies[thread] = sock
        if full:
            self._refuse(sock, f"{MAX_COPIES} copies are running here already")
            return
        thread.start()

    def _copy(self, sock: socket.socket, hello: handshake.Hello) -> None:
        try:
            sock.settimeout(HELLO_S)
            welcome = handshake.proven_welcome(
                handshake.Welcome(hello.generation, self._me, hello.plan), hello, self.token_of(hello.generation) or ""
            )
            with contextlib.suppress(OSError):  # if the caller hung up, serve_copy finds the end at once
                sock.sendall(handshake.encode(welcome))
            sock.settimeout(None)
            self._serve_copy(sock, hello)
        finally:
            with self._lock:
                del self._copies[threading.current_thread()]
            sock.close()


@dataclass(slots=True)
class IncomingPeer:
    """A caller before its hello. host: its address; "" on this host."""

    host: str
    expires_s: float
    _challenge: str = field(default_factory=handshake.new_challenge)
    _challenged: bool = False
    _inbox: handshake.Inbox = field(default_factory=handshake.Inbox)

    def hear(self, sock: socket.socket) -> handshake.Hello | None:
        """The hello once it is complete: it answers our challenge, and its worker is on the certificate's node.

        Raises BlockingIOError while the caller has more to send, HelloRefused, EOFError, and OSError of the socket.
        """
        if isinstance(sock, SealedSocket):
            sock.shake_hands()
        if not self._challenged:
            sock.send(handshake.encode_challenge(self._challenge))  # less than the buffer of any socket
            self._challenged = True
        message = self._inbox.read(sock)
        if message is None:
            return None
        hello = handshake.decode_hello(message)
        if hello.challenge != self._challenge:
            raise handshake.HelloRefused("it answers another challenge")
        if isinstance(sock, SealedSocket):
            sock.check_owner(node_of(hello.worker_id))
        return hello


def host_of(sock: socket.socket) -> str:
    """The address of the other side; "" if it is on this host."""
    if sock.family == socket.AF_UNIX:
        return ""
    try:
        return str(sock.getpeername()[0])
    except OSError:  # the other side has hung up
        return ""
