"""What is done to a running etcd by its own interface: JSON over the unix socket of the embedded one."""

from __future__ import annotations

import base64
import http.client
import os
import socket
from typing import Any

from chaos_tests.cluster.etcd import CALL_S, ask
from chaos_tests.nemesis.signals import Impossible
from elastic.errors import StoreError

EVERYTHING = base64.b64encode(b"\0").decode()
"""As a key and as the end of a range: from the first to the last."""


def compact(pid: int) -> None:
    """Forget every revision but those from the newest value on. Raises Impossible."""
    newest = _ask(
        pid, "kv/range", key=EVERYTHING, range_end=EVERYTHING, sort_order="DESCEND", sort_target="MOD", limit=1
    )
    revision = int(newest["kvs"][0]["mod_revision"]) - 1 if newest.get("kvs") else 0
    if revision < 1:
        raise Impossible("etcd holds nothing that could be forgotten")
    try:
        _ask(pid, "kv/compaction", revision=str(revision), physical=True)
    except Impossible as refused:
        if "compacted" not in str(refused):  # it was already, at just this revision
            raise


def defragment(pid: int) -> None:
    """Rewrite its database; it answers nobody meanwhile. Raises Impossible."""
    _ask(pid, "maintenance/defragment")


def revoke_leases(pid: int) -> None:
    """All at once, the leader's among them. Raises Impossible if there are none."""
    leases = _ask(pid, "lease/leases").get("leases", [])
    if not leases:
        raise Impossible("etcd has granted no lease")
    for lease in leases:
        _ask(pid, "lease/revoke", ID=lease["ID"])


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=CALL_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(CALL_S)
        self.sock.connect(self._path)


def _ask(pid: int, what: str, **fields: object) -> dict[str, Any]:
    try:
        return ask(_Connection(f"{os.readlink(f'/proc/{pid}/cwd')}/localhost:1"), what, **fields)
    except (OSError, StoreError) as error:
        raise Impossible(str(error)) from error
