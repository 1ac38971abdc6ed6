"""The one door of a worker: it accepts connections, checks their hello, and hands each to whoever waits for it.

Peers with the same address are on the same host and use an abstract unix socket (Linux) beside the TCP port: it
needs no file, vanishes with the process, and moves twice the bytes per CPU second (docs/decisions/own-mesh.md).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from runtime import contact
from runtime.hello import (
    Hello,
    HelloRefused,
    Inbox,
    Welcome,
    decode_hello,
    encode_refusal,
    encode_welcome,
    same_token,
)

HELLO_S = 5.0
"""A caller that has not said all of its hello by then is dropped."""
PARKED_S = 60.0
"""How long a ring connection waits for this worker to begin its generation. Above any ring's build time."""
MAX_PENDING = 64
MAX_PARKED = 256
MAX_COPIES = 256
"""Every newcomer keeps one with the donor until it is a member, and they become members together."""
LOCAL_BUFFER_BYTES = 1 << 20

_WAKE, _DOOR = "wake", "door"
_CREDENTIALS = struct.Struct("3i")

ServeCopy = Callable[[socket.socket, Hello], None]
TokenOf = Callable[[int], str | None]


@dataclass(slots=True)
class _Pending:
    expires_s: float
    inbox: Inbox = field(default_factory=Inbox)


@dataclass(slots=True)
class _Parked:
    sock: socket.socket
    hello: Hello
    expires_s: float


