"""/metrics, /healthz and /readyz: what a scraper asks for.

A scraper that is slow, or a stranger who holds connections, takes a place from the oldest other caller and nothing from
training: threads are few, and each call has an end.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import ssl
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any, cast

from elastic.errors import ConfigError
from elastic.metrics.metric_registry import MetricRegistry
from elastic.rendezvous.endpoint import split
from elastic.security.roles import from_uris, objection_to_scrape

if TYPE_CHECKING:
    from elastic.security.keyring import Keyring  # processes without certificates need no cryptography

CALL_S = 5.0
"""Most seconds for which a caller may say or take nothing."""

CALLS = 16
"""Most callers at once; one more ends the oldest."""

Problem = Callable[[], str]
"""Says why something is not as it should be, or ""."""


class HttpEndpoint:
    """Listens as soon as it is made; `open` begins to answer. keyring: None: plain text. Raises ConfigError if nothing
    can listen there."""

    def __init__(self, address: str, keyring: Keyring | None = None) -> None:
        host, port = split(address)
        self.keyring = keyring
        try:
            self._server = _Server(host, port, keyring)
        except OSError as error:
            raise ConfigError(
                f"cannot serve --metrics on {address}: {error.strerror or error}; give an address of this machine, and "
                "a port that is free, or 0 for any"
            ) from error
        self.address = f"{f'[{host}]' if ':' in host else host}:{self._server.server_address[1]}"

    def open(self, registry: MetricRegistry, healthy: Problem, ready: Problem) -> None:
        self._server.answers = {"/healthz": healthy, "/readyz": ready}
        self._server.registry = registry
        threading.Thread(target=self._server.serve_forever, name="metrics endpoint", daemon=True).start()

    def close(self) -> None:
        if self._server.answers:
            self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    registry: MetricRegistry
    answers: dict[str, Problem]

    def __init__(self, host: str, port: int, keyring: Keyring | None) -> None:
        self.keyring = keyring
        self.answers = {}
        self._callers: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(CALL_S)
        with self._lock:
            if len(self._callers) >= CALLS:
                oldest = next(iter(self._callers))
                del self._callers[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._callers[request] = None
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread is to be had
            self.shutdown_request(request)

    def finish_request(self, request: Any, client_address: Any) -> None:
        if self.keyring is None:
            super().finish_request(request, client_address)
            return
        context = self.keyring.current().context(called=True)
        # The plain socket stays open below the other, so that it can be ended from outside.
        with request.dup() as again:
            again.settimeout(CALL_S)
            with context.wrap_socket(again, server_side=True) as sealed:
                super().finish_request(sealed, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._callers.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller who breaks off, or whose certificate is not believed, is no event."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if because := self._objection():
            self._say(HTTPStatus.FORBIDDEN, because)
        elif path == "/metrics":
            text, content_type = self.server.registry.shown(self.headers.get("Accept", ""))
            self._answer(HTTPStatus.OK, text, content_type)
        elif (problem := self.server.answers.get(path)) is not None:
            because = problem()
            self._say(HTTPStatus.SERVICE_UNAVAILABLE if because else HTTPStatus.OK, because or "ok")
        else:
            self._say(HTTPStatus.NOT_FOUND, "there are /metrics, /healthz and /readyz")

    def _objection(self) -> str:
        if self.server.keyring is None:
            return ""
        names = cast(dict[str, Any], cast(ssl.SSLSocket, self.connection).getpeercert() or {}).get("subjectAltName", ())
        return objection_to_scrape(from_uris(name for kind, name in names if kind == "URI"))

    def _say(self, status: HTTPStatus, text: str) -> None:
        self._answer(status, f"{text}\n".encode(), "text/plain; charset=utf-8")

    def _answer(self, status: HTTPStatus, text: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapers come every few seconds."""
