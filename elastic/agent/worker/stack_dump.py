"""The stacks of a worker's threads, written to its log when its agent gives it up.

The worker's side is faulthandler, whose handler needs no interpreter: it works while C code holds the interpreter.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path

_SIGNAL = signal.SIGQUIT
"""Other runtimes use this signal for the same purpose. A script that handles it itself keeps its handler."""


def show_when_asked() -> None:
    """Install the handler; a worker calls this before it announces itself."""
    faulthandler.register(_SIGNAL, all_threads=True)


def ask(pid: int) -> bool:
    """Ask a worker for its stacks. Whether it will write them. A worker without the handler is left alone, and so is a
    stopped one: its handler would run beside all its threads, without Python's lock, and may crash it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        stopped = status.partition("State:")[2].split()[0] in ("T", "t")
        if stopped or not caught >> (_SIGNAL - 1) & 1:
            return False
        os.kill(pid, _SIGNAL)
    except (OSError, IndexError):  # the process has ended, or is about to
        return False
    return True
