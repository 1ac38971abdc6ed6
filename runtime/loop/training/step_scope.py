"""The step in progress, and its record: what the script logs belongs to it until the next step is handed out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from elastic.errors import UsageError
from runtime.session import Session, StepRecord

_SHOWN_CHARACTERS_MAX = 200


class OpenStep(Protocol):
    """The step in progress, as a loop keeps it."""

    @property
    def record(self) -> StepRecord:
        """Its record, once its first pass is over."""


class StepScope:
    """Used by the user's thread only."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._open: OpenStep | None = None
        self._withdrawn = False
        self._left: StepRecord | None = None
        """The record of the step that was left last, until the next step is handed out."""
        self._logged: dict[str, float] = {}
        """Values of job.log() for that step, the step in progress, or the first."""
        self.passes_tried: set[int] = set()
        """Numbers of passes within a step of which this process has run a shard."""

    def open(self, step: OpenStep) -> bool:
        """The step is handed out. Returns whether a step with this number was before, and was withdrawn."""
        self._open, again, self._withdrawn = step, self._withdrawn, False
        return again

    def withdraw(self) -> None:
        """The step that was handed out is taken back: no pass of it has begun."""
        self._open, self._withdrawn = None, True

    def leave(self) -> StepRecord:
        """The step is over; its record is open until `close`."""
        assert self._open is not None
        self._left, self._open = self._open.record, None
        return self._left

    def close(self) -> StepRecord | None:
        """The whole record of the step that was left, for which nothing more can be logged; None: it is closed already.
        Raises UsageError for a name that a pass has logged too."""
        if self._left is None:
            return None
        record, logged = self._left, self._logged
        self._left, self._logged = None, {}
        if twice := sorted(logged.keys() & record.scalars.keys()):
            raise UsageError(
                f"{', '.join(twice)}: logged by job.log and by step.log for step {record.step}; rename one"
            )
        return replace(record, scalars={**record.scalars, **logged})

    def log(self, values: Mapping[str, float]) -> bool:
        """Add values to the record of the step in progress, else the last, else the first. Returns whether that record
        is this worker's. Raises UsageError."""
        at = self._session.script.at
        if not at.entered:
            raise UsageError(
                "job.log() came before the loop, where there is no step yet; call it in the loop or after it"
            )
        if not at.in_step and self._left is None and at.step > 0:
            return False  # others, or an earlier run, have logged it
        if twice := sorted(values.keys() & self._logged.keys()):
            raise UsageError(f"job.log: {', '.join(twice)} was logged twice for one step; log each name once a step")
        self._logged |= values
        return True

    def joined(self, step: int) -> None:
        """A newcomer goes on in this step: what it has logged for another one is not the others'."""
        if step != self._session.script.at.step:
            self._logged = {}

    def logged(self) -> dict[str, str]:
        """The part of the fingerprint for job.log(); {}: nothing was logged for this step."""
        return {"job.log": shown(json.dumps(self._logged, sort_keys=True))} if self._logged else {}


def shown(text: str) -> str:
    """The beginning of a text, as a part of a fingerprint."""
    return text if len(text) <= _SHOWN_CHARACTERS_MAX else text[:_SHOWN_CHARACTERS_MAX] + "..."
