"""One worker process: started so that it cannot outlive its agent, watched through a pidfd, read without blocking.

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
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from elastic import file_modes, stop_signals
from elastic.errors import ConfigError
from elastic.protocol.failure_detector import Facts

PIPE_BYTES = 2**20
"""What a worker may print while its agent is frozen before printing blocks."""

READ_BYTES = 65_536
LINE_LIMIT = 65_536
"""A longer line is forwarded in pieces."""

LAST_WORDS_BYTES = 8_192

IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
"""What Python ignores would stay ignored in a program that it starts."""

LAUNCHERS = ("TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_", "GROUP_", "ROLE_")
LAUNCHER_NAMES = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    | {"SLURM_NTASKS", "SLURM_NPROCS", "SLURM_PROCID", "SLURM_LOCALID"}
)
"""Names by which launchers of fixed worlds tell a process its rank; here ranks change while it runs."""


FILES = 64
FILES_OF_WORKER = 8
FILES_OF_ETCD = 192
"""Descriptors, with room: an agent has been seen with 21 and 5 for each worker, a worker with 13 and 1 for each. etcd
refuses to start with 150."""


def check_descriptors(workers: int, *, etcd: bool) -> None:
    """Raises ConfigError if this process and those that it starts may open too few files: an agent of so many workers
    with their spares, each of these, and an etcd."""
    needed = max(FILES_OF_ETCD if etcd else 0, FILES + FILES_OF_WORKER * workers)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < needed:
        enough = hard == resource.RLIM_INFINITY or hard >= needed
        how = f"say `ulimit -n {needed}` first" if enough else (
            f"the hard limit is {hard}, so have it raised: LimitNOFILE of a systemd service, or limits.conf"
        )  # fmt: skip
        raise ConfigError(f"a process may open {soft} files here (`ulimit -n`), and {needed} are needed; {how}")


class Outlets:
    """Where a worker that is about to start prints to. `out`, `log`: the descriptors of its stdout and stderr."""

    def __init__(self, path: Path) -> None:
        file_modes.make_directory(path.parent)
        self.path = path
        self.log = file_modes.opener(str(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.reader, self.out = os.pipe2(os.O_CLOEXEC)
        with contextlib.suppress(PermissionError):  # above the user's quota of pipe memory: the default size will do
            fcntl.fcntl(self.reader, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.set_blocking(self.reader, False)

    @classmethod
    def of_running(cls, path: Path, reader: int) -> Self:
        """Of a worker that runs already: where its stdout can be read."""
        self = cls.__new__(cls)
        self.path, self.reader, self.out = path, reader, -1
        self.log = file_modes.opener(str(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.set_inheritable(reader, False)
        return self

    def close(self) -> None:
        """Nothing was started."""
        self.close_out()
        for descriptor in (self.log, self.reader):
            os.close(descriptor)

    def close_out(self) -> None:
        """The worker has its own."""
        if self.out >= 0:
            os.close(self.out)


def start_cold(command: Sequence[str], environment: Mapping[str, str], outlets: Outlets, *, holds: bool = False) -> int:
    """Start a program. Returns its pid. Raises ConfigError if the program or setpriv is not there.

    holds: it calls held_signals.hold, and signals to stop wait until then."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("only the main thread may start workers: they die with the thread that started them")
    if shutil.which(command[0], path=environment.get("PATH")) is None:
        raise ConfigError(f"no program {command[0]!r} on PATH")
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise ConfigError("setpriv not found; install util-linux")
    return os.posix_spawn(
        setpriv,
        [setpriv, "--pdeathsig", "KILL", "--", *command],
        environment,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, outlets.out, 1),
            (os.POSIX_SPAWN_DUP2, outlets.log, 2),
        ],
        setsid=True,
        setsigmask=stop_signals.BLOCKED if holds else (),
        setsigdef=IGNORED_BY_PYTHON,
    )


