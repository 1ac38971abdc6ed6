"""Child processes of this program: the environment that they are given, and how they end with their parent."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from elastic.errors import ConfigError
from elastic.process import notify

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


def wait_or_kill(process: subprocess.Popen[bytes], within_s: float) -> None:
    """Wait for the end of a child of this process; after within_s, kill it."""
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
