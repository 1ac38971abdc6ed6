"""Where the threads of a worker are, when its agent gives it up: at the end of its log.

The worker's side is faulthandler, whose handler needs no interpreter: it also speaks of a thread that holds it in C.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal

_SIGNAL = signal.SIGQUIT
"""What asks other runtimes for the same. A script that handles it itself keeps its handler."""


def show_when_asked() -> None:
    """Called by a worker before it announces itself."""
    faulthandler.register(_SIGNAL, all_threads=True)


def ask(pid: int) -> None:
    """A worker that has announced itself. One that is stopped answers when it goes on."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, _SIGNAL)
