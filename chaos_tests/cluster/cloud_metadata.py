"""Metadata services on this machine, which keep the clouds' published contracts; and what goes wrong with them.

A node that is told to ask one of them (`choice`, `environment`) hears from it that its machine is about to go.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from elastic.preemption import aws, azure, gcp

PATIENCE_S = 30.0


@dataclass(frozen=True)
class MetadataRequest:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Reply:
    status: int
    body: str = ""
    headers: dict[str, str] = field(default_factory=dict)


def _now() -> datetime:
    return datetime.now(UTC)


class MetadataService:
    """Answers every request by `answer`. `trouble`, when set, is answered instead, or called. A context manager.

    host: the address of this machine on which it listens. choice: what `elastic agent --notices` calls it.
    """

    choice = ""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.now = _now
        """The service's own clock."""
        self.asked: list[MetadataRequest] = []
        self.trouble: Reply | Callable[[], Reply] | None = None
        self.closing = threading.Event()
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do(self) -> None:
                parts = urlsplit(self.path)
                query = {name: values[0] for name, values in parse_qs(parts.query).items()}
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = MetadataRequest(self.command, parts.path, query, headers, body)
                service.asked.append(request)
                reply = service.trouble or service.answer(request)
                reply = reply() if callable(reply) else reply
                content = reply.body.encode()
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_PUT = do_POST = do

            def log_message(self, format: str, *args: Any) -> None:
                """Silence."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def server_bind(self) -> None:
                """Without asking the network for a name."""
                TCPServer.server_bind(self)
                self.server_name, self.server_port = host, self.socket.getsockname()[1]

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A client that has given up is part of the tests."""

        self._host = host
        self._server = Server((host, 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def answer(self, request: MetadataRequest) -> Reply:
        raise NotImplementedError

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables of a process that is to ask this service, and not the cloud's."""
        raise NotImplementedError

    def reclaim(self, within_s: float) -> None:
        """Say from now on that the machine goes after that time."""
        raise NotImplementedError

    def withdraw(self) -> None:
        """Say no longer that it goes."""
        raise NotImplementedError

    @property
    def address(self) -> str:
        return f"{self._host}:{self._server.server_port}"

    @property
    def date(self) -> str:
        """As HTTP writes it."""
        return format_datetime(self.now(), usegmt=True)

    def hang(self) -> Reply:
        """For `trouble`: no answer until the test is over."""
        self.closing.wait(PATIENCE_S)
        return Reply(500)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Ec2(MetadataService):
    """IMDSv2: no word without a token, and tokens expire."""

    choice = "aws"

    def __init__(self, host: str = "127.0.0.1") -> None:
        super().__init__(host)
        self.token = 0
        self.documents: dict[str, str] = {}
        """Path below /latest/meta-data/ -> document."""

    @property
    def environment(self) -> Mapping[str, str]:
        return {aws.ENDPOINT: f"http://{self.address}"}

    def reclaim(self, within_s: float) -> None:
        time = self.now() + timedelta(seconds=within_s)
        self.documents["spot/instance-action"] = json.dumps(
            {"action": "terminate", "time": time.strftime("%Y-%m-%dT%H:%M:%SZ")}
        )

    def withdraw(self) -> None:
        self.documents.clear()

    def answer(self, request: MetadataRequest) -> Reply:
        if request.path == "/latest/api/token":
            if request.method != "PUT" or not request.headers.get("x-aws-ec2-metadata-token-ttl-seconds", "").isdigit():
                return Reply(400)
            return Reply(200, f"token-{self.token}==")
        if request.headers.get("x-aws-ec2-metadata-token") != f"token-{self.token}==":
            return Reply(401)
        document = self.documents.get(request.path.removeprefix("/latest/meta-data/"))
        return Reply(404) if document is None else Reply(200, document, {"Date": self.date})


class Gce(MetadataService):
    """Values with ETags; a question may wait until the value is another one. It tells no times: 30 s are promised."""

    choice = "gcp"

    def __init__(self, host: str = "127.0.0.1") -> None:
        super().__init__(host)
        self.values = {"preempted": "FALSE", "maintenance-event": "NONE"}
        self._changed = threading.Condition()

    @property
    def environment(self) -> Mapping[str, str]:
        return {gcp.HOST: self.address}

    def reclaim(self, within_s: float) -> None:
        self.set("preempted", "TRUE")

    def withdraw(self) -> None:
        self.set("preempted", "FALSE")

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self.values[key] = value
            self._changed.notify_all()

    def answer(self, request: MetadataRequest) -> Reply:
        if request.headers.get("metadata-flavor") != "Google":
            return Reply(403)
        key = request.path.removeprefix("/computeMetadata/v1/instance/")
        if key not in self.values:
            return Reply(404)
        with self._changed:
            if request.query.get("wait_for_change") == "true":
                last, wait_s = request.query.get("last_etag", "0"), float(request.query.get("timeout_sec", PATIENCE_S))
                self._changed.wait_for(lambda: self._etag(key) != last or self.closing.is_set(), wait_s)
            headers = {"Metadata-Flavor": "Google", "ETag": self._etag(key), "Content-Type": "application/text"}
            return Reply(200, self.values[key], headers)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.closing.set()
        with self._changed:
            self._changed.notify_all()
        super().__exit__(kind, error, tb)

    def _etag(self, key: str) -> str:
        return f"{abs(hash(self.values[key])):x}"


class AzureHost(MetadataService):
    """Scheduled Events of a scale set; approving an event starts it."""

    choice = "azure"

    def __init__(self, host: str = "127.0.0.1") -> None:
        super().__init__(host)
        self.name = "train_3"
        self.incarnation = 1
        self.events: list[dict[str, Any]] = []

    @property
    def environment(self) -> Mapping[str, str]:
        return {azure.HOST: f"http://{self.address}"}

    def reclaim(self, within_s: float) -> None:
        not_before = format_datetime(self.now() + timedelta(seconds=within_s), usegmt=True)
        self.schedule(f"reclaim-{self.incarnation}", "Preempt", not_before, self.name)

    def withdraw(self) -> None:
        self.incarnation += 1
        self.events.clear()

    def schedule(self, event_id: str, kind: str, not_before: str, *resources: str, status: str = "Scheduled") -> None:
        self.incarnation += 1
        self.events.append(
            {
                "EventId": event_id, "EventType": kind, "ResourceType": "VirtualMachine", "Resources": list(resources),
                "EventStatus": status, "NotBefore": not_before, "Description": "", "EventSource": "Platform",
                "DurationInSeconds": -1,
            }
        )  # fmt: skip

    def answer(self, request: MetadataRequest) -> Reply:
        if request.headers.get("metadata") != "true" or "api-version" not in request.query:
            return Reply(400, '{"error": "Bad request. api-version or the header Metadata is missing"}')
        if request.path == "/metadata/instance/compute/name":
            return Reply(200, self.name)
        if request.path != "/metadata/scheduledevents":
            return Reply(404)
        if request.method == "POST":
            approved = {one["EventId"] for one in json.loads(request.body)["StartRequests"]}
            for event in self.events:
                if event["EventId"] in approved:
                    event |= {"EventStatus": "Started", "NotBefore": ""}
            return Reply(200)
        document = {"DocumentIncarnation": self.incarnation, "Events": self.events}
        return Reply(200, json.dumps(document), {"Date": self.date})
