"""Child processes of this program: how they are started, the environment that they are given, and how they end with
their parent."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from elastic.errors import ConfigError
from elastic.process import file_modes, notify, stop_signals

PR_SET_PDEATHSIG = 1

REASON_FILE = "ELASTIC_REASON_FILE"
"""Environment variable: the file in which a command says why it was refused, to the process that has started it."""


def own_environment() -> dict[str, str]:
    """The environment for another process of the control plane: this process's, without what its service manager has
    told it alone; if this package was found through the working directory only, with its path."""
    root = Path(__file__).resolve().parents[2]
    own = {name: value for name, value in os.environ.items() if name not in notify.VARIABLES}
    if any(path and Path(path).resolve() == root for path in sys.path[1:]):
        return own
    known = own.get("PYTHONPATH")
    return {**own, "PYTHONPATH": f"{root}{os.pathsep}{known}" if known else str(root)}


def python(module: str, *words: str) -> list[str]:
    """The command of another process of the control plane, whose modules are not those of the working directory."""
    return [sys.executable, "-P", "-m", module, *words]


def start(
    command: Sequence[str], log: Path | None = None, *, obeys: bool = True, **options: Any
) -> subprocess.Popen[bytes]:
    """Start a child with the environment of the control plane, no input, and a process group of its own: Ctrl-C reaches
    this process alone. log: gets its output and its errors. obeys: it is a child as stop_signals.py has it, and cannot
    be stopped while it starts. options: those of Popen that are other ones. Raises OSError."""
    with ExitStack() as stack:
        if log is not None:
            file = stack.enter_context(open(log, "ab", opener=file_modes.opener))
            options = {"stdout": file, "stderr": file, **options}
        environment = own_environment()
        if obeys:
            environment = stop_signals.environment(environment)
            stack.enter_context(stop_signals.blocked())
        own = {"env": environment, "stdin": subprocess.DEVNULL, "process_group": 0}
        return subprocess.Popen(command, **{**own, **options})


def dying_with_this(*command: str) -> list[str]:
    """The command as one whose process the kernel kills when the thread that starts it ends. Raises ConfigError if
    there is no setpriv, which begins it by its whole path."""
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise ConfigError("setpriv not found: install util-linux")
    return [setpriv, "--pdeathsig", "KILL", "--", *command]


def die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent of this process ends; end at once if it has ended already. parent: the
    pid that it had when it made this process."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


def ask(process: subprocess.Popen[bytes], asked: signal.Signals = signal.SIGTERM) -> None:
    """Ask a child of this process to stop, if it lives."""
    process.send_signal(stop_signals.order_to(process.pid, asked))


def wait_or_kill(process: subprocess.Popen[bytes], within_s: float) -> None:
    """Wait for the end of a child of this process; after within_s, kill it."""
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
