"""Runs the agent, and ends what its workers leave behind.

python -m elastic.agent.process.subreaper ARGUMENTS OF elastic.agent

    elastic run --pipe--> keeper --parent-death signal--> agent --parent-death signal--> workers --> their children

The kernel kills a worker when its agent dies, but processes that the worker has started would live on. So the kernel
makes this process the parent of all orphans below it (PR_SET_CHILD_SUBREAPER). It reaps them and, when the agent is
gone, ends all of them and removes what the job has left in memory. It ends the agent when the other end of its standard
input is closed, as the death of `elastic run` does. Bytes on its standard input are for the agent, which shares it
(--wait). It passes on its parent's orders and SIGUSR1; without such a parent SIGINT and SIGTERM are its orders. It ends
as the agent did: with the same exit code or signal.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from elastic.checkpoints.naming import OWN_FILES_PREFIX
from elastic.errors import ConfigError, ExitCode
from elastic.process import children, log, stop_signals
from elastic.records import host_memory, temp_dirs

PR_SET_CHILD_SUBREAPER = 36
STDIN = 0
REFUSED_S = 1.0
"""For processes that may not be killed, as those of sudo, to end by themselves."""

_log = logging.getLogger("elastic.agent.process.subreaper")


class Subreaper:
    """Main thread only: the agent dies with the thread that started it."""

    def __init__(self, arguments: list[str]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
        self._woken, wake = os.pipe()
        for end in (self._woken, wake):
            os.set_blocking(end, False)
        self._obeyed = stop_signals.obeyed()
        for number in (signal.SIGCHLD, signal.SIGUSR1, *self._obeyed):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(wake)
        stop_signals.begin()
        self._status: int | None = None
        command = children.dying_with_this(sys.executable, "-P", "-m", "elastic.agent", *arguments)
        self._agent = os.posix_spawn(
            command[0], command, stop_signals.environment(os.environ), setpgroup=0, setsigmask=stop_signals.BLOCKED
        )

    def run(self) -> int:
        """Run until nothing is left below this process. Returns the agent's exit code, or minus the signal."""
        watched = select.poll()
        watched.register(self._woken, select.POLLIN)
        watched.register(STDIN, 0)  # poll always reports its end
        while self._status is None:
            ready = {descriptor for descriptor, _ in watched.poll()}
            if self._woken in ready:
                for number in os.read(self._woken, 4096):
                    self._on_signal(number)
            if STDIN in ready:
                watched.unregister(STDIN)
                self._send(signal.SIGKILL)
        self._end_others()
        host_memory.sweep()  # nothing else does it if `elastic run` was killed
        for prefix in (OWN_FILES_PREFIX, temp_dirs.AGENT_PREFIX):  # left by killed workers and agents
            temp_dirs.sweep(Path(tempfile.gettempdir()), prefix)
        return self._status

    def _end_others(self) -> None:
        """End and reap all that the agent has left."""
        gives_up_s = math.inf
        while self._reap():
            pids = list(_children())
            refused = [pid for pid in pids if not _killed(pid)]
            if len(refused) < len(pids):
                os.waitpid(-1, 0)
                continue
            gives_up_s = min(gives_up_s, time.monotonic() + REFUSED_S)
            left_s = gives_up_s - time.monotonic()
            if left_s <= 0:
                _log.warning("processes %s may not be killed by this user, and go on", refused)
                return
            if select.select([self._woken], [], [], left_s)[0]:
                os.read(self._woken, 4096)

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            self._reap()
        elif (asked := self._obeyed.get(number)) is not None:
            self._send(stop_signals.order_to(self._agent, asked))
        elif number == signal.SIGUSR1:
            self._send(number)

    def _send(self, number: int) -> None:
        """Send a signal to the agent, unless it was reaped: its pid may be another process's by then."""
        if self._status is None:
            os.kill(self._agent, number)

    def _reap(self) -> bool:
        """Reap all children that have ended. Whether there are others."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._agent:
                self._status = stop_signals.plain(os.waitstatus_to_exitcode(status))


def _killed(pid: int) -> bool:
    """Kill a child that is not reaped. False: this user may not."""
    try:
        os.kill(pid, signal.SIGKILL)
    except PermissionError:
        return False
    return True


def _children() -> Iterator[int]:
    """Pids of this process's own children, zombies included."""
    me = str(os.getpid())
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        try:
            stat = (directory / "stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        # The name, in parentheses, may itself have spaces and parentheses; state and parent follow it.
        if stat.rpartition(")")[2].split()[1] == me:
            yield int(directory.name)


def main() -> int:
    log.begin_from(sys.argv[1:])
    try:
        status = Subreaper(sys.argv[1:]).run()
    except (ConfigError, OSError) as error:
        _log.critical("the agent cannot be started: %s", error)
        return ExitCode.BAD_INPUT
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(main())
