"""A whole cluster: etcd, replicas of the rendezvous and nodes, each a real process on a host of its own; and its
certificates: an authority of the cluster's own, and a directory for each process and person who needs one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

from chaos_tests.cluster.cloud_metadata import MetadataService
from chaos_tests.cluster.etcd import EtcdMembers, sturdy_binary
from chaos_tests.cluster.hosts import PREFIX, Hosts, Loopback
from chaos_tests.support.json_lines import Journals
from chaos_tests.support.processes import MARK, await_exits, kill_if_there, living, new_mark
from elastic.errors import ElasticError
from elastic.fleet.client import FleetClient
from elastic.process import children
from elastic.records import temp_dirs
from elastic.security import certificate_authority
from elastic.security.channels import ChannelFactory
from elastic.security.keyring import of_role
from elastic.security.roles import CERTS_VARIABLE, ETCD_SERVER_NAME, Role
from elastic.store.embedded import find_binary
from elastic.store.etcd import Tls

REPLICA_PORT = 7070
NODE_LABEL = "node"
"""The label of each node: its name."""
START_S = 60.0
VERB_S = 120.0
CLOSE_S = 20.0
"""For the keepers of jobs to end what is below them, once their daemon is gone."""
CLUSTER_POLL_S = 0.02
OWN_PREFIX = "elastic-cluster-"
"""With this begins the name of the directory of etcd's data. A later cluster removes the directory if this process is
killed."""


class Cluster:
    """Context manager, for the main thread; whatever it started is gone afterwards, and etcd's data with it.

    home: gets a directory for each replica and node, and a log of each process. hosts: by default loopback addresses,
    which cannot be cut off from each other. nodes: their names, or name -> the metadata service which says whether its
    machine is about to go. slots: of each node. environment: of the nodes, and so of the jobs, besides this process's
    own. certs: replicas, nodes, operators and etcd show each other certificates. mark: of all processes; see
    processes.py.
    """

    def __init__(
        self,
        home: Path,
        hosts: Hosts | None = None,
        *,
        etcd: int = 1,
        replicas: int = 2,
        nodes: Iterable[str] | Mapping[str, MetadataService] = (),
        slots: int = 1,
        environment: Mapping[str, str] | None = None,
        certs: bool = False,
    ) -> None:
        self.home = home
        self._told = Journals(self.journals)
        self._papers = Papers(home / "certs") if certs else None
        self.hosts = hosts if hosts is not None else Loopback()
        self.replicas: dict[str, subprocess.Popen[bytes]] = {}
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.clouds: Mapping[str, MetadataService] = nodes if isinstance(nodes, Mapping) else {}
        self.mark = new_mark()
        self._slots = slots
        self._environment = {**os.environ, CERTS_VARIABLE: "", **(environment or {}), MARK: self.mark}
        self._insecure = () if certs or isinstance(self.hosts, Loopback) else ("--insecure",)
        self._own = temp_dirs.in_tmp(OWN_PREFIX)
        names = [f"r{number}" for number in range(replicas)]
        addresses = [f"{self.hosts.add(name)}:{REPLICA_PORT}" for name in names]
        self.client = FleetClient(addresses, channels=self._channels())
        try:
            self.etcd = self._etcd_of(etcd)
        except BaseException:
            self._own.remove()
            raise
        try:
            self.etcd.wait_healthy()
            for name in names:
                self.replica(name)
            for name in nodes:
                self.node(name)
            self.await_nodes(*self.nodes)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End everything. Any number of times."""
        for process in (*self.nodes.values(), *self.replicas.values()):
            process.kill()
            process.wait()
        for pid in (left := await_exits(living(self.mark), CLOSE_S)):
            kill_if_there(pid)
        await_exits(left, CLOSE_S)
        self.etcd.close()
        self._own.remove()

    # ------------------------------------------------------------------------------------------------- processes

    def replica(self, name: str, *options: str) -> None:
        """Start a replica, again under the address it had, with options of `elastic rendezvous`, and wait until it
        listens."""
        (self.home / name / "rendezvous.json").unlink(missing_ok=True)
        where = ("--etcd", ",".join(self.etcd.endpoints), "--listen", self.address(name), *self._insecure)
        where = (*where, *self._shown(name, Role.RENDEZVOUS))
        where = where if sturdy_binary() else (*where, "--allow-unsafe-etcd")
        process = self.replicas[name] = self.start(name, "rendezvous", *where, "--dir", str(self.home / name), *options)
        deadline_s = time.monotonic() + START_S
        while not (self.home / name / "rendezvous.json").exists():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise ElasticError(f"{name} does not listen: {(self.home / f'{name}.log').read_text()[-2000:]}")
            time.sleep(CLUSTER_POLL_S)  # a file of another process: there is nothing to wait on

    def node(self, name: str, *options: str) -> None:
        """Start the daemon of a node, with options of `elastic agent`."""
        words = ("--rendezvous", ",".join(self.client.replicas), "--node", name, "--jobs-dir", str(self.home / name))
        where = (
            *("--address", self.hosts.add(name)),
            *("--label", f"{NODE_LABEL}={name}", "--slots", str(self._slots)),
            *self._insecure,
            *self._shown(name, Role.AGENT),
        )
        if (cloud := self.clouds.get(name)) is not None:
            options = ("--notices", cloud.choice, *options)
        environment = cloud.environment if cloud is not None else {}
        self.nodes[name] = self.start(name, "agent", *words, *where, *options, environment=environment)

    def start(
        self, host: str, *words: str, environment: Mapping[str, str] = MappingProxyType({})
    ) -> subprocess.Popen[bytes]:
        """`elastic` with these words on a host, its output in ``<home>/<host>.log``."""
        command = [*PREFIX, *self.hosts.within(host), sys.executable, "-m", "elastic.cli", *words]
        own = {"cwd": self.home, "env": {**self._environment, **environment}}
        return children.start(command, self.home / f"{host}.log", obeys=False, **own)

    def _shown(self, name: str, role: Role) -> tuple[str, ...]:
        return () if self._papers is None else ("--certs", str(self._papers.of(name, role)))

    def _etcd_of(self, size: int) -> EtcdMembers:
        binary = sturdy_binary() or find_binary()
        if self._papers is None:
            return EtcdMembers(binary, self._own.path, size, self.hosts)
        addresses = [self.hosts.add(f"etcd{number}") for number in range(size)]
        flags, tls = self._papers.of_etcd(addresses)
        return EtcdMembers(binary, self._own.path, size, self.hosts, scheme="https", flags=flags, tls=tls)

    def _channels(self) -> ChannelFactory:
        if self._papers is None:
            return ChannelFactory()
        return ChannelFactory(of_role(self._papers.of("ann", Role.OPERATOR), Role.OPERATOR))

    def end(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a replica or the daemon of a node a signal and wait until it has ended. Returns its exit code."""
        process = self.replicas.pop(name) if name in self.replicas else self.nodes.pop(name)
        process.send_signal(number)
        return process.wait(VERB_S)

    # -------------------------------------------------------------------------------------------------- operator

    def address(self, replica: str) -> str:
        return f"{self.hosts.address(replica)}:{REPLICA_PORT}"

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A verb of an operator, for example `run("stop", "train-1")`."""
        where = ("--rendezvous", ",".join(self.client.replicas), *self._insecure, *self._shown("ann", Role.OPERATOR))
        command = [sys.executable, "-m", "elastic.cli", *words, *where]
        return subprocess.run(
            command, cwd=self.home, env=self._environment, capture_output=True, text=True, timeout=VERB_S
        )

    def await_nodes(self, *names: str, within_s: float = START_S) -> None:
        """Until the daemons of these nodes attend the fleet."""
        deadline_s = time.monotonic() + within_s
        while missing := set(names) - {node["node"] for node in self.client.overview()["nodes"] if node["up"]}:
            if time.monotonic() > deadline_s:
                raise ElasticError(f"nodes that are not there after {within_s:g} s: {', '.join(sorted(missing))}")
            time.sleep(CLUSTER_POLL_S)

    # ---------------------------------------------------------------------------------------------- what is left

    def ledgers(self, job: str) -> list[Path]:
        """The `steps.jsonl` of every node that took part; `elastic.records.ledger.merged` puts them together."""
        return sorted(self.home.glob(f"*/{job}/steps.jsonl"))

    def journals(self) -> list[Path]:
        """Those of all processes."""
        places = ("*/journal", "*/*/journal", "*/jobs/*/journal")
        return [path for place in places for path in self.home.glob(f"{place}/*.jsonl")]

    def journal(self) -> list[dict[str, Any]]:
        """Lines of all journals there are, by time."""
        return self._told.all()

    def submit(
        self,
        *options: str,
        timing: Mapping[str, float] = MappingProxyType({}),
        env: Mapping[str, str] = MappingProxyType({}),
        **fields: object,
    ) -> str:
        """A job with these fields of a job file; options: of `elastic submit`. Returns the job's name. Raises
        ElasticError with what the command says."""
        lines = [f"{field} = {json.dumps(value)}" for field, value in fields.items()]
        for table, values in (("timing", timing), ("env", env)):
            lines += [f"[{table}]", *(f"{name} = {json.dumps(value)}" for name, value in values.items())]
        path = self.home / f"{fields['name']}.toml"
        path.write_text("\n".join(lines))
        done = self.run("submit", str(path), *options)
        if done.returncode:
            raise ElasticError(done.stderr)
        return done.stdout.strip()


class Papers:
    """directory: gets the authority, in `ca`, and theirs."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        certificate_authority.create(directory / "ca")

    def of(self, name: str, role: Role, days: int = 1) -> Path:
        """The directory to give as --certs, with a certificate for that role in it."""
        out = self._directory / name
        if not (out / f"{role}.pem").exists():
            certificate_authority.Authority(self._directory / "ca").issue(name, [role], out, days=days)
        return out

    def of_etcd(self, addresses: Sequence[str]) -> tuple[Sequence[str], Tls]:
        """Flags for members at these addresses, and what to show to them."""
        out = self._directory / "etcd"
        certificate_authority.Authority(self._directory / "ca").issue(
            "etcd", [certificate_authority.ETCD_ROLE], out, addresses, days=1
        )
        own, roots = out / certificate_authority.ETCD, out / certificate_authority.ETCD_CA
        flags = ("--client-cert-auth", f"--trusted-ca-file={roots}", f"--cert-file={own}", f"--key-file={own}")
        shown = str(self.of("ann", Role.RENDEZVOUS) / certificate_authority.ETCD_CLIENT)
        return flags, Tls(str(roots), shown, shown, ETCD_SERVER_NAME)
