"""A job over several nodes, on a cluster of its own on this machine: three members of etcd, two replicas, and a node
for each worker.

Its processes write where each of them lives, in ``<job_dir>/cluster``; `gather` makes the directory of the job, as one
machine would have left it: journals, ledger, specification and result.
"""

from __future__ import annotations

import itertools
import json
import signal
import string
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from chaos_tests.cluster import Cluster, Hosts, Loopback, Network
from chaos_tests.cluster.cloud_metadata import AzureHost, Ec2, Gce, MetadataService
from chaos_tests.cluster.job_handle import Followed, JobFailed
from chaos_tests.support.json_lines import Tail
from elastic.config import JobSpec
from elastic.errors import ConfigError
from elastic.records import ledger
from elastic.records.files import write_atomically
from elastic.records.job_directory import read_json
from elastic.wire import codec

ETCD_MEMBERS = 3
REPLICAS = 2
NODES_MAX = len(string.ascii_lowercase)
CLOUDS: tuple[type[MetadataService], ...] = (Ec2, Gce, AzureHost)
"""The machines of the job belong to these clouds in turn."""


def node_names(workers: int) -> tuple[str, ...]:
    """A node for each. Raises ConfigError."""
    if workers > NODES_MAX:
        raise ConfigError(f"{workers} workers: each has a node of its own, and there are at most {NODES_MAX}")
    return tuple(string.ascii_lowercase[:workers])


class NodesJob(Followed):
    """For the main thread. job_dir: a new directory. cuttable: links between its nodes can be cut,
    for which `network.why_not` must say nothing. environment: of all its processes."""

    def __init__(
        self,
        job_dir: Path,
        spec: JobSpec,
        on_poll: Callable[[Followed], None],
        environment: Mapping[str, str],
        *,
        cuttable: bool,
    ) -> None:
        super().__init__(on_poll, lambda: (*self.cluster.journals(), *(job_dir / "journal").glob("*.jsonl")))
        self.dir = job_dir
        self.network = Network() if cuttable else None
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
                    nodes=self.nodes,
                    environment=self._environment,
                    clouds=clouds,
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
        return node_names(self._spec.workers)

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
        """What all nodes have left, in one place. Raises JobFailed if two of them tell a step differently."""
        for path in self.cluster.journals():
            name = "-".join(path.relative_to(self.cluster.home).with_suffix("").parts)
            write_atomically(self.dir / "journal" / f"{name}.jsonl", path.read_bytes())
        write_atomically(self.dir / "steps.jsonl", b"".join(_text(line) for line in self._applied()))
        if (result := self._result()) is not None:
            write_atomically(self.dir / "result.json", json.dumps(result).encode())

    def _applied(self) -> list[dict[str, Any]]:
        """Each step's line; of a step that was done again, because every copy of its result was lost, the first one."""
        parts = [list(ledger.lines(path)) for path in self.cluster.ledgers(self.name)]
        try:
            ledger.merged(self.cluster.ledgers(self.name))
        except ledger.LedgerConflict as conflict:
            raise JobFailed(f"the ledgers of two nodes differ: {conflict}") from conflict
        first: dict[int, dict[str, Any]] = {}
        for line in sorted((line for part in parts for line in part), key=lambda line: int(line["generation"])):
            first.setdefault(line["step"], line)
        return [first[step] for step in sorted(first)]


def _text(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line).encode() + b"\n"
