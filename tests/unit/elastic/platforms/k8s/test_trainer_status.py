"""Progress for Kubeflow Trainer: what is said, by whom, and that a server that is away holds up nobody."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from elastic.platforms.k8s import trainer_status
from elastic.platforms.k8s.trainer_status import CA_CERT, TOKEN, URL, TrainerStatus, status
from elastic.records.journal import Journal, journal_path

NOW = datetime(2026, 1, 31, 8, 20, 0, tzinfo=UTC)
LINE = {"step": 29, "samples": [], "scalars": {"loss": 0.5, "lr": 1e-3}}


def test_what_is_said() -> None:
    assert status(LINE, 120, 3.0, NOW) == {
        "trainerStatus": {
            "lastUpdatedTime": "2026-01-31T08:20:00Z",
            "progressPercentage": 25,
            "estimatedRemainingSeconds": 30,
            "metrics": [
                {"name": "step", "value": "30"},
                {"name": "loss", "value": "0.5"},
                {"name": "lr", "value": "0.001"},
            ],
        }
    }


def test_what_is_not_known_is_left_out() -> None:
    assert set(status(LINE, None, 3.0, NOW)["trainerStatus"]) == {"lastUpdatedTime", "metrics"}
    assert "estimatedRemainingSeconds" not in status(LINE, 120, 0.0, NOW)["trainerStatus"]
    assert status({"step": 200}, 120, 1.0, NOW)["trainerStatus"]["progressPercentage"] == 100


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.told.append((self.headers["Authorization"], json.loads(body)["trainerStatus"]))
        self.send_response(self.server.answer)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None: ...


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.answer = 200
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server
        server.shutdown()


@pytest.fixture
def told_to(server: Server, tmp_path: Path) -> dict[str, str]:
    (tmp_path / "token").write_text("secret\n")
    address = f"http://127.0.0.1:{server.server_address[1]}/status"
    return {URL: address, TOKEN: str(tmp_path / "token"), CA_CERT: ""}


def ledger(job_dir: Path, steps: int) -> None:
    """With a plan of 120 steps."""
    with Journal(journal_path(job_dir, "worker"), "train", "worker", "n1") as journal:
        journal.write("steps_planned", total=120, shards=8)
    lines = [json.dumps({**LINE, "step": step}) for step in range(steps)]
    (job_dir / "steps.jsonl").write_text("\n".join([*lines, ""]))


def until(reached: Any) -> None:
    deadline_s = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)  # another thread


def test_the_last_step_is_told_at_the_end_with_the_token(
    server: Server, told_to: dict[str, str], tmp_path: Path
) -> None:
    ledger(tmp_path, 120)
    TrainerStatus(told_to, tmp_path, lambda: True).close()
    ((authorization, said),) = server.told
    assert authorization == "Bearer secret" and said["progressPercentage"] == 100


def test_only_one_pod_speaks_and_without_the_variables_none(
    server: Server, told_to: dict[str, str], tmp_path: Path
) -> None:
    ledger(tmp_path, 30)
    TrainerStatus(told_to, tmp_path, lambda: False).close()
    TrainerStatus({}, tmp_path, lambda: True).close()
    assert server.told == []


def test_a_server_that_is_away_or_refuses_is_named_once_and_told_the_newest_state_later(
    server: Server,
    told_to: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(trainer_status, "EVERY_S", 0.02)
    server.answer = 503
    ledger(tmp_path, 30)
    telling = TrainerStatus(told_to, tmp_path, lambda: True)
    until(lambda: len(server.told) > 3)
    ledger(tmp_path, 60)
    server.answer = 200
    until(lambda: server.told[-1][1]["progressPercentage"] == 50)
    telling.close()
    assert capsys.readouterr().err.count("is not told of the progress: HTTPError: HTTP Error 503") == 1


def test_a_token_that_is_not_there_is_said(told_to: dict[str, str], tmp_path: Path, capsys: Any) -> None:
    ledger(tmp_path, 30)
    TrainerStatus({**told_to, TOKEN: "/nowhere"}, tmp_path, lambda: True).close()
    assert "No such file" in capsys.readouterr().err
