"""One worker process: it cannot outlive its agent, is watched through a pidfd, and is read without blocking.

A worker is a child of the agent, with an interpreter of its own (`start_cold`) or forked by the fork server.
The kernel kills it when the thread that started it ends (setpriv --pdeathsig), so only the main thread, which lives
as long as the agent, may start one. It leads a session and process group of its own; what it starts stays in that
group, and the group is killed when the worker has ended, while its zombie still reserves the group's number.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

from elastic.agent.process.process_start import Outlets
from elastic.errors import ConfigError
from elastic.process import stop_signals
from elastic.protocol.failure_detector import Facts

READ_BYTES = 65_536
LINE_LIMIT = 65_536
"""Bytes of a line of output; a longer line is forwarded in pieces."""

LAST_WORDS_BYTES = 8_192

FILES = 64
FILES_OF_WORKER = 8
FILES_OF_ETCD = 192
"""Descriptors, with a margin: an agent was seen with 21, and 5 for each worker; a worker with 13, and 1 for each
worker. etcd refuses to start with 150."""


def check_descriptors(workers: int, *, etcd: bool) -> None:
    """Check the limit of open files for an agent with this many workers and spares, for each of them, and for an etcd.
    Raises ConfigError if it is too low."""
    needed = max(FILES_OF_ETCD if etcd else 0, FILES + FILES_OF_WORKER * workers)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < needed:
        enough = hard == resource.RLIM_INFINITY or hard >= needed
        how = f"say `ulimit -n {needed}` first" if enough else (
            f"the hard limit is {hard}, so have it raised: LimitNOFILE of a systemd service, or limits.conf"
        )  # fmt: skip
        raise ConfigError(f"a process may open {soft} files here (`ulimit -n`), and {needed} are needed; {how}")


class WorkerProcess:
    """A running worker. on_line gets a line of its stdout with its end; on_exit its exit code, or minus the signal.

    pid: a child of this process that leads its process group. outlets: owned by this object from here on. Both
    functions are called on the event loop; on_exit once, after the last line, with the process reaped and its group
    killed.
    """

    def __init__(
        self, pid: int, outlets: Outlets, on_line: Callable[[bytes], None], on_exit: Callable[[int], None]
    ) -> None:
        outlets.close_out()
        self.pid = pid
        self.peak_bytes = 0
        """The most memory that it has had at a time, with what it shares; known when it has ended."""
        self._out, self._log, self._log_path = outlets.reader, outlets.log, outlets.path
        self._on_line = on_line
        self._on_exit = on_exit
        self._line = b""
        self._loop = asyncio.get_running_loop()
        self._pidfd = os.pidfd_open(pid)
        self._loop.add_reader(self._out, self._read)
        self._loop.add_reader(self._pidfd, self._ended)

    def signal(self, number: signal.Signals) -> None:
        """Signal the worker's group; a worker that holds signals back gets the signal as its agent's order too."""
        with contextlib.suppress(ProcessLookupError):  # the worker has ended; its pidfd says so in a moment
            os.killpg(self.pid, number)
            if number in stop_signals.ORDERS and (order := stop_signals.order_to(self.pid, number)) != number:
                os.kill(self.pid, order)

    def last_words(self) -> str:
        """The end of the worker's log, in whole lines; "" if the log is gone."""
        try:
            with self._log_path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(0, size - LAST_WORDS_BYTES))
                text = log.read().decode(errors="replace")
        except OSError:
            return ""
        return text.partition("\n")[2] if size > LAST_WORDS_BYTES else text

    def _read(self) -> int:
        """Read one piece of stdout. Returns its size; 0 when there is none at the moment."""
        try:
            piece = os.read(self._out, READ_BYTES)
        except BlockingIOError:
            return 0
        if not piece:
            self._loop.remove_reader(self._out)
            return 0
        *lines, self._line = (self._line + piece).splitlines(keepends=True)
        if self._line.endswith(b"\n") or len(self._line) > LINE_LIMIT:
            lines.append(self._line)
            self._line = b""
        self._keep(b"".join(lines))
        for line in lines:
            self._on_line(line)
        return len(piece)

    def _keep(self, lines: bytes) -> None:
        """Log whole lines only, so that a line which print() wrote in pieces has nothing of stderr inside."""
        with contextlib.suppress(OSError):  # on a full disk these lines are lost, and the job goes on
            os.write(self._log, lines)

    def _ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT)
        self.signal(signal.SIGKILL)
        _, ended, usage = os.wait4(self.pid, 0)
        status, self.peak_bytes = stop_signals.plain(os.waitstatus_to_exitcode(ended)), usage.ru_maxrss * 1024
        left = fcntl.fcntl(self._out, fcntl.F_GETPIPE_SZ)  # the worker has left no more, but others may print on
        while left > 0 and (size := self._read()):
            left -= size
        if self._line:
            self._keep(self._line)
            self._on_line(self._line + b"\n")
        self._loop.remove_reader(self._out)
        for descriptor in (self._out, self._log, self._pidfd):
            os.close(descriptor)
        self._on_exit(status)


def facts(pid: int) -> Facts | None:
    """State letter and CPU time of a process, or None if it is gone."""
    fields = _stat(pid)
    return Facts(fields[0], int(fields[11]) + int(fields[12])) if fields else None


def ending_status(pid: int) -> int:
    """The exit code, or minus the signal, of a process whose end has begun; 0 if it lives, ends well, or is gone."""
    fields = _stat(pid)
    return stop_signals.plain(os.waitstatus_to_exitcode(int(fields[49]))) if fields else 0


def started(pid: int) -> int | None:
    """When a process began, in clock ticks since boot, or None. Together, pid and start name a process uniquely."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def _stat(pid: int) -> list[str]:
    """The fields of proc(5) from the third on, which is the state; [] if the process is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return []
    # The name before them, in parentheses, may itself have spaces and parentheses.
    return stat.rpartition(")")[2].split()
