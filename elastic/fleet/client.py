"""An operator's questions to a fleet, through any of its replicas."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import grpc

from elastic.errors import ConfigError, ElasticError
from elastic.records.job_files import LogPiece
from elastic.rendezvous.operator_client import ask_leader, fetch_status, signal_worker
from elastic.security.channels import PLAIN, ChannelFactory
from elastic.wire import elastic_pb2 as pb
from elastic.wire.services import FleetStub

if TYPE_CHECKING:
    from elastic.config import JobSpec

TIMEOUT_S = 8.0
"""Most seconds for one answer; a node may take 5 seconds to read a log."""

ELECTION_S = 6.0
"""Seconds to ask again while nobody leads: an election takes 2 seconds, a little more if the leader's machine is
gone."""

PAUSE_S = 0.2

ASKED_AT_ONCE = 16

RUNNING = ("placed", "stopping")
"""States in which a job has a leader of its own."""


@dataclass(frozen=True, slots=True)
class Log(LogPiece):
    """A piece of a log. away: the log's node does not answer."""

    away: bool = False


class FleetClient:
    """Asks the leader of a fleet. replicas: "host:port" each, in any order. Each call raises ElasticError if nobody
    leads the fleet, and ConfigError with the leader's reason if it refuses."""

    def __init__(self, replicas: Sequence[str], wait_s: float = ELECTION_S, channels: ChannelFactory = PLAIN) -> None:
        self.replicas = tuple(replicas)
        self._channels = channels
        self._wait_s = wait_s

    def submit(self, spec: JobSpec, resume: str = "", token: str = "", identity: str = "") -> dict[str, Any]:
        """Submit a job. resume: "<job>@<checkpoint>", an ended job and the checkpoint from which the new job goes on,
        or "". token: calls with the same token mean one job, whichever comes first; "": a new job. identity: of a job
        of a fleet that is gone, to which the checkpoints at this job's place belong; then resume is "@<checkpoint>" or
        "". Returns {"job", "larger"}: the job's name, and a sentence if the job is larger than the fleet, else ""."""
        from elastic.wire import codec  # which plain questions do not need

        document = codec.to_json(spec).decode()
        submit = pb.Submit(document=document, resume=resume, token=token or secrets.token_hex(8), identity=identity)
        return self._ask(pb.Question(submit=submit))  # every attempt has the same token

    def stop(self, job: str, because: str) -> str:
        """Ask for the end of a job. Returns the job's full name."""
        return str(self._ask(pb.Question(stop=pb.Stop(job=job, because=because)))["job"])

    def scale(self, job: str, workers: int) -> dict[str, Any]:
        """Ask for another number of workers. Returns {"job", "workers", "before"}."""
        return self._ask(pb.Question(scale=pb.Scale(job=job, workers=workers)))

    def allow(self, owner: str, slots: int) -> dict[str, Any]:
        """Give an owner a quota; 0: none. Returns {"owner", "slots", "before"}."""
        return self._ask(pb.Question(allow=pb.Allow(owner=owner, slots=slots)))

    def cordon(self, node: str, because: str, *, over: bool) -> None:
        self._ask(pb.Question(cordon=pb.Cordon(node=node, because=because, over=over)))

    def end_agent(self, node: str, process: str) -> None:
        """Have the agent of a drained node end, if it is still this process; see AgentFacts. More calls do nothing."""
        self._ask(pb.Question(end_agent=pb.EndAgent(node=node, process=process)))

    def signal_worker(self, job: str, worker_id: str, *, kill: bool) -> None:
        """As operator_client.signal_worker. job: its full name."""
        signal_worker(self.replicas, worker_id, kill=kill, timeout_s=TIMEOUT_S, job=job, channels=self._channels)

    def overview(self) -> dict[str, Any]:
        """The jobs and nodes: {"leader", "term", "jobs": [...], "nodes": [...]}, as `elastic jobs --json` prints it."""
        return self._ask(pb.Question(overview=pb.Overview()))

    def job(self, name: str = "") -> dict[str, Any]:
        """The overview's entry of that job; "": of the only job that is not over."""
        jobs = cast(list[dict[str, Any]], self.overview()["jobs"])
        if name:
            found = [job for job in jobs if job["job"] == name]
            alike = [job for job in jobs if job["job"].rpartition("-")[0] == name]
            found = found or [job for job in alike if job["state"] != "ended"] or alike[-1:]
        else:
            found = [job for job in jobs if job["state"] != "ended"]
        if len(found) == 1:
            return found[0]
        if found:
            raise ConfigError(f"say which job: {', '.join(job['job'] for job in found)}")
        wanted = f"no job {name!r}" if name else "no job that is not over"
        raise ConfigError(f"{wanted}; `elastic jobs` shows which there are")

    def status(self, name: str = "") -> dict[str, Any]:
        """A job's status, as `elastic status --json` prints it: for a running job the words of its own leader and of
        the fleet."""
        return self.status_of(self.job(name))

    def status_of(self, job: dict[str, Any]) -> dict[str, Any]:
        """The status of the job with this entry of the overview."""
        told: dict[str, Any] = {"generation": 0, "members": [], **job}
        if job["state"] in ("ended", "waits"):
            return told
        try:
            own = fetch_status(self.replicas, TIMEOUT_S, job["job"], self._channels)
        except ElasticError as error:
            return {**told, "state": "unknown", "because": str(error)}
        return {**told, **own, "fleet": {"state": job["state"], "because": job["because"]}}

    def look(self) -> dict[str, Any]:
        """The overview, with "statuses": job -> its status, of each job that has begun."""
        from concurrent.futures import ThreadPoolExecutor  # which plain questions do not need

        overview = self.overview()
        begun = [job for job in overview["jobs"] if job["state"] in RUNNING]
        with ThreadPoolExecutor(ASKED_AT_ONCE) as threads:
            statuses = dict(zip((job["job"] for job in begun), threads.map(self.status_of, begun), strict=True))
        return {**overview, "statuses": statuses}

    def log(self, job: str, node: str, log: str, offset: int) -> Log:
        """A piece of a node's log, from the byte at `offset`; offset < 0: from so many bytes before its end."""
        ask = pb.ReadLog(job=job, node=node, log=log, offset=offset)
        told = self._ask(pb.Question(log=ask))
        text = str(told["text"]).encode("latin-1")
        return Log(text, int(told["end"]), int(told["size"]), away=bool(told.get("away")))

    def own_log(self, replica: str, job: str, log: str, offset: int) -> Log:
        """A piece of a replica's own journal of that job, or with job "" of its journal of the fleet. offset: as in
        `log`."""
        told = self._ask(pb.Question(log=pb.ReadLog(job=job, log=log, offset=offset, here=True)), (replica,))
        return Log(str(told["text"]).encode("latin-1"), int(told["end"]), int(told["size"]))

    def examine(self, node: str = "", replica: str = "") -> dict[str, Any]:
        """The facts that a node, or a replica, finds (elastic/fleet/probes.py). Raises ElasticError if it does not
        answer."""
        told = self._ask(pb.Question(examine=pb.Examine(node=node)), (replica,) if replica else ())
        if told.get("away"):
            raise ElasticError(f"node {node} does not answer")
        return told

    def crossings(self) -> dict[str, Any]:
        """Which nodes reach which other nodes at the ports of workers (elastic/fleet/probes.py)."""
        return self._ask(pb.Question(ports=pb.Ports()))

    def _ask(self, question: pb.Question, replicas: Sequence[str] = ()) -> dict[str, Any]:
        """replicas: the replicas that answer for themselves; empty: the fleet's leader answers."""
        deadline_s = time.monotonic() + (0.0 if replicas else self._wait_s)
        while True:
            try:
                answer: pb.Answer = ask_leader(replicas or self.replicas, lambda c: _asked(c, question), self._channels)
            except ConfigError:
                raise
            except ElasticError as error:
                if time.monotonic() >= deadline_s:
                    if replicas:
                        raise
                    raise ElasticError(f"{error}; `elastic doctor --rendezvous ...` looks at each replica") from error
                time.sleep(PAUSE_S)  # an election among other processes: there is nothing to wait on
                continue
            if answer.refused:
                raise ConfigError(answer.refused)
            document: dict[str, Any] = json.loads(answer.document)
            return document


def _asked(channel: grpc.Channel, question: pb.Question) -> pb.Answer:
    answer: pb.Answer = FleetStub(channel).Ask(question, timeout=TIMEOUT_S)
    return answer


def ended_text(entry: dict[str, Any]) -> str:
    """entry: that of the overview, of a job that is over."""
    digest = f", digest {entry['digest']}" if entry["digest"] else ""
    return f"{entry['job']} is over, exit {entry['exit_code']}: {entry['because']}{digest}"
