"""Real members of an etcd cluster, which may be killed and started again on the data they had."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chaos_tests.cluster.hosts import PREFIX, Hosts, Loopback
from elastic.errors import ElasticError, StoreError, StoreUnavailable
from elastic.process import children
from elastic.store.etcd import EtcdStore, Tls

CALL_S = 5.0
ETCD_POLL_S = 0.05


def sturdy_binary() -> str | None:
    """An etcd that stays consistent when it is killed: what `make etcd` unpacked, else one on PATH that is not
    3.5.0 to 3.5.2; None if there is none."""
    for candidate in (str(Path(sys.prefix) / "etcd-server" / "usr" / "bin" / "etcd"), shutil.which("etcd")):
        if candidate is None or not os.access(candidate, os.X_OK):
            continue
        version = subprocess.run([candidate, "--version"], capture_output=True, text=True, timeout=30, check=True)
        if not version.stdout.splitlines()[0].endswith((" 3.5.0", " 3.5.1", " 3.5.2")):
            return candidate
    return None


def ask(connection: http.client.HTTPConnection, what: str, **fields: object) -> dict[str, Any]:
    """A question to an etcd in JSON, over a connection that is closed then. Raises StoreUnavailable if there is no
    answer, and StoreError with the reason if it refuses."""
    try:
        try:
            connection.request("POST", f"/v3/{what}", json.dumps(fields))
            reply = connection.getresponse()
            document: dict[str, Any] = json.loads(reply.read())
        finally:
            connection.close()
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise StoreUnavailable(f"etcd does not answer {what}: {error}") from error
    if reply.status != http.HTTPStatus.OK:
        raise StoreError(f"etcd refuses {what}: {document.get('error', reply.status)}")
    return document


class EtcdMembers:
    """Members by number, each on a host of its own: etcd0, etcd1 ... Started by the main thread, with which they end.

    directory: for their data, 123 MB each, and logs. hosts: by default loopback addresses. tls: for their clients.
    """

    def __init__(
        self,
        binary: str,
        directory: Path,
        size: int,
        hosts: Hosts | None = None,
        *,
        scheme: str = "http",
        flags: Sequence[str] = (),
        tls: Tls | None = None,
    ) -> None:
        self._tls = tls
        self._binary = binary
        self._directory = directory
        self._hosts = hosts if hosts is not None else Loopback()
        self.names = tuple(f"etcd{number}" for number in range(size))
        self._scheme = scheme
        self._flags = flags
        self.endpoints = [f"{self._hosts.add(name)}:2379" for name in self.names]
        self._members: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for number in range(len(self.names)):
                self.start(number)
        except BaseException:
            self.close()
            raise

    def start(self, number: int) -> None:
        """Start a member, again on the data it had."""
        name = self.names[number]
        address = self._hosts.address(name)
        peers = ",".join(f"{other}=http://{self._hosts.address(other)}:2380" for other in self.names)
        command = [
            *PREFIX,
            *self._hosts.within(name),
            self._binary,
            f"--name={name}",
            f"--data-dir={self.data(number)}",
            f"--listen-client-urls={self._scheme}://{address}:2379",
            f"--advertise-client-urls={self._scheme}://{address}:2379",
            f"--listen-peer-urls=http://{address}:2380",
            f"--initial-advertise-peer-urls=http://{address}:2380",
            f"--initial-cluster={peers}",
            "--grpc-keepalive-min-time=500ms",
            "--log-level=error",
            *self._flags,
        ]
        self._members[number] = children.start(command, self._directory / f"{name}.log", obeys=False)

    def kill(self, *numbers: int) -> None:
        for number in numbers:
            self._members[number].kill()
        for number in numbers:
            self._members[number].wait()

    def data(self, number: int) -> Path:
        """The data directory of that member."""
        return self._directory / self.names[number]

    def pid(self, number: int) -> int:
        return self._members[number].pid

    def close(self) -> None:
        self.kill(*self._members)

    # --------------------------------------------------------------------------------------------------- asking

    def connect(self, *numbers: int) -> EtcdStore:
        """A store that knows those members, by default all."""
        endpoints = [self.endpoints[number] for number in numbers or range(len(self.names))]
        return EtcdStore(endpoints, tls=self._tls, keepalive_s=1.0)

    def may_write(self) -> bool:
        """For a recorder: whether more may come. A member that was killed may be started again."""
        return True

    def wait_healthy(self, within_s: float = 60.0) -> None:
        """Until it answers a read, which needs a majority."""
        deadline_s = time.monotonic() + within_s
        with self.connect() as store:
            while True:
                try:
                    store.get("health", timeout_s=CALL_S)
                    return
                except StoreUnavailable:
                    if time.monotonic() > deadline_s:
                        raise

    def leader(self, within_s: float = 30.0) -> int:
        """The number of the member that leads the others. Raises StoreUnavailable if none does within that time."""
        deadline_s = time.monotonic() + within_s
        while True:
            for number in range(len(self.names)):
                try:
                    status = self._ask(number, "maintenance/status")
                except StoreError:
                    continue  # not this one, then
                if status.get("leader") == status["header"]["member_id"]:
                    return number
            if time.monotonic() > deadline_s:
                raise StoreUnavailable(f"no member of {', '.join(self.endpoints)} leads")
            time.sleep(ETCD_POLL_S)  # an election among other processes: there is nothing to wait on

    def compact(self) -> int:
        """Throw away everything but the present values, and give the room back. Returns the revision."""
        number = self.leader()
        revision = int(self._ask(number, "maintenance/status")["header"]["revision"])
        self._ask(number, "kv/compaction", revision=str(revision), physical=True)
        for other in range(len(self.names)):
            self._ask(other, "maintenance/defragment")
        return revision

    def _ask(self, number: int, what: str, **fields: object) -> dict[str, Any]:
        """A question in JSON to one member; plain text only."""
        if self._scheme != "http":
            raise ElasticError("members that speak TLS are asked through a store")
        return ask(http.client.HTTPConnection(self.endpoints[number], timeout=CALL_S), what, **fields)
