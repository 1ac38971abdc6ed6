"""Waiting for a call that cannot be interrupted, until its result is not wanted any more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from runtime.script_end import TorchThread

CHECK_S = 0.02
"""Seconds between two checks whether the result is still wanted."""

T = TypeVar("T")


def result_of(name: str, call: Callable[[], T], *, unwanted: threading.Event, late: Callable[[T], None]) -> T | None:
    """The call's result, or None if unwanted before. Raises what the call raises.

    The call runs in a daemon thread of this name, which is abandoned if its result is not wanted any more. late: called
    there with that result.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            given = call()
        except BaseException as error:
            if outcome.set_running_or_notify_cancel():
                outcome.set_exception(error)
            return
        if outcome.set_running_or_notify_cancel():
            outcome.set_result(given)
        else:
            late(given)

    TorchThread(target=run, name=name).start()
    while not wait([outcome], CHECK_S).done:
        if unwanted.is_set() and outcome.cancel():
            return None
    return outcome.result()
