"""Where a job's files and status come from, and who carries out an action."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

from elastic.fleet.findings import Finding
from elastic.fleet.remote_logs import LogSource, stacks
from elastic.observability.dashboard.job_history import JobHistory
from elastic.records.journal import Line

BECAUSE = "asked for on the dashboard"


class Action(StrEnum):
    """An operator's action on a job, or on one of its workers."""

    STOP = "stop"
    SCALE = "scale"
    STACKS = "stacks"
    KILL = "kill"


def act_on_worker(action: Action, worker: str, logs: LogSource, signal: Callable[[bool], None]) -> str:
    """STACKS and KILL. signal: has the worker's agent kill it, or else have it show its stacks. Returns and raises as
    JobSource.act."""
    if action is Action.STACKS:
        return stacks(logs, worker, lambda: signal(False))
    signal(True)
    return f"the agent of {worker} kills it"


class JobSource(Protocol):
    """A source of one job. Its methods block, and are called by one thread at a time."""

    @property
    def actions(self) -> Sequence[Action]:
        """What may be done here, by this user."""

    def poll(self, history: JobHistory) -> bool:
        """Put into the history what has been written since the last call. Returns whether there was anything."""

    def status(self) -> Mapping[str, Any]:
        """As `elastic status --json` shows it; state "unknown" where nobody answers."""

    def logs(self) -> LogSource: ...

    def lines(self) -> tuple[list[Line], dict[str, str]]:
        """All journal lines of the job by time, for a story; and machine -> why its lines are missing."""

    def flight(self) -> str:
        """What each worker did last, and who waits for whom. Raises ConfigError if that is not known here."""

    def act(self, action: Action, worker: str = "", workers: int = 0) -> str:
        """Have it done. Returns a sentence, or for STACKS the stacks. Raises ConfigError if it is refused, ElasticError
        if nobody answers."""


class FleetSource(Protocol):
    """A fleet, and its jobs."""

    may_act: bool

    def overview(self) -> Mapping[str, Any]:
        """As `elastic jobs --json` shows it. Raises ElasticError if nobody leads the fleet."""

    def findings(self) -> list[Finding]:
        """As `elastic doctor --rendezvous` finds them; that takes some seconds."""

    def job(self, name: str) -> JobSource:
        """Raises ConfigError if there is no such job."""

    def drain(self, node: str, *, over: bool) -> str: ...
