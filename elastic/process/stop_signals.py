"""SIGTERM, SIGINT and SIGHUP in a process that another process of ours has started.

Slurm, systemd, `tini -g` and people send them to every process of a job at once. Only the process at the top acts on
them: it stops the others in order. A child is told by its parent, with signals that nobody else sends, and holds the
others back. It needs no other way to be stopped: when its parent dies, the kernel kills it, or a pipe that is closed
ends it.

    parent  with blocked(): Popen(..., env=environment(os.environ))    it cannot be stopped while it starts
    child   for received, asked in obeyed().items(): ...; begin()      from here on it obeys
    parent  child.send_signal(order_to(child.pid, signal.SIGTERM))
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

HELD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

ORDERS = {signal.SIGTERM: signal.SIGRTMIN + 9, signal.SIGINT: signal.SIGRTMIN + 10}
"""What is asked of a child -> the signal by which its parent asks for it."""

LISTENS = ORDERS[signal.SIGINT]
"""A process that catches this one, or blocks it while it starts, obeys all orders."""

ASKED = {order: asked for asked, order in ORDERS.items()}

BLOCKED = (*HELD, *ORDERS.values(), signal.SIGUSR1)
"""Signals that wait until a process that starts, or becomes another program, can hear them. SIGUSR1 is a notice (see
elastic/preemption/slurm.py), and a process without a handler ends by it."""

WAKES_S = 0.25
"""How long a process is given to take a signal that was sent to it; one that is frozen never does."""

_MASKS = ("SigCgt", "SigBlk", "ShdPnd")

PARENT = "ELASTIC_PARENT"
"""Environment variable: the pid of the process that has started this one and tells it when to stop. Programs further
down inherit it, and it is not their parent's pid."""


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """These variables, and the one that names this process as the parent of a child which it starts with them."""
    return {**base, PARENT: str(os.getpid())}


@contextmanager
def blocked() -> Iterator[None]:
    """These signals wait, in this thread, until the end of the context; and in a child that is started within it until
    that calls `begin`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def order_to(pid: int, asked: signal.Signals) -> int:
    """The signal that asks this child to stop: the plain one where it does not listen to orders, such as a worker
    that is a shell."""
    until_s = time.monotonic() + WAKES_S
    while True:
        try:
            status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return asked
        masks = {line[:6]: int(line.split()[1], 16) for line in status.splitlines() if line[:6] in _MASKS}
        caught, waiting, pending = (masks.get(name, 0) for name in _MASKS)
        # sigwait unblocks what it waits for; the kernel blocks it again when it takes the signal that was just sent.
        if not (pending & ~waiting) >> (asked - 1) & 1 or time.monotonic() >= until_s:
            break
        time.sleep(0.001)
    # A script that waits for SIGTERM in sigwait blocks that alone; a child that is starting blocks both.
    listens = (waiting if waiting >> (asked - 1) & 1 else caught) >> (LISTENS - 1) & 1
    return ORDERS[asked] if listens else asked


def plain(status: int) -> int:
    """The exit code, or minus the signal, with which a process ended. Where that was an order, the signal it stands
    for."""
    return -ASKED[-status] if -status in ASKED else status


def is_child() -> bool:
    """Whether a process of ours has started this one, and tells it when to stop."""
    return os.environ.get(PARENT) == str(os.getppid())


def obeyed() -> dict[int, signal.Signals]:
    """Signal -> what it asks for, of this process: its parent's orders, and, if it has no parent of ours, SIGTERM and
    SIGINT as they come. The caller sets the handlers of these, and calls `begin`. A process with such a parent has
    handlers for the signals that it holds back when this returns. Main thread only."""
    if not is_child():
        return {**ASKED, signal.SIGTERM: signal.SIGTERM, signal.SIGINT: signal.SIGINT}
    for number in HELD:
        signal.signal(number, _hold)
    return dict(ASKED)


def begin() -> None:
    """The handlers are set: what has come meanwhile is heard now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)


def _hold(number: int, frame: object) -> None:
    """The parent has got it too, and says what is to be done."""
