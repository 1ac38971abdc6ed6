"""torch's timers for scripts, as torchrun has them: `with timer.expires(after=60)` of torch.distributed.elastic.timer.

torchrun runs a FileTimerServer beside its scripts if TORCHELASTIC_ENABLE_FILE_TIMER is 1, and tells them its file in
TORCHELASTIC_TIMER_FILE. The server sends a process whose timer has expired the signal that its client has chosen, and
then sends its own process the same signal. So it has a process of its own here, which says first whom it will end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Self

from elastic.process import children, stop_signals

ENABLED = "TORCHELASTIC_ENABLE_FILE_TIMER"
TIMER_FILE = "TORCHELASTIC_TIMER_FILE"

CHECK_S = 0.1
"""Seconds between two looks of the server, as under torchrun."""
READ_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Expiry:
    """The timer of a process has expired, and the process is sent a signal. scope: as the script named it."""

    pid: int
    scope: str
    signal: int


class TimerServer:
    """torch's server in a child of this process, which has one thread. It can be waited for with select()."""

    def __init__(self, path: str, run_id: str, in_child: Callable[[], None]) -> None:
        """path: of the named pipe, which is made. in_child: closes what the child must not hold. Raises OSError."""
        from torch.distributed.elastic.timer.file_based_local_timer import FileTimerServer

        self._make = path, run_id, in_child
        self._pid = 0
        self.over = False
        """Whether the server has ended."""
        host = os.getpid()
        reader, writer = os.pipe()

        def say(event: str, timer: Any) -> None:
            if event == "timer expired" and timer.signal > 0:
                said = {"pid": timer.worker_pid, "scope": timer.scope_id, "signal": timer.signal}
                os.write(writer, json.dumps(said).encode() + b"\n")

        server = FileTimerServer(path, run_id, CHECK_S, log_event=say)
        if (pid := os.fork()) == 0:
            os.close(reader)
            in_child()
            _serve(server, host)
        os.close(writer)
        self._pid, self._reader, self._rest = pid, reader, b""

    def fileno(self) -> int:
        return self._reader

    def expired(self) -> list[Expiry]:
        """What the server has said since the last call."""
        os.set_blocking(self._reader, False)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._reader, READ_BYTES):
                self._rest += data
            self.over = True
        *lines, self._rest = self._rest.split(b"\n")
        return [Expiry(**json.loads(line)) for line in lines]

    def again(self) -> Self:
        """Another server in place of one that has ended. The timers that it held are lost."""
        self.close()
        with contextlib.suppress(ChildProcessError):  # it was waited for already
            os.waitpid(self._pid, 0)
        return type(self)(*self._make)

    def close(self) -> None:
        """The process ends with the script."""
        os.close(self._reader)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._make[0])


def _serve(server: Any, host: int) -> NoReturn:
    children.die_with(host)
    for number in (*stop_signals.HELD, *stop_signals.ORDERS.values()):
        signal.signal(number, signal.SIG_DFL)  # it ends with the signal that it sends
    server.start()
    while True:
        signal.pause()
