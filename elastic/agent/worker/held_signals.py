"""SIGTERM, SIGINT and SIGHUP in a worker, beside a script that may have handlers of its own.

What comes from outside does nothing: the agent has heard of it too, or the command above it, and lets the worker leave
between two steps. A handler that the script sets is kept, and signal.getsignal returns it. It is called when the agent
asks the worker to stop, when the script signals itself, and after a drain that began with SIGTERM. Programs that the
script starts, and processes that it forks, have these signals as without this module.

What holds a signal back is a function of the C library: a handler of Python's would write into the pipe by which
asyncio learns of signals, and SIG_IGN would be inherited by programs.
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

from elastic import stop_signals

ORDER = stop_signals.ORDERS[signal.SIGTERM]
"""By default the worker ends by it, as by SIGTERM; where the script has a handler for that, it is called."""

_libc = ctypes.CDLL(None)
_libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
_libc.signal.restype = ctypes.c_void_p
_NOTHING = ctypes.cast(_libc.abs, ctypes.c_void_p)
"""It takes one integer, as a handler does, and changes nothing."""

_set, _kill, _raise = signal.signal, os.kill, signal.raise_signal
_forking = threading.local()
_holding = False
_registered = False


def holding() -> bool:
    """Whether this process holds these signals back."""
    return _holding


def hold() -> None:
    """Begin, in a process that ours has started: only then does anybody tell it to stop. Any number of times. Nothing
    happens outside the main thread, where Python sets no handlers."""
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
    An order of the agent that comes later does not call the handler again."""
    handler = signal.getsignal(signal.SIGTERM)
    if not _holding or not callable(handler):
        return
    _libc.signal(ORDER, _NOTHING)
    try:
        handler(signal.SIGTERM, sys._getframe())
    except SystemExit:
        return  # that is what happens next
    except BaseException:  # whatever the script raises there: the worker has left in order, and ends
        traceback.print_exc()


def _signal(number: int, handler: Any) -> Any:
    """In place of signal.signal."""
    with stop_signals.blocked():
        before = _set(number, handler)
        if _holding and number in stop_signals.HELD:
            if number == signal.SIGTERM:
                _set(ORDER, _obey if callable(handler) else handler)
            if handler is not signal.SIG_IGN:  # programs inherit that, as the script wants
                _libc.signal(number, _NOTHING)
    return before


def _kill_self(pid: int, number: int) -> None:
    """In place of os.kill: nobody else than the script sends this."""
    if _holding and number in stop_signals.HELD and pid == os.getpid():
        _deliver(number)
    else:
        _kill(pid, number)


def _raise_self(number: int) -> None:
    """In place of signal.raise_signal."""
    if _holding and number in stop_signals.HELD:
        _deliver(number)
    else:
        _raise(number)


def _obey(number: int, frame: object) -> None:
    _deliver(signal.SIGTERM)


def _deliver(number: int) -> None:
    """As if nothing held it back. Any thread; a handler of Python's is called by the main thread."""
    handler = signal.getsignal(number)
    if callable(handler):
        _thread.interrupt_main(signal.Signals(number))
    elif handler is signal.SIG_DFL:
        _libc.signal(number, None)
        _kill(os.getpid(), number)


def _before_fork() -> None:
    """What is sent to the child before it can act waits until it does."""
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
