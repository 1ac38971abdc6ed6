"""A fleet for one job: a child of this process, and certificates that nobody else has."""

from __future__ import annotations

import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from elastic.errors import ElasticError
from elastic.fleet.client import FleetClient
from elastic.platforms.common.node_task import Ticket
from elastic.process import children, file_modes
from elastic.records import temp_dirs
from elastic.records.job_directory import read_json
from elastic.security import certificate_authority
from elastic.security.channels import ChannelFactory
from elastic.security.keyring import of_role
from elastic.security.roles import Role

PREFIX = "elastic-fleet-"
START_S = 60.0
STOP_S = 5.0
POLL_S = 0.05
SERVICES, OPERATOR = "services", "operator"
"""Directories of certificates."""


@dataclass(frozen=True, slots=True)
class KeptFleet:
    """What outlasts a fleet. directory: gets `etcd`, its data, `rendezvous`, and `certs`, which are made anew each
    time. etcd: path of the server. operator: the name in the operator's certificate."""

    directory: Path
    etcd: str
    operator: str


class PrivateFleet:
    """A context manager. From any thread. listen: "host:port" of this machine that the nodes reach; port 0: any. keeps:
    what outlasts it; None: nothing.

    Raises ElasticError if it cannot be started.
    """

    def __init__(self, listen: str, keeps: KeptFleet | None = None) -> None:
        self._own = temp_dirs.in_tmp(PREFIX)
        self.directory = self.certs = self._own.path
        """Only this user can read it. It is removed with the fleet."""
        self._etcd = ("", "")
        if keeps is not None:
            self.directory, self.certs = (keeps.directory / name for name in ("rendezvous", "certs"))
            self._etcd = (keeps.etcd, str(keeps.directory / "etcd"))
        self._listen = listen
        try:
            self._certify(OPERATOR if keeps is None else keeps.operator)
            self.begin()
        except BaseException:
            self._own.remove()
            raise

    def _certify(self, operator: str) -> None:
        """The authority's key is in the memory of this process alone."""
        authority = self._own.path / "ca"
        certificate_authority.create(authority)
        self._authority = certificate_authority.Authority(authority)
        shutil.rmtree(authority)
        self._authority.issue("fleet", [Role.RENDEZVOUS], self.certs / SERVICES)
        self._authority.issue(operator, [Role.OPERATOR], self.certs / OPERATOR)

    def begin(self) -> None:
        """Start it; also again, after its process has ended. Raises ElasticError if it does not listen in time."""
        file_modes.make_directory(self.directory / "journal")
        (self.directory / "rendezvous.json").unlink(missing_ok=True)
        words = (str(self.directory), str(self.certs / SERVICES), self._listen, *self._etcd)
        command = children.python("elastic.platforms.common.fleet_host", *words)
        self._process = children.start(command, self.directory / "log", stdin=subprocess.PIPE)
        try:
            deadline_s = time.monotonic() + START_S
            while (told := read_json(self.directory / "rendezvous.json")) is None:
                self.check()
                if time.monotonic() > deadline_s:
                    raise ElasticError(f"the rendezvous did not listen within {START_S:g} s: {self._log_tail()}")
                time.sleep(POLL_S)  # a file of another process: there is nothing to wait on
            self.address = str(told["address"])
            keyring = of_role(self.certs / OPERATOR, Role.OPERATOR)
            self.client = FleetClient([self.address], channels=ChannelFactory(keyring))
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it. Any number of times."""
        self._end()
        self._own.remove()

    def check(self) -> None:
        """Raises ElasticError if its process has ended."""
        if (status := self._process.poll()) is not None:
            raise ElasticError(f"the rendezvous of this job has ended with {status}: {self._log_tail()}")

    @property
    def environment(self) -> dict[str, str]:
        """For `elastic status`, `elastic top` and the others, on this machine."""
        return {"ELASTIC_RENDEZVOUS": self.address, "ELASTIC_CERTS": str(self.certs / OPERATOR)}

    def issue(self, node: str) -> Path:
        """Certificates for this node, with which it may also look at the job."""
        self._authority.issue(node, [Role.AGENT, Role.VIEWER], self.certs / node)
        return self.certs / node

    def ticket(self, job: str, node: str, slots: int, grace_s: float, function: bytes | None) -> Ticket:
        """For a task that is to be this node. Each node has a name of its own, also one that takes another's place."""
        certificates = {path.name: path.read_bytes() for path in self.issue(node).iterdir()}
        return Ticket(self.address, job, node, slots, grace_s, certificates, function)

    def forget(self, node: str) -> None:
        """Its task has ended: its place in the job is another one's."""
        self.client.cordon(node, "its task has ended", over=False)

    def entry(self, job: str) -> dict[str, Any] | None:
        """That of `elastic jobs`; None while nobody leads. Raises ElasticError if the fleet has ended."""
        self.check()
        try:
            return self.client.job(job)
        except ElasticError:
            return None

    def _log_tail(self) -> str:
        lines = (self.directory / "log").read_text(errors="replace").splitlines()
        return " | ".join(lines[-3:]) or "it logged nothing"

    def _end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        children.wait_or_kill(self._process, STOP_S)
