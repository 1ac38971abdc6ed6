"""Where the threads of a worker are, when its agent gives it up: at the end of its log.

The worker's side is faulthandler, whose handler needs no interpreter: it also speaks of a thread that holds it in C.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path

_SIGNAL = signal.SIGQUIT
"""What asks other runtimes for the same. A script that handles it itself keeps its handler."""


def show_when_asked() -> None:
    """Called by a worker before it announces itself."""
    faulthandler.register(_SIGNAL, all_threads=True)


def ask(pid: int) -> bool:
    """Whether it will say so. One that cannot answer is left alone, and so is one that is stopped: it would answer when
    it goes on, while all its threads run, and the handler reads their frames without Python's lock: it may crash."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        stopped = status.partition("State:")[2].split()[0] in ("T", "t")
        if stopped or not caught >> (_SIGNAL - 1) & 1:
            return False
        os.kill(pid, _SIGNAL)
    except (OSError, IndexError):  # it has ended, or is about to
        return False
    return True
