"""SIGTERM, SIGINT and SIGHUP in a worker whose script may have handlers of its own.

A signal from outside has no effect: the agent, or the command above it, gets it too and lets the worker leave between
two steps. A handler that the script sets is kept, and signal.getsignal returns it. It is called when the agent asks the
worker to stop, when the script signals itself, and after a drain that began with SIGTERM. This module changes nothing
for programs that the script starts and processes that it forks.

A function of the C library holds a signal back: a Python handler would write into asyncio's pipe for signals, and
started programs would inherit SIG_IGN.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import signal
import sys
import threading
import traceback
from typing import Any

from elastic.process import stop_signals

ORDER = stop_signals.ORDERS[signal.SIGTERM]
"""By default this signal ends the worker, as SIGTERM does; if the script has a handler for SIGTERM, that is called."""

_libc = ctypes.CDLL(None)
_libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
_libc.signal.restype = ctypes.c_void_p
_NOTHING = ctypes.cast(_libc.abs, ctypes.c_void_p)
"""A C function that takes one integer, as a handler does, and has no effect."""

_set, _kill, _raise = signal.signal, os.kill, signal.raise_signal
_forking = threading.local()
_holding = False
_registered = False


def holding() -> bool:
    """Whether this process holds these signals back."""
    return _holding


def hold() -> None:
    """Begin to hold signals back, in a process that an agent or this package has started: else nothing would tell it to
    stop. May be called again. Outside the main thread, where Python sets no handlers, it does nothing."""
    global _holding, _registered
    if _holding or threading.current_thread() is not threading.main_thread():
        return
    if not _registered:
        _registered = True
        os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
        signal.signal, os.kill, signal.raise_signal = _signal, _kill_self, _raise_self  # type: ignore[assignment]
    with stop_signals.blocked():
        _holding = True
        for number in stop_signals.HELD:
            _signal(number, signal.getsignal(number))
        _libc.signal(stop_signals.LISTENS, _NOTHING)
    stop_signals.begin()


def call_handler() -> None:
    """Call the script's handler for SIGTERM, if it has set one, in a worker that has left the job and is about to end.
    A later order of the agent does not call the handler again."""
    handler = signal.getsignal(signal.SIGTERM)
    if not _holding or not callable(handler):
        return
    _libc.signal(ORDER, _NOTHING)
    try:
        handler(signal.SIGTERM, sys._getframe())
    except SystemExit:
        return  # the worker ends next anyway
    except BaseException:  # the worker has left in order, and ends, whatever the handler raises
        traceback.print_exc()


def _signal(number: int, handler: Any) -> Any:
    """Replaces signal.signal."""
    with stop_signals.blocked():
        before = _set(number, handler)
        if _holding and number in stop_signals.HELD:
            if number == signal.SIGTERM:
                _set(ORDER, _obey if callable(handler) else handler)
            if handler is not signal.SIG_IGN:  # programs inherit that, as the script wants
                _libc.signal(number, _NOTHING)
    return before


def _kill_self(pid: int, number: int) -> None:
    """Replaces os.kill: a signal to this process itself can only come from the script."""
    if _holding and number in stop_signals.HELD and pid == os.getpid():
        _deliver(number)
    else:
        _kill(pid, number)


def _raise_self(number: int) -> None:
    """Replaces signal.raise_signal."""
    if _holding and number in stop_signals.HELD:
        _deliver(number)
    else:
        _raise(number)


def _obey(number: int, frame: object) -> None:
    _deliver(signal.SIGTERM)


def _deliver(number: int) -> None:
    """Deliver a signal as if it were not held back. Any thread; the main thread runs a Python handler."""
    handler = signal.getsignal(number)
    if callable(handler):
        _thread.interrupt_main(signal.Signals(number))
    elif handler is signal.SIG_DFL:
        _libc.signal(number, None)
        _kill(os.getpid(), number)


def _before_fork() -> None:
    """Block signals, so that those for the child wait until it can handle them."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals.BLOCKED)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _in_child() -> None:
    global _holding
    _holding = False
    for number in stop_signals.HELD:
        _set(number, signal.getsignal(number))
    for order in stop_signals.ORDERS.values():
        _set(order, signal.SIG_DFL)
    _after_fork()
