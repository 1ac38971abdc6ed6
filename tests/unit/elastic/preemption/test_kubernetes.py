"""Notices of Kubernetes, from an API server that speaks the protocol of watches over TLS: what a taint, a condition and
a deletion mean, and what becomes of a server that is away, has forgotten, or answers nonsense."""

from __future__ import annotations

import ipaddress
import json
import math
import queue
import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from elastic.errors import ConfigError
from elastic.preemption import selection
from elastic.preemption.kubernetes import kubernetes
from elastic.preemption.kubernetes_notices import of_node, of_pod
from elastic.preemption.notice import Notice, NoticeKind
from elastic.preemption.provider import NoticeSource, Unanswered

NOW = datetime(2026, 1, 31, 8, 20, 0, tzinfo=UTC)
ADVICE = "node.kubernetes.io/unschedulable"


def node(*taints: str, version: int = 7) -> dict[str, Any]:
    spec = {"taints": [{"key": key, "effect": "NoSchedule"} for key in taints]} if taints else {}
    return {"metadata": {"name": "n1", "resourceVersion": str(version)}, "spec": spec}


def left(notice: Notice | None) -> float | None:
    return notice.seconds_left if notice is not None else None


@pytest.mark.parametrize(
    ("taint", "kind", "seconds"),
    [
        ("ToBeDeletedByClusterAutoscaler", NoticeKind.RECLAIM, 60.0),
        ("cloud.google.com/impending-node-termination", NoticeKind.RECLAIM, 25.0),
        ("aws-node-termination-handler/spot-itn", NoticeKind.RECLAIM, 120.0),
        ("aws-node-termination-handler/scheduled-maintenance", NoticeKind.MAINTENANCE, 120.0),
        ("aws-node-termination-handler/rebalance-recommendation", NoticeKind.ADVICE, math.inf),
        ("node.kubernetes.io/out-of-service", NoticeKind.MAINTENANCE, 30.0),
        (ADVICE, NoticeKind.ADVICE, math.inf),
    ],
)
def test_what_a_taint_means(taint: str, kind: NoticeKind, seconds: float) -> None:
    notice = of_node(node("example.com/other", taint))
    assert notice == Notice(kind, seconds, f"Kubernetes: its node has the taint {taint}")


def test_a_taint_that_nobody_knows_is_none_and_of_several_the_nearest_end_counts() -> None:
    assert of_node(node()) is None and of_node(node("nvidia.com/gpu", "node.kubernetes.io/not-ready")) is None
    assert (
        left(of_node(node(ADVICE, "aws-node-termination-handler/spot-itn", "node.kubernetes.io/out-of-service"))) == 30
    )
    for wrong in ("no list", [{"effect": "NoSchedule"}], [7]):
        with pytest.raises(ValueError, match="taint"):
            of_node({"spec": {"taints": wrong}})


def test_a_pod_that_is_deleted_has_until_its_grace_is_over_by_the_servers_clock() -> None:
    about = {"deletionTimestamp": "2026-01-31T08:20:25Z", "deletionGracePeriodSeconds": 30}
    assert left(of_pod({"metadata": about}, NOW)) == 25.0
    assert left(of_pod({"metadata": about}, NOW - timedelta(hours=1))) == 30.0, "a wrong clock cannot make it longer"
    with pytest.raises(ValueError):
        of_pod({"metadata": {**about, "deletionTimestamp": "soon"}}, NOW)


def test_a_pod_that_is_to_be_disrupted_hears_of_it_before_it_is_deleted() -> None:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    pod = {"spec": {"terminationGracePeriodSeconds": 60}, "status": {"conditions": [{"type": "Ready"}, condition]}}
    notice = of_pod(pod, NOW)
    assert notice and notice.seconds_left == 60 and "PreemptionByScheduler" in notice.because
    assert of_pod({"status": {"conditions": [{**condition, "status": "False"}]}}, NOW) is None
    assert of_pod({}, NOW) is None


