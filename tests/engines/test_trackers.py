"""MLflow, TensorBoard and W&B as they are installed: every step once, through the deaths of two leaders.

The first two are read back by their own libraries. The package wandb has no reader of its files, so they are read as
the tracker reads them, with the package's messages.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from elastic.observability.trackers.wandb_files import held, segments
from tests.live.jobs import Job

SCRIPT = Path(__file__).with_name("tracked.py")
STEPS = 900

pytest.importorskip("mlflow", reason="`make test-engines` installs it")
pytest.importorskip("wandb", reason="`make test-engines` installs it")
pytest.importorskip("tensorboard", reason="`make test-engines` installs it")

Series = dict[str, list[tuple[int, float]]]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A job that has ended, and its ledger."""
    home = tmp_path_factory.mktemp("trackers")
    with Job(home, "--workers", "3", str(SCRIPT), str(home), str(STEPS)) as running:
        for at in (250, 600):
            running.await_steps(at)
            running.send(running.members()[0])
            running.await_world(3)
        assert running.wait() == 0, running.output
        assert {line["generation"] for line in running.steps()} != {1}
        return home, running.steps()


def wanted(ledger: list[dict[str, Any]]) -> Series:
    return {
        "loss": [(line["step"], line["scalars"]["loss"]) for line in ledger],
        "lr/0": [(line["step"], line["lr"][0]) for line in ledger],
        "elastic/members": [(line["step"], float(line["world_size"])) for line in ledger],
        "elastic/generation": [(line["step"], float(line["generation"])) for line in ledger],
    }


@pytest.mark.filterwarnings("ignore:.*noload.*")  # MLflow's use of sqlalchemy
def test_the_run_of_mlflow_has_every_step_once(job: tuple[Path, list[dict[str, Any]]]) -> None:
    from mlflow import MlflowClient

    home, ledger = job
    client = MlflowClient(tracking_uri=f"sqlite:///{home}/mlflow.db")
    experiment = client.get_experiment_by_name("tests")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == "one"
    for name, points in wanted(ledger).items():
        history = client.get_metric_history(run.info.run_id, name)
        assert sorted((point.step, point.value) for point in history) == points, name
    rows = sqlite3.connect(home / "mlflow.db").execute("select count(*) from metrics where key = 'loss'").fetchone()
    assert rows == (STEPS,), "and nothing that its library hides"


def test_the_files_of_tensorboard_have_every_step_once(job: tuple[Path, list[dict[str, Any]]]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    home, ledger = job
    shown = EventAccumulator(str(home / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    for name, points in wanted(ledger).items():
        found = [(point.step, point.value) for point in shown.Scalars(name)]
        assert [step for step, _ in found] == [step for step, _ in points], name
        assert [value for _, value in found] == pytest.approx([value for _, value in points], rel=1e-6), "float32"


def test_the_offline_files_of_wandb_have_every_step_once(job: tuple[Path, list[dict[str, Any]]]) -> None:
    home, ledger = job
    files = [held(path) for path in segments(home / "wandb", "one")]
    assert [step for file in files for step in file.steps] == [line["step"] for line in ledger]
    assert files[-1].ended
    assert sum(bool(file.steps) for file in files) >= 2, "each leader that had time to write has a file"


def tracker(home: Path) -> subprocess.Popen[bytes]:
    """The process of a leader, for a run of W&B."""
    token = os.urandom(4).hex()
    options = {"project": "tests", "run": "two", "directory": str(home), "offline": True, "token": token}
    command = [sys.executable, "-m", "elastic.observability.trackers", "wandb", json.dumps(options)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


def next_step(process: subprocess.Popen[bytes]) -> int:
    assert process.stdout is not None
    found: int = json.loads(process.stdout.readline())["next"]
    return found


def give(process: subprocess.Popen[bytes], first: int, end: int) -> None:
    assert process.stdin is not None
    for step in range(first, end):
        process.stdin.write(json.dumps({"step": step, "points": {"loss": 1.0 / (step + 1)}}).encode() + b"\n")
    process.stdin.flush()


def test_what_a_dead_node_had_not_on_file_is_written_by_the_next_one(tmp_path: Path) -> None:
    """The package's service process dies with the tracker's, and has written whole blocks only."""
    with tracker(tmp_path) as dead:
        assert next_step(dead) == 0
        give(dead, 0, 1000)
        end_s = time.monotonic() + 100.0
        while not any(held(path).steps for path in segments(tmp_path, "two")):
            assert time.monotonic() < end_s
            time.sleep(0.05)
        os.killpg(dead.pid, signal.SIGKILL)
    with tracker(tmp_path) as successor:
        first = next_step(successor)
        assert 0 < first <= 1000
        give(successor, first, 1100)
        assert successor.stdin is not None
        successor.stdin.write(b'{"end": true}\n')
        successor.stdin.close()
        assert successor.wait(100.0) == 0
    files = [held(path) for path in segments(tmp_path, "two")]
    assert [file.ended for file in files] == [False, True]
    assert [step for file in files for step in file.steps] == list(range(1100))
