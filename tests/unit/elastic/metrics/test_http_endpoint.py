"""The endpoint: what scrapers get, and what strangers, slow callers and wrong addresses get."""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from elastic.errors import ConfigError
from elastic.metrics import http_endpoint
from elastic.metrics.http_endpoint import HttpEndpoint
from elastic.metrics.metric_registry import MetricRegistry
from elastic.metrics.option import address_of
from elastic.platforms.k8s import probe
from elastic.security.certificate_authority import Authority, create
from elastic.security.keyring import FLEET_CA, Keyring, of_role
from elastic.security.roles import NODE_NAME, SERVER_NAME, Role

WAIT_S = 60.0


@contextmanager
def opened(address: str = "127.0.0.1:0", keyring: Keyring | None = None, problem: str = "") -> Iterator[HttpEndpoint]:
    served = HttpEndpoint(address, keyring)
    try:
        served.open(MetricRegistry(), lambda: "", lambda: problem)
        yield served
    finally:
        served.close()


def get(served: HttpEndpoint, path: str, context: ssl.SSLContext | None = None, name: str = "") -> tuple[int, str, str]:
    """(status, content type, text). name: the name that the server's certificate must have."""
    line = http.client.HTTPConnection(served.address, timeout=WAIT_S)
    line.connect()
    if context is not None:
        line.sock = context.wrap_socket(line.sock, server_hostname=name)
    try:
        line.request("GET", path)
        answer = line.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read().decode()
    finally:
        line.close()


def test_metrics_health_and_readiness_have_a_path_each_and_nothing_else_is_there() -> None:
    with opened(problem="the job is forming") as served:
        status, kind, text = get(served, "/metrics?x=1")
        assert (
            status == 200 and kind.startswith("text/plain; version=") and "elastic_metrics_failures_total 0.0" in text
        )
        assert get(served, "/healthz")[::2] == (200, "ok\n")
        assert get(served, "/readyz")[::2] == (503, "the job is forming\n")
        assert get(served, "/etc/passwd")[0] == 404
        line = http.client.HTTPConnection(served.address, timeout=WAIT_S)
        line.request("POST", "/metrics", b"x")
        assert line.getresponse().status == 501
        line.close()
        line.request("GET", "/metrics", headers={"Accept": "text/plain;version=abc"})
        assert line.getresponse().headers["Content-Type"].startswith("text/plain; version=")
        line.close()


def test_callers_who_say_nothing_lose_their_places_to_a_scraper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_endpoint, "CALLS", 3)
    with opened() as served, ExitStack() as stack:
        host, _, port = served.address.rpartition(":")
        silent = [stack.enter_context(socket.create_connection((host, int(port)), WAIT_S)) for _ in range(3)]
        assert get(served, "/healthz")[0] == 200
        assert silent[0].recv(1) == b""  # ended, and not by its own time


def test_a_caller_who_says_nothing_is_left_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_endpoint, "CALL_S", 0.05)
    with opened() as served:
        host, _, port = served.address.rpartition(":")
        with socket.create_connection((host, int(port)), WAIT_S) as silent:
            assert silent.recv(1) == b""


def test_a_port_in_use_and_a_foreign_address_say_what_to_do() -> None:
    with opened() as served, pytest.raises(ConfigError, match="Address already in use; give an address of this mach"):
        HttpEndpoint(served.address)
    with pytest.raises(ConfigError, match=r"cannot serve --metrics on 192\.0\.2\.1:9400: .*; give an address"):
        HttpEndpoint("192.0.2.1:9400")
    with pytest.raises(ConfigError, match=r"cannot serve --metrics on no\.such\.host\.invalid:9400"):
        HttpEndpoint("no.such.host.invalid:9400")


@pytest.mark.parametrize(
    ("text", "certs", "address"),
    [
        ("9400", None, "127.0.0.1:9400"),
        ("localhost:0", False, "localhost:0"),
        ("[::1]:9400", False, "[::1]:9400"),
        ("0.0.0.0:9400", True, "0.0.0.0:9400"),
    ],
)
def test_a_port_alone_is_on_loopback(text: str, certs: bool | None, address: str) -> None:
    assert address_of(text, certs=certs) == address


