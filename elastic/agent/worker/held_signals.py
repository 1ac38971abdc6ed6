"""SIGTERM, SIGINT and SIGHUP in a worker, beside a script that may have handlers of its own.

What comes from outside does nothing: the agent has heard of it too, or the command above, and lets the worker leave
between two steps. A handler of the script is kept, found by signal.getsignal as set, and called when the agent asks the
worker to stop, or behind a drain. Nothing of this reaches programs that the script starts, nor processes that it forks.

The handler that does nothing is a function of the C library, below Python's: a handler of Python's would write into the
pipe by which asyncio learns of signals, and SIG_IGN would be inherited by programs.
"""

from __future__ import annotations

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
_set = signal.signal
_forking = threading.local()
_holding = False
_registered = False


def hold() -> None:
    """From here on these signals are held back in this process, which ours has started: only then does anybody tell it
    to stop. Any number of times. Nothing happens outside the main thread, where Python sets no handlers."""
    global _holding, _registered
    if threading.current_thread() is not threading.main_thread():
        return
    if not _registered:
        _registered = True
        os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
        signal.signal = _signal  # type: ignore[assignment]
    _holding = True
    for number in stop_signals.HELD:
        _signal(number, signal.getsignal(number))
    _libc.signal(stop_signals.LISTENS, _NOTHING)
    stop_signals.begin()


def call_handler() -> None:
    """Of the script, for SIGTERM, if it has one: in a worker that has left the job behind it and ends now."""
    handler = signal.getsignal(signal.SIGTERM)
    if not callable(handler):
        return
    try:
        handler(signal.SIGTERM, sys._getframe())
    except SystemExit:
        return  # that is what happens next
    except BaseException:
        traceback.print_exc()


def _signal(number: int, handler: Any) -> Any:
    """In place of signal.signal."""
    before = _set(number, handler)
    if _holding and number in stop_signals.HELD:
        if number == signal.SIGTERM:
            _set(ORDER, _obey if callable(handler) else handler)
        _libc.signal(number, _NOTHING)
    return before


def _obey(number: int, frame: object) -> None:
    """What the script wants to happen at SIGTERM happens now."""
    _release()
    signal.raise_signal(signal.SIGTERM)


def _before_fork() -> None:
    """What is sent to the child before it can act waits until it does."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals.BLOCKED)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _in_child() -> None:
    _release()
    _after_fork()


def _release() -> None:
    global _holding
    _holding = False
    for number in stop_signals.HELD:
        _set(number, signal.getsignal(number))
