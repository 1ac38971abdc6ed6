"""How processes are started: cold workers, each with an interpreter of its own, and the fork server.

An agent imports this module before anything else, so this module imports nothing that takes long.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic.agent.worker import import_scan
from elastic.errors import ColdStart, ConfigError
from elastic.process import children, file_modes, stop_signals

PIPE_BYTES = 2**20
"""Bytes that a worker may print while its agent is frozen, before printing blocks."""

IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that Python ignores, and that would stay ignored in a program it starts."""

FILE_TIMER = "TORCHELASTIC_ENABLE_FILE_TIMER"
"""A setting of the user's for scripts that are restarted (runtime/frontends/restart/script_timers.py), and no rank."""
LAUNCHERS = ("TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_", "GROUP_", "ROLE_")
LAUNCHER_NAMES = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    | {"SLURM_NTASKS", "SLURM_NPROCS", "SLURM_PROCID", "SLURM_LOCALID"}
)
"""Variables by which launchers of fixed worlds tell a process its rank; here ranks change while it runs."""


# -c puts the working directory first in sys.path, where its files could replace modules of this package.
_OWN_PATH = "import sys; sys.path[:1] == [''] and sys.path.pop(0); "
BOOT = _OWN_PATH + "from runtime.forkserver.server import main; main(*sys.argv[1:])"
COLD = _OWN_PATH + "from runtime.forkserver.script_runner import main; main(sys.argv[1:])"
"""Runs a cold worker through script_runner, as a forked worker is run, which sees every end of the script."""


class Outlets:
    """Where a worker that is about to start prints to. `out`, `log`: the descriptors of its stdout and stderr."""

    def __init__(self, path: Path) -> None:
        file_modes.make_directory(path.parent)
        self.path = path
        self.log = file_modes.opener(str(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.reader, self.out = os.pipe2(os.O_CLOEXEC)
        with contextlib.suppress(PermissionError):  # above the user's quota of pipe memory the default size suffices
            fcntl.fcntl(self.reader, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.set_blocking(self.reader, False)

    def close(self) -> None:
        """Close all descriptors, because nothing was started."""
        self.close_out()
        for descriptor in (self.log, self.reader):
            os.close(descriptor)

    def close_out(self) -> None:
        """Close this process's copy of the worker's stdout."""
        os.close(self.out)


def start_cold(command: Sequence[str], environment: Mapping[str, str], outlets: Outlets, *, holds: bool = False) -> int:
    """Start a program. Returns its pid. Raises ConfigError if the program or setpriv is not there.

    holds: the program calls held_signals.hold, and stop signals wait until then."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("only the main thread may start workers: they die with the thread that started them")
    if shutil.which(command[0], path=environment.get("PATH")) is None:
        raise ConfigError(f"no program {command[0]!r} on PATH")
    words = children.dying_with_this(*command)
    return os.posix_spawn(
        words[0],
        words,
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


KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
"""glibc returns large blocks to the kernel at every free, and gradients are freed after every shard. With 10 million
parameters the page faults of new blocks were a third of a step's CPU time."""


def worker_environment(inherited: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """The inherited environment without the ranks of outer launchers, plus these settings, and default KEEP_MEMORY."""
    kept = {
        name: value
        for name, value in inherited.items()
        if name == FILE_TIMER or (name not in LAUNCHER_NAMES and not name.startswith(LAUNCHERS))
    }
    return {**KEEP_MEMORY, **kept, "PYTHONUNBUFFERED": "1", **settings}


def job_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment that all workers of a job on this node share. variables: the job's own."""
    return worker_environment({**os.environ, **variables}, {})


@dataclass(frozen=True, slots=True)
class ForkServerProcess:
    """A fork server that has been started, and to which nothing listens yet. channel: this process's end."""

    pid: int
    channel: socket.socket
    outlets: Outlets


def start_process(
    command: Sequence[str], environment: Mapping[str, str], log: Path, *, restarts: bool = False
) -> ForkServerProcess:
    """Start a fork server. Main thread only, because the fork server dies with it.

    command: a worker's, the interpreter first. environment: shared by all workers. Raises ConfigError and OSError if
    the fork server cannot be started.
    """
    channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    outlets = None
    try:
        channel.setblocking(False)
        outlets = Outlets(log)
        theirs.set_inheritable(True)
        words = [command[0], "-c", BOOT, str(theirs.fileno()), "1" if restarts else "", "", *command]
        return ForkServerProcess(start_cold(words, environment, outlets, holds=True), channel, outlets)
    except BaseException:
        channel.close()
        if outlets is not None:
            outlets.close()
        raise
    finally:
        theirs.close()


def start_fork_server(
    command: Sequence[str], variables: Mapping[str, str], logs: Path, node: str, *, restarts: bool
) -> ForkServerProcess:
    """Start the fork server of a job, which takes longest at the start of an agent. Main thread only.

    command, variables: those of the job's workers. restarts: scripts are started again in each generation. Raises
    ColdStart, ConfigError and OSError if they cannot be forked."""
    import_scan.program_of(command)
    environment = job_environment(variables)
    if not is_this_interpreter(shutil.which(command[0], path=environment.get("PATH"))):
        raise ColdStart(f"{command[0]} is another interpreter than the agent's")
    return start_process(command, environment, logs / f"fork-server-{node}.log", restarts=restarts)


def is_this_interpreter(program: str | None) -> bool:
    """Whether the program is this interpreter, maybe by another name in the same directory: in another directory it may
    belong to another virtual environment."""
    if program is None:
        return False
    mine, other = Path(os.path.abspath(sys.executable)), Path(os.path.abspath(program))
    return other.parent == mine.parent and other.resolve() == mine.resolve()
