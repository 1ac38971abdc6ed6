"""A fleet as a test sees it: a cluster, the trainer of the live tests as its jobs, and what to wait for."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from chaos_tests.cluster import Cluster, Hosts
from elastic.agent.process.worker_process import facts
from elastic.cli.job.top import with_members
from elastic.errors import ElasticError
from elastic.records import ledger
from tests.live.jobs import DEADLINE_S, POLL_S, ROOT, TRAINER
from tests.live.spread import told_from

T = TypeVar("T")
Line = dict[str, Any]


class Fleet(Cluster):
    """Context manager; whatever it started is gone afterwards, and a failure is told with logs and journals."""

    def __init__(
        self,
        home: Path,
        hosts: Hosts | None = None,
        *,
        etcd: int = 1,
        replicas: int = 2,
        nodes: Sequence[str] = (),
        certs: bool = False,
    ) -> None:
        self.gates = home / "gates"
        self.gates.mkdir()
        environment = {"PYTHONPATH": str(ROOT)}
        super().__init__(home, hosts, etcd=etcd, replicas=replicas, nodes=nodes, environment=environment, certs=certs)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        super().__exit__(kind, error, tb)
        if error is not None:
            error.add_note(self.story())

    def train(self, name: str, *options: str, script: Path = TRAINER, **fields: Any) -> str:
        """Submit the script of the live tests, which does not end before its pace is 0. Returns the job's name."""
        (self.gates / "end").touch()
        fields["timing"] = {"join_window_s": DEADLINE_S, **fields.get("timing", {})}  # also for who starts slowly
        values = {"workers": 3, "checkpoint_dir": str(self.home / "checkpoints"), **fields}
        environment = {"LIVE_GATES": str(self.gates), "OMP_NUM_THREADS": "1"}
        return self.submit(*options, name=name, command=["python", str(script)], env=environment, **values)

    # -------------------------------------------------------------------------------------------------- what is

    def until(self, what: str, reached: Callable[[], T | None], deadline_s: float = DEADLINE_S) -> T:
        """The first true value."""
        deadline = time.monotonic() + deadline_s
        while not (value := reached()):
            assert time.monotonic() < deadline, f"not within {deadline_s} s: {what}"
            time.sleep(POLL_S)  # files and other processes: there is nothing to wait on
        return value

    def status(self, job: str) -> Line:
        """state "" while nobody can say."""
        try:
            return self.client.status(job)
        except ElasticError:
            return {"state": "", "generation": 0, "term": 0, "members": [], "applied": 0}

    def entry(self, job: str) -> Line:
        """Of `elastic jobs`."""
        return self.client.job(job)

    def leader_of(self, job: str) -> str:
        """The replica that leads it."""
        leader = self.client.status(job)["leader"]
        return next(name for name in self.replicas if self.address(name) == leader)

    @contextmanager
    def agreeing(self, job: str) -> Iterator[dict[int, int]]:
        """Whatever happens meanwhile, `elastic jobs` and `elastic status` name the same members of a generation. Yields
        generation -> how often they were compared; both were asked about it, one after the other."""
        compared: dict[int, int] = {}
        differing: list[tuple[Line, Line]] = []
        over = threading.Event()

        def compare() -> None:
            while not over.wait(3 * POLL_S):
                with suppress(ElasticError):  # nobody leads just now
                    (entry,) = (one for one in with_members(self.client.look())["jobs"] if one["job"] == job)
                    status = self.client.status(job)
                    if status["state"] == "unknown" or entry["members"] is None:
                        continue
                    if status["generation"] == entry["generation"]:
                        number = status["generation"]
                        compared[number] = compared.get(number, 0) + 1
                        if entry["members"] != [member["worker_id"] for member in status["members"]]:
                            differing.append((entry, status))

        with ThreadPoolExecutor(1) as pool:
            comparing = pool.submit(compare)
            try:
                yield compared
            finally:
                over.set()
        comparing.result()
        assert differing == []

    def await_members(self, job: str, *worker_ids: str) -> Line:
        """Those, in any order, as the members of a job that runs, all of whom have applied a step."""

        def there() -> Line | None:
            status = self.status(job)
            applied = {member["worker_id"]: member["applied"] for member in status["members"]}
            settled = sorted(applied) == sorted(worker_ids) and all(applied.values())
            return status if status["state"] == "running" and settled else None

        return self.until(f"members {worker_ids} of {job}", there)

    def await_slots(self, job: str, *slots: str, gone: str = "") -> Line:
        """Until workers of these slots, of any incarnation, are the members of a job that runs, and have applied a
        step: a newcomer whose epoch ends before it has copied the state is replaced by another process. gone: a worker
        that is none of them."""

        def there() -> Line | None:
            status = self.status(job)
            applied = {member["worker_id"].rpartition(".")[0]: member["applied"] for member in status["members"]}
            settled = sorted(applied) == sorted(slots) and all(applied.values()) and gone not in pids(status)
            return status if status["state"] == "running" and settled else None

        return self.until(f"workers of {slots} of {job}", there)

    def await_end(self, job: str, deadline_s: float = DEADLINE_S) -> Line:
        def ended() -> Line | None:
            return e if (e := self.entry(job))["state"] == "ended" else None

        return self.until(f"the end of {job}", ended, deadline_s)

    def steps(self, *jobs: str) -> list[Line]:
        """The ledgers of all nodes, merged by step."""
        return ledger.merged(path for job in jobs for path in self.ledgers(job))

    def await_more_steps(self, job: str, count: int, deadline_s: float = DEADLINE_S) -> None:
        """From now on."""
        wanted = len(self.steps(job)) + count
        self.until(f"{count} more steps of {job}", lambda: len(self.steps(job)) >= wanted, deadline_s)

    def events(self, event: str, **fields: object) -> list[Line]:
        return [line for line in self.journal() if line["event"] == event and fields.items() <= line.items()]

    def agent_of(self, job: str, node: str) -> int:
        """The pid of a job's agent on a node."""
        return int(self.events("attending", job=job, node=node)[-1]["pid"])

    def kill_worker(self, job: str, worker_id: str) -> None:
        os.kill(self.events("worker_started", job=job, worker_id=worker_id)[-1]["pid"], signal.SIGKILL)

    def pids(self) -> list[int]:
        """Of all agents of jobs, standbys and workers that were ever started here."""
        known = ("job_agent_started", "standby_started", "worker_started")
        return [line["pid"] for line in self.journal() if line["event"] in known]

    def living(self) -> list[int]:
        """Those of `pids` that are still there; they are given time to go."""
        deadline_s = time.monotonic() + DEADLINE_S
        while (left := [pid for pid in self.pids() if lives(pid)]) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        return left

    def pace(self, seconds: float) -> None:
        """How long the script takes over a shard from now on; 0: to its end."""
        temporary = self.gates / "pace.tmp"
        temporary.write_text(str(seconds))
        temporary.rename(self.gates / "pace")
        if not seconds:
            (self.gates / "end").unlink(missing_ok=True)

    def finish(self, job: str, digest: str, steps: Sequence[Line]) -> None:
        """At full pace to the end, which has these bits, with every step once."""
        self.pace(0.0)
        ended = self.await_end(job)
        assert (ended["exit_code"], ended["digest"]) == (0, digest), ended["because"]
        assert ledger.compare(self.steps(job), steps) is None

    def story(self) -> str:
        """For a failure."""
        logs = [*self.home.glob("*.log"), *self.home.glob("*/*/logs/*.log")]
        tails = [f"--- {log}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-12:]) for log in logs]
        return "\n".join([*tails, *told_from(self.journal()[-150:])])


def pids(status: Line) -> dict[str, int]:
    """Of the members."""
    return {member["worker_id"]: member["pid"] for member in status["members"]}


def lives(pid: int) -> bool:
    seen = facts(pid)
    return seen is not None and seen.state not in "ZX"
