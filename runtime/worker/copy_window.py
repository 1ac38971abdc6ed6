"""When other threads may read the registered tensors: from the beginning of a joinable operation to its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from runtime.recovery.transfer.connection import CopyConnection
from runtime.session import Op
from runtime.worker.state_owner import SharedWorkerState

LATER_S = 5.0
"""Seconds for which a newcomer's question waits here for its answer; then it is asked again, here or elsewhere."""


class CopyWindow:
    """Fields are read while holding ``shared.changed``."""

    def __init__(self, shared: SharedWorkerState) -> None:
        self._shared = shared
        self.op: Op | None = None
        """The operation in progress, or the last one."""
        self.is_open = False
        self.opened = 0
        """How often the window was opened."""
        self.state_given = False
        """Whether a newcomer may have got from here the state of that operation."""
        self._opened_s = self._patience_s = 0.0
        self._reading = 0
        self._cut_off: set[CopyConnection] = set()

    # ------------------------------------------------------------------------------- the user's thread

    def open(self, op: Op, patience_s: float) -> None:
        """Open the window. patience_s: about how many seconds from now a copy would be cut off."""
        with self._shared.changed:
            self.op, self.is_open, self._patience_s, self.state_given = op, True, patience_s, False
            self.opened, self._opened_s = self.opened + 1, time.monotonic()
            self._shared.changed.notify_all()

    def close(self) -> None:
        """Cut off connections that still send the state, and wait until no thread reads it."""
        changed = self._shared.changed
        with changed:
            self.is_open = False
            for connection in self._cut_off:
                connection.abort()
            while self._reading:
                changed.wait()

    # ------------------------------------------------------------------------------------ other threads

    @property
    def stands_still(self) -> bool:
        """Whether the operation in progress waits for newcomers, as long as they take."""
        record = self._shared.position.record
        return record is not None and record.hold

    def lasts(self, seconds: float) -> bool:
        """Whether the window probably stays open for this many seconds from its beginning."""
        return self.stands_still or seconds <= self._patience_s

    def lasts_from_now(self, seconds: float) -> bool:
        return self.lasts(time.monotonic() - self._opened_s + seconds)

    @contextmanager
    def reading(
        self, ready: Callable[[], bool], begin: Callable[[int], None] | None = None, *, wait: bool = True
    ) -> Iterator[int | None]:
        """The number of an operation whose window does not close before the block ends; None if there was none in time.

        ready: whether the present window will do. begin: called with the number, under the same lock.
        """
        shared = self._shared
        with shared.changed:
            if wait:
                shared.changed.wait_for(lambda: ready() or not shared.position.donor, LATER_S)
            number = shared.position.reduced if ready() else None
            if number is not None:
                self._reading += 1
                if begin is not None:
                    begin(number)
        try:
            yield number
        finally:
            with shared.changed:
                self._reading -= number is not None
                shared.changed.notify_all()

    @contextmanager
    def sending(self, connection: CopyConnection) -> Iterator[None]:
        """Inside `reading`: the connection is aborted when the window closes."""
        with self._shared.changed:
            self._cut_off.add(connection)
            if not self.is_open:
                connection.abort()
        try:
            yield
        finally:
            with self._shared.changed:
                self._cut_off.discard(connection)