# ---------------------------------------------------------------------------------------------------- over the wire


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        self.server.asked.append((path, {key: value[0] for key, value in query.items()}))
        if self.headers["Authorization"] != f"Bearer {self.server.token}":
            self._answer(401, {"code": 401})
        elif self.server.refusal:
            self._answer(self.server.refusal, {"kind": "Status", "code": self.server.refusal})
        elif "watch" not in query:
            self._answer(200, self.server.object)
        elif int(query["resourceVersion"][0]) < self.server.oldest:
            self._answer(410, {"kind": "Status", "code": 410})
        else:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            while (event := self.server.events.get()) is not None:
                text = (event if isinstance(event, str) else json.dumps(event)).encode() + b"\n"
                self.wfile.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")
            self.close_connection = True

    def _answer(self, code: int, document: object) -> None:
        text = document.encode() if isinstance(document, str) else json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None: ...


class Server(ThreadingHTTPServer):
    """events: what a watch tells; None ends it."""

    daemon_threads = True

    def __init__(self, mounted: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.mounted = mounted
        self.token = "first"
        self.object: object = node()
        self.refusal = 0
        self.oldest = 0
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.events: queue.Queue[Any] = queue.Queue()
        self.made: list[NoticeSource] = []
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kubernetes")])
        now = datetime.now(UTC)
        host = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        for file, subject, about in (
            ("ca.crt", name, x509.BasicConstraints(ca=True, path_length=None)),
            ("own.crt", x509.Name([]), host),
        ):
            serial = x509.random_serial_number()
            made = x509.CertificateBuilder(
                name, subject, key.public_key(), serial, now - timedelta(1), now + timedelta(1)
            )
            cert = made.add_extension(about, critical=True).sign(key, hashes.SHA256())
            (mounted / file).write_bytes(cert.public_bytes(serialization.Encoding.PEM))
        plain = serialization.NoEncryption()
        pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        (mounted / "key").write_bytes(pem)
        (mounted / "namespace").write_text("train\n")
        (mounted / "token").write_text("first\n")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(mounted / "own.crt", mounted / "key")
        self.socket = context.wrap_socket(self.socket, server_side=True)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        address = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(self.server_address[1])}
        return {**address, "NODE_NAME": "n1", "POD_NAME": "train-1"}

    def sources(self) -> list[NoticeSource]:
        self.made += kubernetes(self.environment, self.mounted)
        return self.made[-2:]

    def tell(self, kind: str, document: object) -> None:
        self.events.put({"type": kind, "object": document})

    def handle_error(self, request: Any, client_address: Any) -> None: ...


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path) as server:
        yield server
        for source in server.made:
            source.close()
        server.events.put(None)
        server.shutdown()


def begun(server: Server) -> NoticeSource:
    """The node's source, which has read the node and opened its watch."""
    source, _ = server.sources()
    assert [source.look(), source.look()] == [None, None]
    return source


def test_a_cluster_whose_certificates_name_no_keys_is_believed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """From Python 3.13 on create_default_context() asks for such names."""
    usual = ssl.create_default_context

    def strict(**given: Any) -> ssl.SSLContext:
        context = usual(**given)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", strict)
    begun(server)


def test_a_node_is_read_once_and_watched_from_there(server: Server) -> None:
    source = begun(server)
    server.tell("MODIFIED", node("ToBeDeletedByClusterAutoscaler", version=8))
    assert left(source.look()) == 60.0
    server.tell("MODIFIED", node(version=9))
    assert source.look() is None
    assert [path for path, _ in server.asked] == ["/api/v1/nodes/n1", "/api/v1/nodes"]
    query = server.asked[1][1]
    assert query["fieldSelector"] == "metadata.name=n1" and query["resourceVersion"] == "7"


def test_the_pod_is_watched_in_its_namespace(server: Server) -> None:
    server.object = {"metadata": {"resourceVersion": "3"}}
    _, source = server.sources()
    assert source.look() is None
    assert server.asked == [("/api/v1/namespaces/train/pods/train-1", {})]


