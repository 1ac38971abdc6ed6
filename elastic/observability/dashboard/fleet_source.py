"""The jobs of a fleet, through its replicas: what their leaders and the agents of their nodes have written.

Journals of workers are not followed, because each worker has one: a large job would cost its nodes too much. A story,
which is told when somebody asks for it, has them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from elastic.errors import ConfigError, ElasticError
from elastic.fleet import probes, remote_logs
from elastic.fleet.client import FleetClient
from elastic.fleet.findings import Finding, findings
from elastic.fleet.remote_logs import Read, RemoteTail
from elastic.observability.dashboard.job_history import JobHistory
from elastic.observability.dashboard.sources import BECAUSE, Action, act_on_worker
from elastic.records.job_files import LEDGER
from elastic.records.job_follower import parsed_steps
from elastic.records.journal import Line

LEDGER_BYTES = 1 << 22
"""Most bytes of a ledger that are read when its page is opened, from the end: they go through the fleet's leader."""


class RemoteJob:
    """A job of a fleet. Created by FleetClientSource.job."""

    def __init__(self, client: FleetClient, job: str, *, may_act: bool) -> None:
        self._client = client
        self._job = job
        self._may_act = may_act
        self._tails: dict[tuple[str, str], RemoteTail] = {}
        """(replica or node, file) -> how far it was read."""
        self._nodes: set[str] = set()
        """Which have had workers of the job."""
        self._asked: set[str] = set()
        """Which have answered whether they have."""
        self._entry: Mapping[str, Any] = {}

    @property
    def actions(self) -> Sequence[Action]:
        return tuple(Action) if self._may_act else ()

    def poll(self, history: JobHistory) -> bool:
        overview = self._client.overview()
        self._entry = next((job for job in overview["jobs"] if job["job"] == self._job), self._entry)
        up = {node["node"] for node in overview["nodes"] if node["up"]}
        # Where it is now, and where it was: a job that is over, or has moved, is on other nodes or on none.
        self._nodes |= set(self._entry.get("slots", {})) | {node for node in up - self._asked if self._was_on(node)}
        lines = [line for address in self._client.replicas for line in self._of_replica(address)]
        lines += [line for node in sorted(self._nodes & up) for line in self._of_agent(node)]
        for line in sorted(lines, key=lambda line: float(line["t_wall"])):
            if line["event"] in history.events:
                history.see(line)
        steps = [step for node in sorted(self._nodes & up) for step in self._steps(node)]
        history.applied(sorted(steps, key=lambda step: int(step["step"])), time.monotonic())
        history.tick(time.monotonic(), time.time())
        if self._entry.get("state") == "ended":
            history.ended(0.0)
        return bool(lines or steps)

    def status(self) -> Mapping[str, Any]:
        return self._client.status(self._job)

    def logs(self) -> remote_logs.LogSource:
        return remote_logs.FleetLogs(self._client, self._job)

    def lines(self) -> tuple[list[Line], dict[str, str]]:
        return remote_logs.of_job(self._client, self._job)

    def flight(self) -> str:
        raise ConfigError("what workers did last is told on their nodes: elastic story --flight --job-dir DIR")

    def act(self, action: Action, worker: str = "", workers: int = 0) -> str:
        match action:
            case Action.STACKS | Action.KILL:
                signal = self._client.signal_worker
                return act_on_worker(action, worker, self.logs(), lambda kill: signal(self._job, worker, kill=kill))
            case Action.SCALE:
                told = self._client.scale(self._job, workers)
                return f"{told['job']} is to have {told['workers']} workers; it was {told['before']}"
            case Action.STOP:
                return f"{self._client.stop(self._job, BECAUSE)} ends after a step, with a checkpoint of it"

    def _of_replica(self, address: str) -> Iterator[Line]:
        """The job's journals there, and the lines about it in the replica's own journal."""
        read = partial(self._client.own_log, address)
        with suppress(ElasticError):  # it is away; its lines come when it is back
            for whose, name in remote_logs.journals(read, self._job):
                yield from self._new_lines(f"{address}/{whose}", whose, name, read)

    def _was_on(self, node: str) -> bool:
        try:
            files = remote_logs.of_node(self._client, node, self._job, "", 0).text
        except ElasticError:  # the next look asks again
            return False
        self._asked.add(node)
        return bool(files)

    def _of_agent(self, node: str) -> Iterator[Line]:
        with suppress(ElasticError):
            name = f"{remote_logs.PREFIX}agent-{node}"
            yield from self._new_lines(node, self._job, name, partial(remote_logs.of_node, self._client, node))

    def _steps(self, node: str) -> Iterator[dict[str, Any]]:
        with suppress(ElasticError):
            read = partial(remote_logs.of_node, self._client, node)
            if (node, LEDGER) not in self._tails:
                size = read(self._job, LEDGER, 0).size
                self._tails[node, LEDGER] = RemoteTail(max(0, size - LEDGER_BYTES))
            yield from parsed_steps(self._tails[node, LEDGER].lines(read, self._job, LEDGER))

    def _new_lines(self, where: str, job: str, name: str, read: Read) -> Iterator[Line]:
        tail = self._tails.setdefault((where, name), RemoteTail())
        return remote_logs.lines_about(self._job, tail.lines(read, job, name))


class FleetClientSource:
    """may_act: whether the certificate is an operator's; a viewer's page has no buttons that would be refused."""

    def __init__(self, client: FleetClient, *, may_act: bool) -> None:
        self._client = client
        self.may_act = may_act

    def overview(self) -> Mapping[str, Any]:
        return self._client.overview()

    def findings(self) -> list[Finding]:
        return findings(probes.take(self._client))

    def job(self, name: str) -> RemoteJob:
        if all(job["job"] != name for job in self._client.overview()["jobs"]):
            raise ConfigError(f"the fleet has no job {name!r}")
        return RemoteJob(self._client, name, may_act=self.may_act)

    def drain(self, node: str, *, over: bool) -> str:
        self._client.cordon(node, "" if over else BECAUSE, over=over)
        return f"node {node} may have jobs again" if over else f"node {node} is being emptied, and gets no job"