class Arrivals:
    """Ring connections of one generation, for its builder. `wake` becomes readable when there is a new one."""

    def __init__(self, take: Callable[[], list[tuple[socket.socket, Hello]]]) -> None:
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._take = take

    def take(self) -> list[tuple[socket.socket, Hello]]:
        """What arrived since the last call, oldest first, non-blocking; the caller owns and answers it."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake)
        return self._take()


class Listener:
    """Accepts on host, port 0, in one thread, from construction until close().

    host: the address under which peers reach this worker; me: its worker_id. token_of(generation): the secret its
    members share, None if unknown here. serve_copy(sock, hello): called for every accepted copy connection in a
    thread of its own, at most MAX_COPIES at once; sock is blocking, and closed when it returns.
    Raises OSError if host cannot be bound.
    """

    def __init__(self, host: str, *, job: str, me: str, token_of: TokenOf, serve_copy: ServeCopy) -> None:
        self._host, self._job, self._me = host, job, me
        self._token_of, self._serve_copy = token_of, serve_copy
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        door = socket.create_server((host, 0), family=family, backlog=MAX_PENDING)
        self._port: int = door.getsockname()[1]
        self._doors = [door, *_local_door(host, self._port)]
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
        """(host, port) as published to the peers."""
        return self._host, self._port

    @contextlib.contextmanager
    def expecting(self, generation: int) -> Iterator[Arrivals]:
        """Receive the ring connections of one generation; those of older ones are refused from now on."""
        arrivals = Arrivals(lambda: self._claim(generation))
        with self._lock:
            self._floor = max(self._floor, generation)
            stale = [parked for parked in self._parked if parked.hello.generation < self._floor]
            self._parked = [parked for parked in self._parked if parked.hello.generation >= self._floor]
            self._expecting[generation] = arrivals
        for parked in stale:
            _refuse(parked.sock, self._too_old(parked.hello))
        try:
            yield arrivals
        finally:
            with self._lock:
                del self._expecting[generation]
            for sock, _ in self._claim(generation):
                sock.close()
            os.close(arrivals.wake)

    def close(self) -> None:
        """Stop accepting, close what was accepted for nobody, end the copies; returns when the threads are gone."""
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
        pending: dict[socket.socket, _Pending] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ, _WAKE)
            for door in self._doors:
                door.setblocking(False)
                selector.register(door, selectors.EVENT_READ, _DOOR)
            while not self._closing:
                for key, _ in selector.select(self._next_expiry(pending)):
                    if key.data == _DOOR and isinstance(key.fileobj, socket.socket):
                        self._accept(key.fileobj, pending, selector)
                    elif isinstance(key.fileobj, socket.socket):
                        self._read(key.fileobj, pending, selector)
                self._expire(pending, selector)
        for sock in (*pending, *self._doors):
            sock.close()
        with self._lock:
            parked, self._parked = self._parked, []
        for entry in parked:
            entry.sock.close()

    def _next_expiry(self, pending: dict[socket.socket, _Pending]) -> float | None:
        with self._lock:
            times = [parked.expires_s for parked in self._parked]
        times += [entry.expires_s for entry in pending.values()]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _expire(self, pending: dict[socket.socket, _Pending], selector: selectors.BaseSelector) -> None:
        now_s = time.monotonic()
        for sock in [sock for sock, entry in pending.items() if entry.expires_s <= now_s]:
            del pending[sock]
            selector.unregister(sock)
            sock.close()
        with self._lock:
            over = [parked for parked in self._parked if parked.expires_s <= now_s]
            self._parked = [parked for parked in self._parked if parked.expires_s > now_s]
        for parked in over:
            parked.sock.close()

    def _accept(
        self, door: socket.socket, pending: dict[socket.socket, _Pending], selector: selectors.BaseSelector
    ) -> None:
        try:
            sock, _ = door.accept()
        except OSError:
            return  # the caller hung up first, or there is no descriptor left; it will call again
        if len(pending) >= MAX_PENDING or not _same_user(sock):
            sock.close()
            return
        sock.setblocking(False)
        pending[sock] = _Pending(time.monotonic() + HELLO_S)
        selector.register(sock, selectors.EVENT_READ, None)

    def _read(
        self, sock: socket.socket, pending: dict[socket.socket, _Pending], selector: selectors.BaseSelector
    ) -> None:
        try:
            message = pending[sock].inbox.read(sock)
            if message is None:
                return
            hello = decode_hello(message)
            self._check(hello)
        except HelloRefused as refusal:
            refused: str | None = str(refusal)
        except (OSError, EOFError):
            refused = None
        else:
            del pending[sock]
            selector.unregister(sock)
            self._hand_over(sock, hello)
            return
        del pending[sock]
        selector.unregister(sock)
        if refused is None:
            sock.close()
        else:
            _refuse(sock, refused)

    def _check(self, hello: Hello) -> None:
        if hello.job != self._job:
            raise HelloRefused(f"this worker belongs to job {self._job!r}")
        if hello.to != self._me:
            raise HelloRefused(f"this is {self._me}, not {hello.to}")
        if hello.purpose == "copy":
            token = self._token_of(hello.generation)
            if token is None:
                raise HelloRefused(f"{self._me} does not know generation {hello.generation}")
            if not same_token(token, hello.token):
                raise HelloRefused("the token is not the generation's")

    def _hand_over(self, sock: socket.socket, hello: Hello) -> None:
        tune(sock)
        if hello.purpose == "ring":
            self._park(sock, hello)
        else:
            self._start_copy(sock, hello)

    def _park(self, sock: socket.socket, hello: Hello) -> None:
        dropped: _Parked | None = None
        with self._lock:
            if hello.generation < self._floor:
                reason = self._too_old(hello)
            else:
                reason = ""
                if len(self._parked) >= MAX_PARKED:
                    dropped = self._parked.pop(0)
                self._parked.append(_Parked(sock, hello, time.monotonic() + PARKED_S))
                arrivals = self._expecting.get(hello.generation)
                if arrivals is not None:
                    os.eventfd_write(arrivals.wake, 1)
        if reason:
            _refuse(sock, reason)
        if dropped is not None:
            dropped.sock.close()

    def _claim(self, generation: int) -> list[tuple[socket.socket, Hello]]:
        with self._lock:
            mine = [(parked.sock, parked.hello) for parked in self._parked if parked.hello.generation == generation]
            self._parked = [parked for parked in self._parked if parked.hello.generation != generation]
        return mine

    def _too_old(self, hello: Hello) -> str:
        return f"generation {hello.generation} is over, {self._me} is at {self._floor}"

    def _start_copy(self, sock: socket.socket, hello: Hello) -> None:
        thread = threading.Thread(target=self._copy, args=(sock, hello), name=f"copy-{hello.worker_id}", daemon=True)
        with self._lock:
            full = len(self._copies) >= MAX_COPIES
            if not full:
                self._copies[thread] = sock
        if full:
            _refuse(sock, f"{MAX_COPIES} copies are running here already")
            return
        thread.start()

    def _copy(self, sock: socket.socket, hello: Hello) -> None:
        try:
            sock.settimeout(HELLO_S)
            with contextlib.suppress(OSError):  # a caller that hung up: whoever serves it finds the end at once
                sock.sendall(encode_welcome(Welcome(hello.generation, self._me, hello.plan, hello.token)))
            sock.settimeout(None)
            self._serve_copy(sock, hello)
        finally:
            with self._lock:
                del self._copies[threading.current_thread()]
            sock.close()


def connect_local(host: str, port: int) -> socket.socket | None:
    """A connection to the listener of the same host and user at (host, port), or None if TCP must be used."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        sock.connect(_local_name(host, port))
    except OSError:
        sock.close()
        return None
    if not _same_user(sock):
        sock.close()
        return None
    tune(sock)
    return sock


def tune(sock: socket.socket) -> None:
    """Socket options for bulk data. TCP buffers are left to the kernel, which sizes them for the path's delay."""
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LOCAL_BUFFER_BYTES)
    else:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        contact.probe(sock)


def _local_name(host: str, port: int) -> str:
    return f"\0elastic-ring/{host}/{port}"


def _local_door(host: str, port: int) -> list[socket.socket]:
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        door.bind(_local_name(host, port))
    except OSError:  # the name is taken by another user: TCP serves alone
        door.close()
        return []
    door.listen(MAX_PENDING)
    return [door]


def _same_user(sock: socket.socket) -> bool:
    """An abstract name has no file mode, so the kernel's word about the other side takes its place."""
    if sock.family != socket.AF_UNIX:
        return True
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    return bool(uid == os.geteuid())


def _refuse(sock: socket.socket, reason: str) -> None:
    with contextlib.suppress(OSError):
        sock.send(encode_refusal(reason))
    sock.close()