class WorkerProcess:
    """A running worker. on_line: a line of its stdout, with its end; on_exit: its exit code, or minus the signal.

    pid: a child of this process that leads its group. outlets: what it prints to; ours from here on. Both functions
    are called on the event loop; on_exit comes once, after the last line, when the process is reaped and its group
    killed.
    """

    def __init__(
        self,
        pid: int,
        outlets: Outlets,
        on_line: Callable[[bytes], None],
        on_exit: Callable[[int], None],
        begun: bytes = b"",
    ) -> None:
        """begun: of a line, read already."""
        outlets.close_out()
        self.pid = pid
        self._out, self._log, self._log_path = outlets.reader, outlets.log, outlets.path
        self._on_line = on_line
        self._on_exit = on_exit
        self._line = begun
        self._loop = asyncio.get_running_loop()
        self._pidfd = os.pidfd_open(pid)
        self._loop.add_reader(self._out, self._read)
        self._loop.add_reader(self._pidfd, self._ended)

    def hand_over(self) -> tuple[int, bytes]:
        """For the program that takes this one's place: where its stdout is read, and what was read of a line."""
        self._loop.remove_reader(self._out)
        self._loop.remove_reader(self._pidfd)
        os.set_inheritable(self._out, True)
        return self._out, self._line

    def signal(self, number: signal.Signals) -> None:
        """To the worker and everything in its group; to a worker that holds signals back also as its agent's order."""
        with contextlib.suppress(ProcessLookupError):  # it has ended; the pidfd says so in a moment
            os.killpg(self.pid, number)
            if number in stop_signals.ORDERS and (order := stop_signals.order_to(self.pid, number)) != number:
                os.kill(self.pid, order)

    def last_words(self) -> str:
        """The end of its log, for people: whole lines; nothing if the log is gone."""
        try:
            with self._log_path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(0, size - LAST_WORDS_BYTES))
                text = log.read().decode(errors="replace")
        except OSError:
            return ""
        return text.partition("\n")[2] if size > LAST_WORDS_BYTES else text

    def _read(self) -> bool:
        """One piece of stdout; False when there is none at the moment."""
        try:
            piece = os.read(self._out, READ_BYTES)
        except BlockingIOError:
            return False
        if not piece:
            self._loop.remove_reader(self._out)
            return False
        *lines, self._line = (self._line + piece).splitlines(keepends=True)
        if self._line.endswith(b"\n") or len(self._line) > LINE_LIMIT:
            lines.append(self._line)
            self._line = b""
        self._keep(b"".join(lines))
        for line in lines:
            self._on_line(line)
        return True

    def _keep(self, lines: bytes) -> None:
        """Log what ends here, so that a line which print() wrote in pieces has nothing of stderr within."""
        with contextlib.suppress(OSError):  # a full disk costs the log these lines, and the job nothing
            os.write(self._log, lines)

    def _ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT)
        self.signal(signal.SIGKILL)
        status = stop_signals.plain(os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]))
        while self._read():
            pass
        if self._line:
            self._keep(self._line)
            self._on_line(self._line + b"\n")
        self._loop.remove_reader(self._out)
        for descriptor in (self._out, self._log, self._pidfd):
            os.close(descriptor)
        self._on_exit(status)


KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
"""glibc returns large blocks to the kernel at every free, and gradients are freed after every shard: with 10 million
parameters the page faults of getting them again were a third of a step's CPU time."""


def worker_environment(inherited: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """The inherited environment without the ranks of outer launchers, with these settings, and KEEP_MEMORY where the
    user has not decided otherwise."""
    kept = {
        name: value
        for name, value in inherited.items()
        if name not in LAUNCHER_NAMES and not name.startswith(LAUNCHERS)
    }
    return {**KEEP_MEMORY, **kept, "PYTHONUNBUFFERED": "1", **settings}


def own_environment() -> dict[str, str]:
    """For another process of the control plane: ours; and where this package was found through the working directory
    only, the way to it."""
    root = Path(__file__).resolve().parents[3]
    if any(path and Path(path).resolve() == root for path in sys.path[1:]):
        return dict(os.environ)
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{known}" if known else str(root)}


def facts(pid: int) -> Facts | None:
    """State letter and CPU time of a process, or None if it is gone."""
    fields = _stat(pid)
    return Facts(fields[0], int(fields[11]) + int(fields[12])) if fields else None


def ending_status(pid: int) -> int:
    """The exit code, or minus the signal, of a process that has begun to end but may not be reaped yet; 0 for one that
    lives, ends well, or is gone."""
    fields = _stat(pid)
    return stop_signals.plain(os.waitstatus_to_exitcode(int(fields[49]))) if fields else 0


def started(pid: int) -> int | None:
    """When a process began, in clock ticks since boot, or None: with the pid it names a process for good."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def _stat(pid: int) -> list[str]:
    """The fields of proc(5) from the third on, the state; none if the process is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    # The name before them, in parentheses, may itself hold spaces and parentheses.
    return stat.rpartition(")")[2].split()
