"""Kubernetes on this machine: a real API server, scheduler and controller manager, made by tests/k8s/build.sh, and a
kubelet of processes for each node. Each pod has a network namespace, on a bridge of this machine; what lasts is in a
directory. It takes root."""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from chaos_tests.cluster import sturdy_binary
from chaos_tests.support.processes import MARK, await_exits, kill_if_there, living, new_mark
from tests.k8s.api_client import Api, Object, Refused
from tests.live.jobs import ROOT

BIN = Path(sys.prefix) / "kubernetes" / "bin"
DEADLINE_S = 400.0
POLL_S = 0.1
LOST_S = 6
"""Seconds without a Lease after which a node is taken for lost, and as many until its pods are."""

NETWORK = "10.88"
HERE = f"{NETWORK}.0.1"
"""The address of this machine for pods, and of the API server for all."""
BRIDGE = "k8s-test"
PREFIX = "k8s-test-"
"""Of the names of network namespaces."""

T = TypeVar("T")


class Kubernetes:
    """A context manager: all of it, and what runs in its pods, is gone afterwards."""

    def __init__(self, home: Path, nodes: int) -> None:
        self.home = home
        self._mark = new_mark()
        self._environment = {
            **os.environ,
            MARK: self._mark,
            "PATH": os.pathsep.join(
                [str(home / "bin"), str(Path(sys.executable).parent), str(BIN), os.environ["PATH"]]
            ),
            "PYTHONPATH": str(ROOT),
            "KUBECONFIG": str(home / "kubeconfig"),
        }
        self._etcd_port, self._port = _free_ports(2)
        self._token = secrets.token_hex(16)
        self.api = Api(HERE, self._port, self._token, home / "ca.crt")
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.callback(self._end)
            self._start()
            undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            error.add_note(self.story())
        self._end()

    def _start(self) -> None:
        self._write_keys()
        (self.home / "hosts").write_text("127.0.0.1 localhost\n")
        etcd = f"http://127.0.0.1:{self._etcd_port}"
        binary = sturdy_binary()
        assert binary is not None, "`make etcd` fetches one"
        (self.home / "bin").mkdir()
        (self.home / "bin" / "etcd").symlink_to(binary)
        _ip("link", "add", BRIDGE, "type", "bridge")
        _ip("address", "add", f"{HERE}/16", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
        self._daemon(
            *(
                "etcd",
                "--data-dir",
                str(self.home / "etcd"),
                "--listen-client-urls",
                etcd,
                "--advertise-client-urls",
                etcd,
            ),
            *("--listen-peer-urls", "unix://peer:1", "--initial-advertise-peer-urls", "unix://peer:1"),
            *("--initial-cluster", "default=unix://peer:1"),
            program=binary,
        )
        self.start_api_server()
        common = ("--kubeconfig", str(self.home / "kubeconfig"), "--leader-elect=false", "--port=0", "--secure-port=0")
        self._daemon(
            *("kube-controller-manager", *common, f"--root-ca-file={self.home / 'ca.crt'}"),
            f"--service-account-private-key-file={self.home / 'server.key'}",
            *("--node-monitor-period=1s", f"--node-monitor-grace-period={LOST_S}s"),
        )
        self._daemon("kube-scheduler", *common)
        self.until("accounts", lambda: self.api.get("/api/v1/namespaces/default/serviceaccounts/default")["secrets"])
        for node in self.nodes:
            self.switch_on(node)
        self.until("all nodes are ready", lambda: sorted(self.ready_nodes()) == self.nodes)

    def start_api_server(self) -> None:
        self._daemon(
            "kube-apiserver",
            *(
                f"--bind-address={HERE}",
                f"--secure-port={self._port}",
                f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            ),
            *(f"--tls-cert-file={self.home / 'server.crt'}", f"--tls-private-key-file={self.home / 'server.key'}"),
            *(
                f"--token-auth-file={self.home / 'tokens'}",
                "--authorization-mode=RBAC",
                "--endpoint-reconciler-type=none",
            ),
            *("--service-cluster-ip-range=10.96.0.0/24", f"--service-account-key-file={self.home / 'server.key'}"),
            *(
                "--service-account-issuer=https://test",
                f"--service-account-signing-key-file={self.home / 'server.key'}",
            ),
            *(f"--default-not-ready-toleration-seconds={LOST_S}", f"--default-unreachable-toleration-seconds={LOST_S}"),
        )
        self.until("the API server answers", lambda: self.api.get("/api/v1/namespaces/kube-node-lease"))

    def switch_on(self, node: str) -> None:
        home = self.home / node
        home.mkdir(exist_ok=True)
        settings = {
            "node": node,
            "home": str(home),
            "hosts": str(self.home / "hosts"),
            "port": self._port,
            "token": self._token,
            "ca": str(self.home / "ca.crt"),
            "server": HERE,
            "bridge": BRIDGE,
            "prefix": f"{PREFIX}{node}-",
            "network": f"{NETWORK}.{1 + self.nodes.index(node)}",
            "environment": {name: self._environment[name] for name in ("PATH", "PYTHONPATH", MARK)},
        }
        (home / "settings.json").write_text(json.dumps(settings))
        self._daemon(node, "-m", "tests.k8s.kubelet", str(home / "settings.json"), program=sys.executable)

    def kill(self, name: str) -> None:
        """A daemon; with the kubelet of a node go all of its containers, as with its power."""
        daemon = self._daemons.pop(name)
        daemon.kill()
        daemon.wait()

    def _daemon(self, name: str, *words: str, program: str = "") -> None:
        with (self.home / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                [program or str(BIN / name), *words],
                cwd=self.home,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _write_keys(self) -> None:
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kubernetes")])
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(days=1))
        hosts = [x509.IPAddress(ipaddress.ip_address(HERE))]
        builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        cert = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        for file in ("server.crt", "ca.crt"):
            (self.home / file).write_bytes(cert)
        (self.home / "server.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
            )
        )
        (self.home / "tokens").write_text(f'{self._token},admin,admin,"system:masters"\n')
        server = {"server": f"https://{HERE}:{self._port}", "certificate-authority": str(self.home / "ca.crt")}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": server}],
            "users": [{"name": "admin", "user": {"token": self._token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
        }
        (self.home / "kubeconfig").write_text(json.dumps(config))

    # ---------------------------------------------------------------------------------------------- what is, and waits

    def until(self, what: str, reached: Callable[[], T | None], within_s: float = DEADLINE_S) -> T:
        """The first true value. While the API server does not answer, or refuses, there is none."""
        deadline_s = time.monotonic() + within_s
        while True:
            trouble = ""
            try:
                if value := reached():
                    return value
            except (OSError, Refused, KeyError) as error:
                trouble = f": {type(error).__name__} {error}"
            assert time.monotonic() < deadline_s, f"not within {within_s} s: {what}{trouble}"
            time.sleep(POLL_S)  # other processes: there is nothing to wait on

    def ready_nodes(self) -> list[str]:
        """Those that take pods."""
        nodes = self.api.items("/api/v1/nodes")
        return [node["metadata"]["name"] for node in nodes if not node["spec"].get("taints")]

    def pods(self, part: str) -> dict[str, Object]:
        """By name; without those that are over or are about to be."""
        found = self.api.items(f"/api/v1/namespaces/default/pods?labelSelector=app.kubernetes.io/component={part}")
        live = [one for one in found if one["status"]["phase"] in ("Pending", "Running")]
        return {one["metadata"]["name"]: one for one in live if "deletionTimestamp" not in one["metadata"]}

    def evict(self, pod: str) -> None:
        """Raises Refused."""
        about = {"metadata": {"name": pod, "namespace": "default"}}
        body = {"apiVersion": "policy/v1beta1", "kind": "Eviction", **about}
        self.api.post(f"/api/v1/namespaces/default/pods/{pod}/eviction", body)

    def kubectl(self, *words: str, given: str = "") -> str:
        """Raises AssertionError."""
        done = subprocess.run(
            ["kubectl", *words],
            input=given,
            env=self._environment,
            capture_output=True,
            text=True,
            cwd=self.home,
            timeout=120,
        )
        assert done.returncode == 0, f"kubectl {' '.join(words)}: {done.stderr}"
        return done.stdout

    def elastic(self, *words: str, **environment: str) -> str:
        done = subprocess.run(
            ["elastic", *words],
            env={**self._environment, **environment},
            capture_output=True,
            text=True,
            cwd=self.home,
            timeout=120,
        )
        assert done.returncode == 0, f"elastic {' '.join(words)}: {done.stderr}"
        return done.stdout

    def story(self) -> str:
        logs = [
            *self.home.glob("*.log"),
            *self.home.glob("n*/*/*/*.log"),
            *self.home.glob("n*/*/*/volumes/work/*/logs/*.log"),
        ]
        tails = [f"--- {log}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-12:]) for log in logs]
        try:
            tails.append(self.kubectl("get", "nodes,pods,jobs,pvc", "-o", "wide"))
        except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
            tails.append(str(error))
        return "\n".join(tails)

    def _end(self) -> None:
        try:
            self._end_processes()
        finally:
            for line in _ip("netns", "list").splitlines():
                if line.startswith(PREFIX):
                    _ip("netns", "delete", line.split()[0])
            subprocess.run(["ip", "link", "delete", BRIDGE], capture_output=True)

    def _end_processes(self) -> None:
        for daemon in reversed(self._daemons.values()):
            daemon.kill()
            daemon.wait()
        for _ in range(3):  # what is killed may have been about to start another
            for pid in living(self._mark):
                kill_if_there(pid)
            if not await_exits(living(self._mark), within_s=10.0):
                return
        raise AssertionError(f"left: {living(self._mark)}")


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout


def _free_ports(count: int) -> list[int]:
    """A port may be taken by another process before it is used; then that daemon ends, and says so."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def of_this_version(document: dict[str, Any]) -> dict[str, Any]:
    """As Kubernetes 1.20 knows it: it has budgets in an older group, and ignores what it does not know of a Job."""
    if document["kind"] == "PodDisruptionBudget":
        return {**document, "apiVersion": "policy/v1beta1"}
    return document
