"""The metrics of a command, from start to end. These context managers listen at once: an address that cannot be used
ends the command before anything else is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from elastic.config import JobSpec
from elastic.errors import ElasticError
from elastic.metrics.follower import Follower, JobsIn
from elastic.metrics.http_endpoint import HttpEndpoint, Problem
from elastic.metrics.job_fold import JobFold, show_refusal, show_status
from elastic.metrics.metric_registry import MetricRegistry
from elastic.metrics.replica import ReplicaMetrics
from elastic.records.job_directory import read_json
from elastic.records.job_follower import Growing, JobFiles
from elastic.records.journal import parse
from elastic.rendezvous.operator_client import fetch_status

if TYPE_CHECKING:
    from elastic.security.keyring import Keyring  # processes without certificates need no cryptography

STATUS_S = 2.0
"""Most seconds for one answer of a job's leader."""

ASK_S = 5.0
"""Seconds between two questions to the leader of a job that runs, as often as scrapers come; else each look asks. A
question takes more than all else that a look does."""

Look = Callable[[int, float], object]


class _Served:
    """A registry, and the endpoint that shows it."""

    def __init__(self, address: str, keyring: Keyring | None) -> None:
        self.registry = MetricRegistry()
        self._stack = ExitStack()
        self._endpoint = HttpEndpoint(address, keyring)
        self._stack.callback(self._endpoint.close)

    def begin(self, ready: Problem, *looks: Look) -> str:
        """Follow, and answer. Returns the URL."""
        follower = Follower(self.registry, *looks)
        self._stack.callback(follower.close)
        self._endpoint.open(self.registry, lambda: follower.problem, ready)
        scheme = "http" if self._endpoint.keyring is None else "https"
        return f"{scheme}://{self._endpoint.address}/metrics"

    def close(self) -> None:
        self._stack.close()


@contextmanager
def of_run(address: str) -> Iterator[Callable[[Path, JobSpec], str]]:
    """For `elastic run`: call what it yields with the job's directory before the job begins; it returns the URL."""
    with closing(_Served(address, None)) as served:

        def begin(job_dir: Path, spec: JobSpec) -> str:
            asked = _AskedStatus(served.registry, job_dir, spec.name)
            fold = JobFold(served.registry, spec.name)
            fold.begin()
            files = JobFiles(job_dir, fold, from_end=True)
            return served.begin(lambda: asked.problem, files.look, asked.look)

        yield begin


@contextmanager
def of_agent(address: str, jobs_dir: Path, node: str, keyrings: Sequence[Keyring]) -> Iterator[str]:
    """For `elastic agent`. Yields the URL. keyrings: the agent's, with which it only calls, and last the workers', to
    be called."""
    with closing(_Served(address, keyrings[-1] if keyrings else None)) as served:
        daemon = _OwnJournal(served.registry, jobs_dir / "journal", f"daemon-{node}")
        jobs = JobsIn(jobs_dir, served.registry, leader_only=False)
        yield served.begin(lambda: daemon.problem, daemon.look, jobs.look, _certificates(served.registry, keyrings))


@contextmanager
def of_replica(address: str, directory: Path, keyrings: Sequence[Keyring]) -> Iterator[ReplicaMetrics]:
    """For `elastic rendezvous`. keyrings: first that with which the replica is called."""
    with closing(_Served(address, keyrings[0] if keyrings else None)) as served:
        own = _OwnJournal(served.registry, directory / "journal", "rendezvous-")
        jobs = JobsIn(directory / "jobs", served.registry, leader_only=True)
        told = ReplicaMetrics(served.registry)
        told.url = served.begin(lambda: told.problem, own.look, jobs.look, _certificates(served.registry, keyrings))
        yield told


class _AskedStatus:
    """Asks the leader of a job on this machine."""

    def __init__(self, registry: MetricRegistry, job_dir: Path, job: str) -> None:
        self._registry = registry
        self._dir = job_dir
        self._job = job
        self._asked_ns = 0
        self.problem = "the job is being started"

    def look(self, now_ns: int, now_wall: float) -> None:
        if not self.problem and now_ns - self._asked_ns < ASK_S * 1e9:
            return
        self._asked_ns = now_ns
        status = self._status()
        show_status(self._registry, self._job, status)
        state = status["state"] if status is not None else "unknown"
        self.problem = "" if state == "running" else f"the job is {state}"

    def _status(self) -> dict[str, Any] | None:
        if (result := read_json(self._dir / "result.json")) is not None:
            return {"state": "closed", "generation": result["generation"], "members": []}
        if (where := read_json(self._dir / "rendezvous.json")) is None:
            return {"state": "starting", "generation": 0, "members": []}
        try:
            return cast(dict[str, Any], fetch_status(where["address"], STATUS_S))
        except ElasticError:
            return None


class _OwnJournal:
    """The journal of this process: whom it has refused, and, of a daemon, whether it attends a fleet's leader."""

    def __init__(self, registry: MetricRegistry, journals: Path, prefix: str) -> None:
        self._registry = registry
        self._journals = journals
        self._prefix = prefix
        self._parts = {path: Growing(path, from_end=True) for path in self._found()}
        self.problem = "this node attends no leader of the fleet yet"

    def _found(self) -> list[Path]:
        return sorted(self._journals.glob(f"{self._prefix}*.jsonl"))

    def look(self, now_ns: int, now_wall: float) -> None:
        self._parts = {path: self._parts.get(path) or Growing(path, from_end=False) for path in self._found()}
        texts = [text for part in self._parts.values() for text in part.lines()]
        for line in filter(None, map(parse, texts)):
            match line:
                case {"event": "refused"}:
                    show_refusal(self._registry, line)
                case {"event": "attending_fleet"}:
                    self.problem = ""
                case {"event": "no_fleet_leader", "because": str(because)}:
                    self.problem = because


def _certificates(registry: MetricRegistry, keyrings: Sequence[Keyring]) -> Look:
    def look(now_ns: int, now_wall: float) -> None:
        for keyring in keyrings:
            current = keyring.current()
            days = (current.until - datetime.fromtimestamp(now_wall, UTC)).total_seconds() / 86_400
            registry.put("elastic_certificate_days_left", days, current.path.name)

    return look
