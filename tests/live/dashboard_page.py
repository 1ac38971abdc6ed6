"""What a browser sends to a dashboard, without a browser."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
import urllib.parse
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

TIMEOUT_S = 120.0
ADDRESS = re.compile(r"dashboard at (http://\S+\?key=[\w-]+)")


def address_in(output: str) -> str | None:
    """What the command has printed."""
    found = ADDRESS.search(output)
    return found[1] if found else None


class PageClient:
    """A page that was opened with its key."""

    def __init__(self, address: str) -> None:
        parts = urllib.parse.urlsplit(address)
        self.netloc = parts.netloc
        self.cookie = ""
        status, headers, _ = self.send("GET", f"/?{parts.query}")
        assert status == 200
        self.cookie = headers["Set-Cookie"].partition(";")[0]
        self.session = self.get("/api/session")

    def send(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any, bytes]:
        connection = http.client.HTTPConnection(self.netloc, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, body or None, {"Cookie": self.cookie, **headers})
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    def get(self, path: str) -> dict[str, Any]:
        status, _, body = self.send("GET", path)
        assert status == 200, body
        document: dict[str, Any] = json.loads(body)
        return document

    def post(self, path: str, **asked: object) -> tuple[int, dict[str, Any]]:
        acting = {"Origin": f"http://{self.netloc}", "X-Elastic-Token": self.session["token"]}
        status, _, body = self.send("POST", path, json.dumps(asked).encode(), **acting)
        return status, json.loads(body)

    def job(self, name: str = "") -> dict[str, Any]:
        return self.get(self.path(name))

    def path(self, name: str = "") -> str:
        return f"/api/jobs/{name or self.session['job']}"


class Following:
    """A stream of a job's events, as they come; a context manager."""

    def __init__(self, page: PageClient, after: str, job: str = "") -> None:
        self.events: list[tuple[str, str, Any]] = []
        """(id, kind, data)."""
        self._connection = http.client.HTTPConnection(page.netloc, timeout=TIMEOUT_S)
        self._connection.request("GET", f"{page.path(job)}/events?after={after}", headers={"Cookie": page.cookie})
        self._socket = self._connection.sock
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with suppress(OSError):  # the dashboard has ended the stream
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(TIMEOUT_S)
        self._connection.close()

    def wait(self) -> None:
        """Until the dashboard has ended the stream."""
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()

    def moments(self) -> list[tuple[str, str]]:
        """(event, worker) of all that were told as sentences."""
        return [(data["event"], data["worker"]) for _, kind, data in list(self.events) if kind == "moment"]

    def has(self, event: str, worker: str = "") -> Callable[[], bool]:
        return lambda: any(seen == event and worker in ("", whose) for seen, whose in self.moments())

    def of(self, kind: str) -> list[Any]:
        return [data for _, seen, data in list(self.events) if seen == kind]

    def _read(self) -> None:
        fields: dict[str, str] = {}
        try:
            while text := self._answer.readline().decode():
                name, _, value = text.rstrip("\n").partition(": ")
                if name:
                    fields[name] = value
                elif "event" in fields:
                    self.events.append((fields.get("id", ""), fields["event"], json.loads(fields["data"])))
                    fields = {}
        except (OSError, ValueError, AttributeError):  # the test has closed it
            return
