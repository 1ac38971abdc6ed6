"""Reads one object of a Kubernetes API server from a pod: now, and again whenever it changes.

The connection, the token and the authority are those that each pod has mounted. A watch goes on from the version that
was seen last. The server ends it after a minute, with or without an event, and a server that is gone without a word is
noticed soon after that.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from elastic.preemption.metadata_http import date_of
from elastic.preemption.provider import Unanswered

if TYPE_CHECKING:
    from http.client import HTTPResponse, HTTPSConnection  # slow to import, and most nodes are in no cluster

MOUNTED = Path("/var/run/secrets/kubernetes.io/serviceaccount")
HOST = "KUBERNETES_SERVICE_HOST"
PORT = "KUBERNETES_SERVICE_PORT"

ANSWER_S = 10.0
WATCH_S = 60
SILENT_S = WATCH_S + 15.0
"""A watch on which nothing came for so long is dead: the server would have ended it."""
LONGEST_LINE = 4 * 2**20
"""Bytes of an object; etcd takes objects up to 1.5 MiB."""
GONE = 410
"""The version to go on from is older than what the server still knows."""


@dataclass(frozen=True, slots=True)
class ApiAccess:
    """How this pod reaches the API server. mounted: the directory with token, ca.crt and namespace."""

    host: str
    port: int
    mounted: Path

    @property
    def namespace(self) -> str:
        """Raises Unanswered."""
        return self._read("namespace")

    def connection(self, timeout_s: float) -> HTTPSConnection:
        """Raises Unanswered."""
        import ssl
        from http.client import HTTPSConnection

        try:
            context = ssl.create_default_context(cafile=str(self.mounted / "ca.crt"))
            # Python 3.13 asks for what certificates of many clusters do not have, such as identifiers of keys.
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        except OSError as error:
            raise Unanswered(f"{self.mounted / 'ca.crt'}: {error}") from error
        return HTTPSConnection(self.host, self.port, timeout=timeout_s, context=context)

    def headers(self) -> dict[str, str]:
        """The token is read each time: the kubelet replaces it before its hour is over. Raises Unanswered."""
        return {"Authorization": f"Bearer {self._read('token')}", "Accept": "application/json"}

    def _read(self, name: str) -> str:
        try:
            return (self.mounted / name).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise Unanswered(f"{self.mounted / name}: {error}; the pod needs a service account's token") from error


class WatchedObject:
    """collection: "/api/v1/nodes" or the like. Used by one thread."""

    def __init__(self, access: ApiAccess, collection: str, name: str) -> None:
        self._access = access
        self._collection = collection
        self._name = name
        self._version = ""
        """The version of what was seen last; "": nothing was seen, or it is too old to go on from."""
        self._connection: HTTPSConnection | None = None
        self._stream: HTTPResponse | None = None
        self._object: Mapping[str, Any] = {}
        self.now = datetime.now(UTC)
        """The server's time of its last answer."""

    def next(self) -> Mapping[str, Any]:
        """The object as it is; after the first call as soon as it has changed, or after a minute. Raises Unanswered."""
        try:
            if not self._version:
                self._get()
            elif self._stream is None:
                self._watch()
            else:
                self._event(self._stream)
        except BaseException:
            self.close()
            raise
        return self._object

    def _get(self) -> None:
        response = self._ask(f"{self._collection}/{self._name}", ANSWER_S)
        self._take(_parsed(self._line(response.read, "the object"), self._where))
        self.close()

    def _watch(self) -> None:
        query = {
            "watch": "1",
            "fieldSelector": f"metadata.name={self._name}",
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
        }
        try:
            self._ask(f"{self._collection}?{urlencode(query)}", SILENT_S)
        except _TooOld:
            self._version = ""
            self.close()

    def _event(self, stream: HTTPResponse) -> None:
        line = self._line(stream.readline, "a watch")
        if not line:
            self.close()
            return
        event = _parsed(line, self._where)
        match event:
            case {"type": "ADDED" | "MODIFIED", "object": dict(seen)}:
                self._take(seen)
            case {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(version)}}}:
                self._version = version
            case {"type": "DELETED"} | {"type": "ERROR", "object": {"code": 410}}:
                self._version = ""
                self.close()
            case _:
                self._version = ""
                raise Unanswered(f"{self._where}: an event of its watch is {json.dumps(event):.200}")

    def _take(self, seen: Mapping[str, Any]) -> None:
        match seen:
            case {"metadata": {"resourceVersion": str(version)}}:
                self._object, self._version = seen, version
            case _:
                raise Unanswered(f"{self._where} has no resourceVersion: {json.dumps(seen):.200}")

    def _ask(self, path: str, timeout_s: float) -> HTTPResponse:
        from http.client import HTTPException

        self._connection = connection = self._access.connection(timeout_s)
        try:
            connection.request("GET", path, headers=self._access.headers())
            self._stream = response = connection.getresponse()
            if response.status == GONE:
                raise _TooOld
            if response.status != 200:
                said = response.read(500).decode(errors="replace").strip()
                self._version = ""
                raise Unanswered(f"{self._where} answered {response.status}: {said:.300}")
        except (OSError, HTTPException) as error:
            raise Unanswered(f"{self._where}: {type(error).__name__} {error}") from error
        with contextlib.suppress(KeyError, ValueError):
            self.now = date_of(response.headers["Date"])
        return response

    def _line(self, read: Any, what: str) -> bytes:
        from http.client import HTTPException

        try:
            line: bytes = read(LONGEST_LINE)
        except (OSError, HTTPException) as error:
            raise Unanswered(f"{self._where}: {type(error).__name__} {error} in {what}") from error
        return line

    @property
    def _where(self) -> str:
        return f"https://{self._access.host}:{self._access.port}{self._collection}/{self._name}"

    def close(self) -> None:
        """The next call connects again."""
        if self._stream is not None:
            self._stream.close()
        if self._connection is not None:
            self._connection.close()
        self._connection = self._stream = None


class _TooOld(Exception):
    """The server does not know any more what has changed since that version."""


def _parsed(text: bytes, where: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise Unanswered(f"{where} answered no JSON: {error}") from error
    if not isinstance(document, dict):
        raise Unanswered(f"{where} answered no object")
    return document
