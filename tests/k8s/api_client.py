"""The API server of a test's control plane, asked as its administrator."""

from __future__ import annotations

import http.client
import json
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Object = dict[str, Any]

MERGE = "application/merge-patch+json"


class Refused(Exception):
    """By the API server. code: of HTTP."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


@dataclass(frozen=True)
class Api:
    """OSError while it is away."""

    host: str
    port: int
    token: str
    ca: Path

    def get(self, path: str) -> Object:
        return self._ask("GET", path)

    def items(self, path: str) -> list[Object]:
        found: list[Object] = self.get(path)["items"]
        return found

    def post(self, path: str, body: Object) -> Object:
        return self._ask("POST", path, body)

    def patch(self, path: str, body: Object) -> Object:
        return self._ask("PATCH", path, body, MERGE)

    def delete(self, path: str, **options: object) -> Object:
        return self._ask("DELETE", path, {"kind": "DeleteOptions", "apiVersion": "v1", **options})

    def _ask(self, method: str, path: str, body: Object | None = None, kind: str = "application/json") -> Object:
        context = ssl.create_default_context(cafile=str(self.ca))
        connection = http.client.HTTPSConnection(self.host, self.port, timeout=20.0, context=context)
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": kind}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read().decode()
        except http.client.HTTPException as error:
            raise ConnectionError(str(error)) from error
        finally:
            connection.close()
        if answer.status >= 300:
            raise Refused(answer.status, text)
        told: Object = json.loads(text)
        return told
