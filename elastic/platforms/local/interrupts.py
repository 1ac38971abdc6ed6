"""Signals that ask a command to stop, as something to wait for."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self


class Interrupted(BaseException):
    """A signal that asks the command to stop came while nothing was running yet."""


class Signals:
    """Ctrl-C, SIGTERM and SIGHUP as something to wait for: `reader` becomes readable. SIGHUP stays ignored where
    it was, under nohup. Main thread only."""

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)
        self.received: list[signal.Signals] = []
        self.asked = False
        """Whether one has come, also if it was taken from `received` since."""
        self.notices: list[int] = []
        """Signals of batch systems that have come, which each agent has to get."""
        self._raising = False

    def __enter__(self) -> Self:
        under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        numbers = [number for number in self.NUMBERS if not (under_nohup and number is signal.SIGHUP)]
        self._handlers = {number: signal.signal(number, self._handle) for number in numbers}
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.reader.close()
        self._writer.close()

    def wake(self) -> None:
        """Make `reader` readable; from any thread."""
        try:
            self._writer.send(b"\0")
        except BlockingIOError:
            return  # it is readable already

    def drain(self) -> None:
        try:
            while self.reader.recv(4096):
                continue
        except BlockingIOError:
            return

    @contextmanager
    def raising(self) -> Iterator[None]:
        """For a call that waits by itself: a signal ends it with Interrupted."""
        if self.received:
            raise Interrupted
        self._raising = True
        try:
            yield
        finally:
            self._raising = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self.received.append(signal.Signals(number))
        if self._raising:
            self._raising = False
            raise Interrupted
