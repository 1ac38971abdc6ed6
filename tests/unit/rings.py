"""Rings whose members are threads of one process."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeVar

from runtime.allreduce.ring.frames import PeerLink
from runtime.allreduce.ring.handshake import Hello, decode_challenge, encode, proven_hello
from runtime.allreduce.ring.listener import Listener, Refused, ServeCopy
from runtime.allreduce.ring.ring import Peer, Ring
from runtime.allreduce.ring.ring_builder import RingSpec, build
from runtime.allreduce.ring.tls import PLAIN, TlsContexts

T = TypeVar("T")
JOB = "job"
TOKEN = "secret"
GENEROUS_S = 60.0


def ignore_copies(sock: socket.socket, hello: Hello) -> None:
    """A serve_copy for listeners which are not asked for copies."""


def listener(
    me: str,
    host: str = "127.0.0.1",
    seal: TlsContexts = PLAIN,
    on_refused: Refused = lambda because, caller: None,
    serve_copy: ServeCopy = ignore_copies,
) -> Listener:
    return Listener(
        host,
        job=JOB,
        me=me,
        token_of=lambda generation: TOKEN if generation == 1 else None,
        serve_copy=serve_copy,
        seal=seal,
        on_refused=on_refused,
    )


def message_of(sock: socket.socket) -> bytes:
    """The body of the next one."""
    with sock.makefile("rb") as file:
        (size,) = struct.unpack(">I", file.read(4))
        return file.read(size)


def rest_of(sock: socket.socket) -> bytes:
    """Everything until the other side closes."""
    said = b""
    with suppress(ConnectionResetError):  # it has closed while there was more of ours to read
        while part := sock.recv(65_536):
            said += part
    return said


def called(sock: socket.socket, hello: Hello, token: str = TOKEN) -> None:
    """Say hello, as an honest caller."""
    sock.sendall(encode(proven_hello(hello, decode_challenge(message_of(sock)), token)))


@contextmanager
def listeners(
    names: Sequence[str], hosts: Sequence[str] | None = None, seals: Sequence[TlsContexts] = ()
) -> Iterator[dict[str, Listener]]:
    with ExitStack() as stack:
        opened = {}
        plain = [PLAIN] * len(names)
        for name, host, seal in zip(names, hosts or ["127.0.0.1"] * len(names), seals or plain, strict=True):
            opened[name] = listener(name, host, seal)
            stack.callback(opened[name].close)
        yield opened


def peers_of(opened: dict[str, Listener]) -> list[Peer]:
    return [Peer(name, *opened[name].address) for name in opened]


def build_one(
    opened: Listener,
    me: str,
    peers: Sequence[Peer],
    *,
    generation: int = 1,
    base: int | None = None,
    plan: str = "plan",
    token: str = TOKEN,
    deadline_s: float = GENEROUS_S,
    cancelled: threading.Event | None = None,
    offer: str = "",
    kept: dict[str, PeerLink] | None = None,
) -> Ring:
    """base: as in RingSpec; None: the generation is no planned one."""
    return build(
        opened,
        RingSpec(
            job=JOB,
            generation=generation,
            base=generation if base is None else base,
            me=me,
            peers=peers,
            plan=plan,
            token=token,
            offer=offer,
        ),
        deadline_s=deadline_s,
        cancelled=cancelled or threading.Event(),
        kept=kept,
    )


def everyone(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Run all at once, a thread each; their results, or the first exception."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.result(GENEROUS_S) for future in futures]


def build_all(opened: dict[str, Listener], generation: int = 1) -> list[Ring]:
    peers = peers_of(opened)
    return everyone(
        [lambda name=name: build_one(opened[name], name, peers, generation=generation) for name in opened]  # type: ignore[misc]
    )


@contextmanager
def rings(
    world_size: int, hosts: Sequence[str] | None = None, seals: Sequence[TlsContexts] = ()
) -> Iterator[list[Ring]]:
    """One built ring, as each of its members sees it; all are aborted first, so a failed test cannot hang."""
    with listeners([f"w{rank}" for rank in range(world_size)], hosts, seals) as opened:
        built = build_all(opened)
        try:
            yield built
        finally:
            for ring in built:
                ring.abort()
            for ring in built:
                ring.close()


def wait_until(fact: Callable[[], bool]) -> None:
    """For facts of the kernel that come with no event. Raises TimeoutError."""
    end_s = time.monotonic() + GENEROUS_S
    while not fact():
        if time.monotonic() > end_s:
            raise TimeoutError
        threading.Event().wait(0.002)


def in_thread(call: Callable[[], T]) -> Future[T]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call)
    pool.shutdown(wait=False)
    return future
