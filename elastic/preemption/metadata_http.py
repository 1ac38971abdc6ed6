"""One question to a metadata service: plain HTTP, no proxy, a deadline for the whole answer and a limit on its size."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from elastic.preemption.provider import Unanswered

ANSWER_LIMIT = 65_536
"""Bytes; documents of metadata services are below 4 KiB."""


def date_of(text: str) -> datetime:
    """A date as HTTP's headers have it, in UTC. Raises ValueError."""
    from email.utils import parsedate_to_datetime  # slow to import, and most nodes ask no metadata service

    return parsedate_to_datetime(text).astimezone(UTC)


@dataclass(frozen=True, slots=True)
class MetadataAnswer:
    """headers: names in lower case."""

    where: str
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def now(self) -> datetime:
        """The service's own time of this answer, so that its times are compared with its clock; else ours."""
        try:
            return date_of(self.headers["date"])
        except (KeyError, ValueError):
            return datetime.now(UTC)

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace").strip()

    def json(self) -> dict[str, Any]:
        """The document as an object. Raises Unanswered."""
        try:
            document = json.loads(self.body)
        except ValueError as error:
            raise self.trouble(f"not JSON: {error}") from error
        if not isinstance(document, dict):
            raise self.trouble("not a JSON object")
        return document

    def trouble(self, because: str) -> Unanswered:
        """That this answer cannot be used."""
        return Unanswered(f"{self.where} answered {self.status}, {because}: {self.text[:80]!r}")


def ask(
    base: str,
    path: str,
    *,
    timeout_s: float,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
) -> MetadataAnswer:
    """base: "http://host[:port][/prefix]". Raises Unanswered if no whole answer came within timeout_s."""
    import http.client  # as slow

    parts = urlsplit(base)
    where = f"{method} {base}{path}"
    if parts.scheme != "http" or not parts.hostname:
        raise Unanswered(f"{base!r} is no http:// address of a metadata service")
    deadline_s = time.monotonic() + timeout_s
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
    try:
        connection.request(method, parts.path.rstrip("/") + path, body, dict(headers or {}))
        response = connection.getresponse()
        known = {name.lower(): value for name, value in response.getheaders()}
        content = b""
        while chunk := response.read1(ANSWER_LIMIT):
            content += chunk
            if len(content) > ANSWER_LIMIT or time.monotonic() > deadline_s:
                raise Unanswered(f"{where}: the answer is longer than {ANSWER_LIMIT} bytes or than {timeout_s:g} s")
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Unanswered(f"{where}: {type(error).__name__} {error}") from error
    finally:
        connection.close()
    return MetadataAnswer(where, response.status, known, content)
