"""The etcd of a fleet of one job, when it ends."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.errors import ConfigError
from elastic.platforms.common import fleet_host


def test_an_etcd_that_cannot_be_started_again_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fleet_host, "PARENT_LOOK_S", 0.0)
    over = threading.Event()
    fails = [OSError("no memory"), OSError("no memory"), None, ConfigError("no setpriv"), None]

    def restart() -> None:
        found = fails.pop(0)
        if not fails:
            over.set()
        if found is not None:
            raise found

    etcd: Any = SimpleNamespace(process=SimpleNamespace(wait=lambda: 0), restart=restart)
    fleet_host._keep(etcd, over)
    assert capsys.readouterr().err.splitlines() == [
        "etcd cannot be started again: no memory",
        "etcd cannot be started again: no setpriv",
    ]
    assert not fails
