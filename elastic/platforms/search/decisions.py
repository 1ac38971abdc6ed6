"""What becomes of a trial, by what is seen of its job. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from elastic.errors import ExitCode

GOES_ON = (ExitCode.DRAINED, ExitCode.STATE_LOST, ExitCode.BELOW_QUORUM, ExitCode.INTERRUPTED, ExitCode.TERMINATED)
"""How a job ends that can go on from its newest checkpoint."""

ATTEMPTS = 5
"""How often in a row a job may end so without a step more, before its trial has failed."""


class JobState(StrEnum):
    ABSENT = "absent"
    """No job of the trial has begun."""
    WAITS = "waits"
    RUNS = "runs"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class TrialJobView:
    """What is seen of a trial's job. because: in one sentence, "" if there is nothing to say. stopped: somebody has
    asked for its end. workers: how many it has now. values: step -> the metric."""

    state: JobState
    exit_code: int = 0
    because: str = ""
    stopped: bool = False
    workers: int = 0
    values: Mapping[int, float] = field(default_factory=dict)


class Deed(StrEnum):
    """What to do with a trial. BEGIN: start its job, or let it go on. STOP: end its job. The last three end it."""

    WAIT = "wait"
    BEGIN = "begin"
    STOP = "stop"
    COMPLETE = "complete"
    PRUNED = "pruned"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Decision:
    deed: Deed
    value: float = math.nan
    because: str = ""


def decide(job: TrialJobView, metric: str, *, pruned: bool, interrupted: bool, attempts: int) -> Decision:
    """pruned: that has been decided and written down. interrupted: an earlier search has stopped the job when it ended.
    attempts: how often in a row the job was begun without a step more."""
    if job.state is not JobState.ENDED:
        if job.state is JobState.ABSENT:
            return Decision(Deed.PRUNED if pruned else Deed.BEGIN)
        return Decision(Deed.STOP if pruned else Deed.WAIT)
    if pruned:
        return Decision(Deed.PRUNED)
    if job.exit_code == ExitCode.DONE:
        return _complete(job.values, metric)
    if job.exit_code in GOES_ON and (interrupted or not job.stopped):
        if attempts < ATTEMPTS:
            return Decision(Deed.BEGIN)
        return Decision(Deed.FAIL, because=f"it was interrupted {attempts} times in a row: {job.because}")
    return Decision(Deed.FAIL, because=job.because or f"its job ended with exit code {job.exit_code}")


def _complete(values: Mapping[int, float], metric: str) -> Decision:
    if not values:
        return Decision(Deed.FAIL, because=f"its script never logged {metric!r}; step.log or job.log gives it a value")
    value = values[max(values)]
    if math.isnan(value):
        return Decision(Deed.FAIL, because=f"its last {metric} is not a number")
    return Decision(Deed.COMPLETE, value)


def values_of(steps: Iterable[Mapping[str, Any]], metric: str) -> dict[int, float]:
    """Step -> the metric, of the lines of a ledger that have it. Infinite values and NaN are strings there."""
    return {line["step"]: float(line["scalars"][metric]) for line in steps if metric in line.get("scalars", {})}
