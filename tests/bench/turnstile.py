"""Lets several training jobs live at once but compute in turns, so that none pays its start-up inside a measurement.

A worker passes the turnstile before each step, and waits there, without using CPU, once it has reached the limit that
the driver set. Limits are step numbers, so all workers of a job stop at the same step. Passing costs one system call.

On the wire (SOCK_SEQPACKET, one message a packet): the worker says its name, then each step at which it waits; the
driver says the limit, at once and whenever it changes.
"""

from __future__ import annotations

import math
import os
import select
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

OPEN = 1 << 62
"""The limit that stops nobody."""

CHECK_S = 0.5
"""How often a waiting driver looks whether the job still lives."""

_NUMBER = struct.Struct("<q")
_CREDENTIALS = struct.Struct("3i")
_PACKET_MAX = 256


class Turnstile:
    """The worker's side."""

    def __init__(self, path: str, name: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(path)
        self._socket.send(name.encode())
        self._limit = self._receive()

    def close(self) -> None:
        self._socket.close()

    def wait(self, step: int) -> None:
        """Return once this step may begin. Ends the process if the driver is gone."""
        while select.select([self._socket], [], [], 0)[0]:
            self._limit = self._receive()
        if step < self._limit:
            return
        self._socket.send(_NUMBER.pack(step))
        while step >= self._limit:
            self._limit = self._receive()

    def _receive(self) -> int:
        packet = self._socket.recv(_NUMBER.size)
        if not packet:
            raise SystemExit("the driver of this benchmark is gone")
        return int(_NUMBER.unpack(packet)[0])


@dataclass(slots=True)
class _Worker:
    name: str
    pid: int
    waits_at: int = -1


class Gate:
    """The driver's side: one for each job. One thread listens; every method may be called from any other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._changed = threading.Condition()
        self._workers: dict[socket.socket, _Worker] = {}
        self._limit = 0
        self._wake, self._waker = socket.socketpair()
        self._closed = False
        self._thread = threading.Thread(target=self._listen, name="gate")
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        self._waker.send(b"\0")
        self._thread.join()
        for sock in (*self._workers, self._listener, self._wake, self._waker):
            sock.close()

    @property
    def workers(self) -> dict[str, int]:
        """Pids of the workers which are connected, by name."""
        with self._changed:
            return {worker.name: worker.pid for worker in self._workers.values()}

    def allow(self, limit: int) -> None:
        """Steps below the limit may begin."""
        with self._changed:
            self._limit = limit
            for sock in self._workers:
                self._tell(sock)

    def await_stop(self, count: int, within_s: float, check: Callable[[], None]) -> None:
        """Until `count` workers wait at the limit. check: called now and then, to raise if the job has ended."""
        with self._changed:
            for _ in range(math.ceil(within_s / CHECK_S)):
                check()
                if self._changed.wait_for(lambda: self._waiting() >= count, timeout=CHECK_S):
                    return
            raise TimeoutError(f"{self._waiting()} of {count} workers stopped at step {self._limit} in {within_s} s")

    def _waiting(self) -> int:
        return sum(worker.waits_at == self._limit for worker in self._workers.values())

    def _tell(self, sock: socket.socket) -> None:
        try:
            sock.send(_NUMBER.pack(self._limit))
        except OSError:
            return  # it has died; the listening thread takes it off the list

    def _listen(self) -> None:
        while True:
            ready, _, _ = select.select([self._listener, self._wake, *self._workers], [], [])
            if self._closed:
                return
            with self._changed:
                for sock in ready:
                    if sock is self._listener:
                        self._admit()
                    elif sock is not self._wake:
                        self._hear(sock)
                self._changed.notify_all()

    def _admit(self) -> None:
        sock, _ = self._listener.accept()
        name = sock.recv(_PACKET_MAX).decode()
        pid, _, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        self._workers[sock] = _Worker(name, pid)
        self._tell(sock)

    def _hear(self, sock: socket.socket) -> None:
        try:
            packet = sock.recv(_NUMBER.size)
        except ConnectionResetError:
            packet = b""
        if packet:
            self._workers[sock].waits_at = int(_NUMBER.unpack(packet)[0])
        else:
            del self._workers[sock]
            sock.close()


def enter(name: str) -> Turnstile:
    """The turnstile of this script's driver."""
    return Turnstile(os.environ["BENCH_GATE"], name)
