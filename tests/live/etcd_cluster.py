"""Real etcd members that a test may kill, freeze and start again."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from elastic.errors import StoreUnavailable
from elastic.etcd import EtcdStore


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


class EtcdCluster:
    """A cluster of members on loopback addresses of its own, so that fixed ports collide with nobody's."""

    def __init__(
        self, binary: str, directory: Path, size: int, *, scheme: str = "http", flags: Sequence[str] = ()
    ) -> None:
        self._binary = binary
        self._scheme = scheme
        self._flags = flags
        self._directory = directory
        network = f"127.{random.SystemRandom().randrange(1, 255)}.{random.SystemRandom().randrange(1, 255)}"
        self._hosts = [f"{network}.{number + 1}" for number in range(size)]
        self.endpoints = [f"{host}:2379" for host in self._hosts]
        self._members: dict[int, subprocess.Popen[bytes]] = {}
        for number in range(size):
            self.start(number)

    def start(self, number: int) -> None:
        """Start a member, again on the data it had."""
        host = self._hosts[number]
        peers = ",".join(f"m{other}=http://{address}:2380" for other, address in enumerate(self._hosts))
        command = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            self._binary,
            f"--name=m{number}",
            f"--data-dir={self._directory}/m{number}",
            f"--listen-client-urls={self._scheme}://{host}:2379",
            f"--advertise-client-urls={self._scheme}://{host}:2379",
            f"--listen-peer-urls=http://{host}:2380",
            f"--initial-advertise-peer-urls=http://{host}:2380",
            f"--initial-cluster={peers}",
            "--grpc-keepalive-min-time=500ms",
            "--log-level=error",
            *self._flags,
        ]
        with (self._directory / f"m{number}.log").open("ab") as log:
            self._members[number] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
            )

    def kill(self, number: int) -> None:
        self._members[number].kill()
        self._members[number].wait()

    def freeze(self, number: int) -> None:
        self._members[number].send_signal(signal.SIGSTOP)

    def thaw(self, number: int) -> None:
        self._members[number].send_signal(signal.SIGCONT)

    def connect(self, *numbers: int) -> EtcdStore:
        """A store that knows those members, by default all."""
        return EtcdStore([self.endpoints[number] for number in numbers or range(len(self._hosts))], keepalive_s=1.0)

    def wait_healthy(self, within_s: float = 60.0) -> None:
        deadline_s = time.monotonic() + within_s
        with self.connect() as store:
            while True:
                try:
                    store.get("health", timeout_s=5)
                    return
                except StoreUnavailable:
                    if time.monotonic() > deadline_s:
                        raise

    def close(self) -> None:
        for number in self._members:
            self.kill(number)
