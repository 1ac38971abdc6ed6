"""Waiting for a call that cannot be interrupted, until its result is not wanted any more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

CHECK_S = 0.02
"""Seconds between two checks whether the result is still wanted."""

T = TypeVar("T")


class Call(Generic[T]):
    """Runs `call` in a daemon thread of this name. late: called with the result if that is not wanted any more."""

    def __init__(self, name: str, call: Callable[[], T], late: Callable[[T], None]) -> None:
        self._call = call
        self._late = late
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._unwanted = False
        self._given: list[T] = []
        self._raised: BaseException | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def result(self, unwanted: threading.Event) -> T | None:
        """The call's result, or None if unwanted before; then the thread is abandoned. Raises what the call raises."""
        while not self._done.wait(CHECK_S):
            if unwanted.is_set():
                with self._lock:
                    self._unwanted = not self._done.is_set()
                if self._unwanted:
                    return None
        if self._raised is not None:
            raise self._raised
        return self._given[0]

    def _run(self) -> None:
        try:
            given = self._call()
        except BaseException as error:
            self._raised = error
            self._done.set()
            return
        with self._lock:
            if not self._unwanted:
                self._given.append(given)
                self._done.set()
                return
        self._late(given)
