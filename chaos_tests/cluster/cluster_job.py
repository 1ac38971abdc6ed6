"""A job over several nodes, on a cluster of its own on this machine: three members of etcd, two replicas, and a node
for each worker.

Its processes write where each of them lives, in ``<job_dir>/cluster``; `gather` makes the directory of the job, as one
machine would have left it: journals, ledger, specification and result.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import string
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from chaos_tests.cluster import Cluster, Hosts, Loopback, Network
from chaos_tests.cluster.cloud_metadata import AzureHost, Ec2, Gce, MetadataService
from chaos_tests.cluster.cluster import NODE_LABEL
from chaos_tests.cluster.job_handle import JOB_POLL_S, Followed
from chaos_tests.support.json_lines import Tail
from elastic.config import JobSpec
from elastic.errors import ConfigError, ElasticError
from elastic.records import ledger
from elastic.records.files import write_atomically
from elastic.records.job_directory import read_json
from elastic.records.journal import Journal, journal_path
from elastic.wire import codec

ETCD_MEMBERS = 3
REPLICAS = 2
URGENT, URGENT_S, URGENT_ENDS_S = "urgent", 60.0, 20.0
"""The name of a job that takes a node of this one, after how many seconds it ends by itself, and most seconds in which
it has to end when it is stopped."""
NODES_MAX = len(string.ascii_lowercase)
CLOUDS: tuple[type[MetadataService], ...] = (Ec2, Gce, AzureHost)
"""The machines of the job belong to these clouds in turn."""


def node_names(workers: int, slots: int = 1) -> tuple[str, ...]:
    """A node for each so many workers. Raises ConfigError."""
    nodes = -(-workers // slots)
    if nodes > NODES_MAX:
        raise ConfigError(f"{workers} workers need {nodes} nodes of {slots} each, and there are at most {NODES_MAX}")
    return tuple(string.ascii_lowercase[:nodes])


class NodesJob(Followed):
    """For the main thread. job_dir: a new directory. cuttable: links between its nodes can be cut,
    for which `network.why_not` must say nothing. slots: workers of each node. environment: of all its processes."""

    def __init__(
        self,
        job_dir: Path,
        spec: JobSpec,
        on_poll: Callable[[Followed], None],
        environment: Mapping[str, str],
        *,
        cuttable: bool,
        slots: int = 1,
    ) -> None:
        super().__init__(on_poll, lambda: (*self._journals_of_cluster(), *(job_dir / "journal").glob("*.jsonl")))
        self.dir = job_dir
        self.name = ""
        self.network = Network() if cuttable else None
        self.slots = slots
        self._spec = replace(spec, checkpoint_dir=str(job_dir / "checkpoints"))
        self._environment = environment
        self._stack = ExitStack()
        self.stopped = False
        self._parts: dict[Path, Tail] = {}
        self._known: dict[int, dict[str, Any]] = {}
        self._steps: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        (self.dir / "cluster").mkdir(parents=True)
        (self.dir / "journal").mkdir()
        with ExitStack() as stack:
            hosts: Hosts = stack.enter_context(self.network) if self.network is not None else Loopback()
            made = zip(self.nodes, itertools.cycle(CLOUDS))
            clouds = {node: stack.enter_context(cloud(hosts.outside)) for node, cloud in made}
            self.cluster = stack.enter_context(
                Cluster(
                    self.dir / "cluster",
                    hosts,
                    etcd=ETCD_MEMBERS,
                    replicas=REPLICAS,
                    nodes=clouds,
                    slots=self.slots,
                    environment=self._environment,
                )
            )
            self._stack = stack.pop_all()
        return self

    def submit(self) -> None:
        self.name = str(self.cluster.client.submit(self._spec)["job"])
        self._spec = replace(self._spec, name=self.name)
        write_atomically(self.dir / "job.json", codec.to_json(self._spec))

    def stop(self) -> None:
        self.stopped = True
        self._stack.close()

    @property
    def mark(self) -> str:
        return self.cluster.mark

    @property
    def nodes(self) -> tuple[str, ...]:
        return node_names(self._spec.workers, self.slots)

    @property
    def first_workers(self) -> list[str]:
        return [f"{node}.{slot}.0" for node in self.nodes for slot in range(self.slots)]

    @property
    def daemons(self) -> frozenset[int]:
        """The pids of the nodes' and replicas' daemons, which stay when the job has ended."""
        processes = (*self.cluster.nodes.values(), *self.cluster.replicas.values())
        return frozenset(process.pid for process in processes)

    def place(self, node: str) -> Path:
        """The job's directory on that node."""
        return self.cluster.home / node / self.name

    def exit_code(self) -> int | None:
        """As any node was told; minus SIGKILL, if it was stopped."""
        if (result := self._result()) is not None:
            return int(result["exit_code"])
        return -signal.SIGKILL if self.stopped else None

    def _result(self) -> dict[str, Any] | None:
        told = (read_json(self.place(node) / "result.json") for node in self.nodes)
        return next((result for result in told if result is not None), None)

    # Another job

    def preempt(self, node: str, number: int) -> str:
        """Submit a job of a higher priority that needs all slots of that node, and trains nothing. number: the same one
        means the same job. Returns its name. Raises ElasticError."""
        urgent = JobSpec(
            name=URGENT,
            command=(sys.executable, "-c", f"import time; time.sleep({URGENT_S})"),
            workers=self.slots,
            min_workers=self.slots,
            labels=(f"{NODE_LABEL}={node}",),
            priority=self._spec.priority + 1,
            checkpoint_dir=self._spec.checkpoint_dir,
        )
        return str(self.cluster.client.submit(urgent, token=f"{URGENT}-{number}")["job"])

    def end_preemption(self, urgent: str) -> None:
        """End the job that `preempt` has submitted, unless it has ended. Raises ElasticError if it goes on."""
        client, deadline_s = self.cluster.client, time.monotonic() + URGENT_ENDS_S
        if client.job(urgent)["state"] != "ended":
            client.stop(urgent, "chaos")
        while client.job(urgent)["state"] != "ended":
            if time.monotonic() > deadline_s:
                raise ElasticError(f"{urgent} has not ended {URGENT_ENDS_S:g} s after it was stopped")
            time.sleep(JOB_POLL_S)  # another process: there is nothing to wait on

    def _journals_of_cluster(self) -> list[Path]:
        """Those of replicas, nodes and this job, without those of other jobs."""
        places = {self.name, *self.nodes, *self.cluster.replicas}
        return [path for path in self.cluster.journals() if path.parents[1].name in places]

    # Following

    def output(self) -> str:
        logs = sorted((*self.cluster.home.glob("*.log"), *self.cluster.home.glob(f"*/{self.name}/logs/*.log")))
        return "\n".join(f"--- {log}\n{log.read_text(errors='replace')[-1000:]}" for log in logs)

    def steps(self) -> list[dict[str, Any]]:
        for path in self.cluster.ledgers(self.name):
            for line in self._parts.setdefault(path, Tail(path, json.loads)).lines():
                self._known.setdefault(line["step"], line)
        while len(self._steps) in self._known:
            self._steps.append(self._known[len(self._steps)])
        return self._steps

    # The end

    def gather(self) -> None:
        """What all nodes have left of it, in one place. If two of them tell a step differently, its journal says so."""
        for path in self._journals_of_cluster():
            name = "-".join(path.relative_to(self.cluster.home).with_suffix("").parts)
            write_atomically(self.dir / "journal" / f"{name}.jsonl", path.read_bytes())
        steps, because = self._applied()
        write_atomically(self.dir / "steps.jsonl", b"".join(map(_text, steps)))
        if because:
            with Journal(journal_path(self.dir, "ledgers"), self.name, "harness", "harness") as journal:
                journal.write("ledgers_differ", because=because)
        if (result := self._result()) is not None:
            write_atomically(self.dir / "result.json", json.dumps(result).encode())

    def _applied(self) -> tuple[list[dict[str, Any]], str]:
        """Each step's line, and why the nodes' ledgers are no ledger of one job, or "". Of a step that was done again,
        because every copy of its result was lost, the first line counts."""
        paths, told, because = self.cluster.ledgers(self.name), list[dict[str, Any]](), ""
        try:
            ledger.merged(paths)
        except ledger.LedgerConflict as conflict:
            because = str(conflict)
        for path in paths:
            with contextlib.suppress(ledger.LedgerConflict):  # told above; the lines before a damaged one count
                for line in ledger.lines(path):
                    told.append(line)
        first: dict[int, dict[str, Any]] = {}
        for line in sorted(told, key=lambda line: int(line["generation"])):
            first.setdefault(line["step"], line)
        return [first[step] for step in sorted(first)], because


def _text(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line).encode() + b"\n"
