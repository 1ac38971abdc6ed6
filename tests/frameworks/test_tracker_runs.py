"""Runs of MLflow and of Weights & Biases to which frameworks log: each leader goes on in the run of the one before it,
and the run has each point of the quiet run once, but for times."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from elastic.observability.trackers.wandb_files import records
from tests.frameworks.events import Point
from tests.frameworks.fates import everything_killed, two_deaths_and_two_joins
from tests.frameworks.test_hugging_face import OFFLINE, TIMES, words
from tests.live.jobs import Job

for package in ("mlflow", "wandb", "transformers", "lightning"):
    pytest.importorskip(package, reason="frameworks are installed by `make test-frameworks`")

pytestmark = pytest.mark.filterwarnings("ignore:.*noload.*")  # MLflow's use of sqlalchemy
KINDS = ("hf_language_model", "lightning_language_model", "accelerate_language_model")
Points = dict[str, list[Point]]


@functools.cache
def empty_database(home: Path) -> Path:
    """MLflow makes its tables in many steps: once for all jobs."""
    from mlflow import MlflowClient  # type: ignore[import-not-found, unused-ignore]

    MlflowClient(f"sqlite:///{home}/empty.db").search_experiments()
    return home / "empty.db"


def environment(home: Path, empty: Path) -> dict[str, str]:
    """Variables of a job whose trackers write below this directory. empty: a database."""
    (home / "wandb").mkdir(parents=True, exist_ok=True)
    if not (home / "mlflow.db").exists():
        shutil.copy(empty, home / "mlflow.db")
    return {
        **OFFLINE,
        "REPORT_TO": "mlflow,wandb",
        "LOG_EVERY": "1",  # each death comes beside a row
        "MLFLOW_TRACKING_URI": f"sqlite:///{home}/mlflow.db",
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(home / "wandb"),
        "WANDB_SILENT": "true",
    }


def told(home: Path) -> dict[str, Points]:
    """Tracker -> name -> points. Each tracker must have one run."""
    return {"mlflow": in_mlflow(home), "wandb": in_wandb(home)}


def in_mlflow(home: Path) -> Points:
    from mlflow import MlflowClient  # type: ignore[import-not-found, unused-ignore]

    client = MlflowClient(f"sqlite:///{home}/mlflow.db")
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert len(runs) == 1, runs
    (run,) = runs
    assert run.info.status == "FINISHED"
    found = {}
    for name in run.data.metrics:
        points = [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]
        found[name] = sorted(points)
    return untimed(found)


def in_wandb(home: Path) -> Points:
    """Of all files: each leader has written one. Rows that are in several of them have one number, and one content."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[import-not-found, unused-ignore]

    files = sorted((home / "wandb" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len({file.name for file in files}) == 1, files
    rows: dict[int, dict[str, Any]] = {}
    for file in files:
        for text in records(file.read_bytes()):
            record = Record.FromString(text)
            if record.WhichOneof("record_type") != "history":
                continue
            row = dict(map(entry, record.history.item))
            step = record.history.step.num
            assert untimed(rows.setdefault(step, row)) == untimed(row), (step, file)
    found: Points = {}
    for step, row in sorted(rows.items()):
        for name, value in row.items():
            found.setdefault(name, []).append((step, value))
    return untimed(found)


def entry(item: Any) -> tuple[str, Any]:
    return item.key or "/".join(item.nested_key), json.loads(item.value_json)


def untimed(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in found.items()
        if not name.startswith("_") and not any(part in name for part in TIMES)
    }


@functools.cache
def quiet(kind: str, home: Path) -> dict[str, Points]:
    variables, home = environment(home / kind, empty_database(home)), home / kind
    with Job(home.parent, *words(kind, 1, home), name=f"quiet-{kind}", environment=variables) as job:
        assert job.wait() == 0, job.output
    found = told(home)
    assert all(max(map(len, points.values())) >= 40 for points in found.values())
    return found


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quiet-runs")


@pytest.mark.parametrize("kind", KINDS)
def test_two_deaths_and_two_joins_leave_no_trace(kind: str, home: Path, tmp_path: Path) -> None:
    wanted, variables = quiet(kind, home), environment(tmp_path, empty_database(home))
    with Job(tmp_path, *words(kind, 3, tmp_path / "output"), environment=variables) as job:
        two_deaths_and_two_joins(job, 3, 12)
        assert job.wait() == 0, job.output
        assert not job.events("script_failed"), job.output
    assert told(tmp_path) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_when_everything_was_killed(kind: str, home: Path, tmp_path: Path) -> None:
    """Steps behind the last checkpoint are logged a second time."""
    wanted, variables = quiet(kind, home), environment(tmp_path, empty_database(home))
    with Job(tmp_path, *words(kind, 2, tmp_path / "output"), environment=variables) as job:
        everything_killed(job, 18)
    with Job(tmp_path, *words(kind, 3, tmp_path / "output"), environment=variables) as job:
        job.pace(0)
        assert job.wait() == 0, job.output
    assert told(tmp_path) == wanted