def test_a_watch_that_ends_goes_on_from_the_last_bookmark(server: Server) -> None:
    source = begun(server)
    server.tell("BOOKMARK", {"metadata": {"resourceVersion": "40"}})
    server.events.put(None)
    assert [source.look() for _ in range(3)] == [None] * 3
    assert server.asked[-1][1]["resourceVersion"] == "40"
    server.tell("MODIFIED", node("ToBeDeletedByClusterAutoscaler", version=41))
    assert left(source.look()) == 60.0


@pytest.mark.parametrize("how", ["an event of the watch", "the answer to it"])
def test_a_server_that_has_forgotten_is_asked_anew(server: Server, how: str) -> None:
    source = begun(server)
    server.oldest = 100
    if how == "an event of the watch":
        server.tell("ERROR", {"kind": "Status", "code": 410, "reason": "Expired"})
    else:
        server.events.put(None)
        assert source.look() is None
    server.object = node("ToBeDeletedByClusterAutoscaler", version=120)
    seen = [source.look() for _ in range(2)]
    assert left(seen[-1]) == 60.0 and server.asked[-1][0] == "/api/v1/nodes/n1"


def test_a_node_that_is_deleted_is_asked_for_again(server: Server) -> None:
    source = begun(server)
    server.tell("DELETED", node(version=8))
    assert source.look() is None
    server.refusal = 404
    with pytest.raises(Unanswered, match="404"):
        source.look()


def test_a_server_that_refuses_is_named_and_may_be_asked_again(server: Server) -> None:
    source, _ = server.sources()
    server.refusal = 403
    with pytest.raises(Unanswered, match=r"/api/v1/nodes/n1 answered 403"):
        source.look()
    server.refusal = 0
    assert source.look() is None


def test_a_token_that_is_replaced_is_read_again(server: Server) -> None:
    source, _ = server.sources()
    server.token = "second"
    with pytest.raises(Unanswered, match="401"):
        source.look()
    (server.mounted / "token").write_text("second")
    assert source.look() is None


@pytest.mark.parametrize(
    "event",
    ["{", "[]", '{"type": "MODIFIED", "object": {}}', '{"type": "NEW", "object": {}}', "null", '{"type": "ERROR"}'],
)
def test_nonsense_on_a_watch_is_a_trouble_and_no_notice(server: Server, event: str) -> None:
    source = begun(server)
    server.events.put(event)
    with pytest.raises(Unanswered):
        source.look()
    assert source.look() is None, "and it is asked again"


@pytest.mark.parametrize("document", ["<html>", [], {}, {"metadata": {}}, {"metadata": {"resourceVersion": 7}}])
def test_nonsense_in_the_place_of_a_node_is_a_trouble(server: Server, document: object) -> None:
    server.object = document
    source, _ = server.sources()
    with pytest.raises(Unanswered):
        source.look()


def test_a_server_of_another_authority_is_not_believed(
    server: Server, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with Server(tmp_path_factory.mktemp("other")) as other:
        (server.mounted / "ca.crt").write_bytes((other.mounted / "ca.crt").read_bytes())
        source, _ = server.sources()
        with pytest.raises(Unanswered, match="CERTIFICATE_VERIFY_FAILED"):
            source.look()
        assert server.asked == [], "the token was not sent"
        other.shutdown()


def test_a_server_that_is_gone_is_a_trouble(server: Server) -> None:
    source = begun(server)
    server.shutdown()
    server.server_close()
    server.events.put(None)
    source.look()
    with pytest.raises(Unanswered):
        source.look()


def test_outside_of_a_pod_it_is_said_what_is_missing(server: Server, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs \$NODE_NAME"):
        kubernetes({**server.environment, "NODE_NAME": ""}, server.mounted)
    with pytest.raises(ConfigError, match="namespace"):
        kubernetes(server.environment, tmp_path / "nothing")
    assert selection.check("k8s") == "k8s"
    with pytest.raises(ConfigError, match="KUBERNETES_SERVICE_HOST"):
        selection.sources("k8s", {})
