"""Control scalars, which every reduction carries: a stop(), and wishes for copies of the state.

Each is a scalar under a reserved name, so that all workers learn of it with the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from runtime.allreduce.reduction.partial_sum import Scalars
from runtime.recovery.state.small_values import same_nan

RESERVED = "elastic."
"""Scalar names with this prefix belong to the library."""
UNRECORDED = "framework: "
"""Scalars of a step whose names have this prefix are in its metrics, and in no record of it."""
_STOP = RESERVED + "stop "
_WISH = RESERVED + "wish "


class CopyWishes(Protocol):
    @property
    def wishing(self) -> bool:
        """Whether this worker's part of a reduction has to carry the wish."""

    def ask(self) -> None:
        """A result has carried the wish."""


class ControlScalars:
    """Used by the user's thread only."""

    def __init__(self, wishers: Sequence[CopyWishes]) -> None:
        """wishers: must have the same order on every worker."""
        self._wishers = {f"{_WISH}{number}": wisher for number, wisher in enumerate(wishers)}
        self.stopped: str | None = None
        """Why all workers leave after this step; None: they do not."""
        self._stopping: str | None = None

    def stop(self, because: str) -> None:
        """Ask all workers to leave: the next reduction in which this worker has a part carries it."""
        self._stopping = self._stopping or because

    @property
    def stopping(self) -> str | None:
        """Why all workers leave, perhaps only after the next reduction; None: nobody here has asked for that."""
        return self._stopping if self.stopped is None else self.stopped

    def travel(self, scalars: Scalars) -> Scalars:
        """The scalars of a leaf, with the control scalars added."""
        riding = [name for name, wisher in self._wishers.items() if wisher.wishing]
        if (because := self.stopping) is not None:  # again, for newcomers that copy the state only now
            riding.append(_STOP + because)
        return {**scalars, **{name: ("sum", 1.0, 0.0) for name in riding}} if riding else scalars

    def arrive(self, scalars: Scalars) -> dict[str, float]:
        """The values of a result's scalars. A stop() or a wish among them is now known to all workers."""
        for name, wisher in self._wishers.items():
            if name in scalars:
                wisher.ask()
        for name in scalars:
            if name.startswith(_STOP) and self.stopped is None:
                self.stopped = name.removeprefix(_STOP)
        return {
            name: same_nan(total if kind == "sum" else total / weight)
            for name, (kind, total, weight) in scalars.items()
            if not name.startswith(RESERVED)
        }