@pytest.mark.parametrize(
    ("text", "certs", "because"),
    [
        ("", None, "--metrics is empty"),
        ("host", None, "--metrics 'host' must be HOST:PORT"),
        ("70000", None, "must be HOST:PORT"),
        ("1:2:3", None, "must be HOST:PORT"),
        ("127.0.0.1:1,127.0.0.1:2", None, "is several addresses; give one"),
        ("0.0.0.0:9400", None, "let the scraper, or a proxy with TLS of your own, run on this machine"),
        ("10.0.0.1:9400", False, "or give --certs DIR"),
    ],
)
def test_a_wrong_address_is_refused_with_advice(text: str, certs: bool | None, because: str) -> None:
    with pytest.raises(ConfigError, match=because):
        address_of(text, certs=certs)


def certificate(authority: Authority, out: Path, name: str, role: Role) -> Keyring:
    authority.issue(name, [role], out, days=1)
    return of_role(out, role)


@pytest.mark.parametrize(("served_by", "name"), [(Role.RENDEZVOUS, SERVER_NAME), (Role.WORKER, NODE_NAME)])
def test_with_certificates_viewers_and_operators_are_let_in_and_nobody_else(
    tmp_path: Path, served_by: Role, name: str
) -> None:
    create(tmp_path / "ca")
    create(tmp_path / "other")
    ours, foreign = Authority(tmp_path / "ca"), Authority(tmp_path / "other")
    own = certificate(ours, tmp_path / "n", "n", served_by)
    with opened(keyring=own) as served:

        def asked(role: Role, authority: Authority = ours) -> tuple[int, str, str]:
            shown = certificate(authority, tmp_path / f"{id(authority)}{role}", "ann", role)
            context = shown.current().context(called=False)
            context.check_hostname = True
            if authority is foreign:
                context.load_verify_locations(cadata=own.current().roots.decode())
            return get(served, "/metrics", context, name)

        assert asked(Role.VIEWER)[0] == asked(Role.OPERATOR)[0] == 200
        status, _, text = asked(Role.WORKER)
        assert status == 403
        assert "worker ann does not allow it; it takes one with role operator or viewer" in text
        with pytest.raises(OSError):
            asked(Role.VIEWER, foreign)
        stranger = ssl.create_default_context(cadata=own.current().roots.decode())
        with pytest.raises(OSError):
            get(served, "/metrics", stranger, name)
        with pytest.raises((OSError, http.client.HTTPException)):
            get(served, "/metrics")
        assert asked(Role.VIEWER)[0] == 200


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ssl.SSLContext]:
    """What create_default_context() gives from Python 3.13 on."""
    usual = ssl.create_default_context

    def made(**given: Any) -> ssl.SSLContext:
        context = usual(**given)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", made)
    return made


def test_who_checks_strictly_believes_what_the_authority_issues(
    tmp_path: Path, strict: Callable[..., ssl.SSLContext]
) -> None:
    create(tmp_path / "ca")
    issuer = Authority(tmp_path / "ca")
    with opened(keyring=certificate(issuer, tmp_path / "n", "n", Role.WORKER)) as served:
        certificate(issuer, tmp_path / "ann", "ann", Role.VIEWER)
        context = strict(cafile=str(tmp_path / "ann" / FLEET_CA))
        context.load_cert_chain(tmp_path / "ann" / f"{Role.VIEWER}.pem")
        assert get(served, "/metrics", context, NODE_NAME)[0] == 200


def test_a_pod_is_asked_with_certificates_of_before_too(
    tmp_path: Path, strict: Callable[..., ssl.SSLContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert strict().verify_flags & ssl.VERIFY_X509_STRICT
    add = x509.CertificateBuilder.add_extension

    def without(builder: x509.CertificateBuilder, value: x509.ExtensionType, critical: bool) -> Any:
        identifies = isinstance(value, x509.SubjectKeyIdentifier | x509.AuthorityKeyIdentifier)
        return builder if identifies else add(builder, value, critical=critical)

    monkeypatch.setattr(x509.CertificateBuilder, "add_extension", without)
    create(tmp_path / "ca")
    Authority(tmp_path / "ca").issue("n", [Role.AGENT, Role.VIEWER], tmp_path / "n")
    with opened(keyring=of_role(tmp_path / "n", Role.WORKER)) as served:
        assert probe.ask("healthz", int(served.address.rpartition(":")[2]), tmp_path / "n", probe.Probed.AGENT) == "ok"
