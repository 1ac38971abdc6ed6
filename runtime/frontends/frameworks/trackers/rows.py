"""Rows that a script has logged to files that the leader alone writes: each worker keeps the last ones.

A leader that dies may have written all rows of its last step, some, or none. TensorBoard hides what the files of a
directory have from a step on, if a newer file there begins with that step (its `purge_step`). So the next leader begins
a file, hides the last steps, and writes their rows once more: each of them is shown once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

ROWS_KEPT = 256
"""Rows that a worker keeps: a leader that dies may have written none of the last ones."""

Row = tuple[int, dict[str, Any]]
"""(step, name -> value)"""


class Rewrite(NamedTuple):
    """What a new leader does first with files of TensorBoard."""

    purge_step: int
    """Everything from this step on is hidden."""
    rows: Sequence[Row]
    """These are written again: all rows from that step on."""


def rewrite(rows: Sequence[Row], before: int = 0) -> Rewrite:
    """What to hide and to write again of these rows, the last ones in the order in which they were logged. before: the
    largest step of the rows before them, which must not be hidden. Rows of step 0 are left alone: what a logger writes
    at its beginning has no step, and so step 0."""
    steps = [step for step, _ in rows]
    largest = list(accumulate(steps, max, initial=max(before, 0)))  # [i]: of the rows before i
    smallest = list(accumulate(reversed(steps), min))[::-1]  # [i]: of the rows from i on
    for index, (earlier, later) in enumerate(zip(largest, smallest, strict=False)):
        if later > earlier:
            return Rewrite(later, rows[index:])
    return Rewrite(largest[-1] + 1, ())


def as_row(values: Mapping[str, Any]) -> Row:
    """The row of these values, one of which, "step", is its step."""
    return values["step"], {name: value for name, value in values.items() if name != "step"}


class KeptRows:
    """The last rows, in every worker."""

    def __init__(self) -> None:
        self.count = 0
        """How many were logged."""
        self.rows: list[Row] = []
        self._before = 0
        """The largest step of those that are not kept any more."""

    def add(self, step: int, row: dict[str, Any]) -> None:
        self.count += 1
        self.rows = [*self.rows, (step, row)]
        for old, _ in self.rows[:-ROWS_KEPT]:
            self._before = max(self._before, old)
        self.rows = self.rows[-ROWS_KEPT:]

    def rewrite(self) -> Rewrite:
        return rewrite(self.rows, self._before)

    def state_dict(self) -> dict[str, Any]:
        recent = [{**row, "step": step} for step, row in self.rows]
        return {"count": self.count, "recent": recent, "before": self._before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self._before = state["count"], state.get("before", 0)  # an older version did not count that
        self.rows = [as_row(row) for row in state["recent"]]
