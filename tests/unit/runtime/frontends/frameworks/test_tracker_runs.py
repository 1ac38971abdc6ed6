"""What the next leader sends to a run of MLflow or of W&B that has some of the last rows; the packages themselves are
tried in tests/frameworks."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from runtime.frontends.frameworks.lightning_state import rows_of
from runtime.frontends.frameworks.trackers.runs import go_on_numbering, send_missing_only, with_ids


class Point(NamedTuple):
    key: str
    step: int


class Client:
    """As an MlflowClient."""

    def __init__(self) -> None:
        self.points: list[tuple[str, Point]] = []

    def get_run(self, run: str) -> Any:
        names = {point.key for own, point in self.points if own == run}
        return SimpleNamespace(data=SimpleNamespace(metrics=dict.fromkeys(names, 0.0)))

    def get_metric_history(self, run: str, name: str) -> list[Point]:
        return [point for own, point in self.points if own == run and point.key == name]

    def log_batch(self, run_id: str, metrics: Sequence[Point] = (), params: Sequence[Any] = ()) -> None:
        self.points += [(run_id, point) for point in metrics]


@pytest.mark.parametrize("written", range(9))
@pytest.mark.parametrize("kept", [2, 5, 8])
def test_a_run_of_mlflow_gets_what_it_lacks_however_much_was_sent(written: int, kept: int) -> None:
    """A name may come twice at each step, as a learning rate that is logged with each of two batches. The rows that are
    kept begin with a step."""
    rows = [Point(name, step) for step in range(1, 4) for name in ("lr", "loss", "lr")]
    rows, last = rows[:8], rows[8]
    written = max(written, len(rows) - kept)  # what is not kept was written long ago
    kind = type("OwnClient", (Client,), {})
    client, other = kind(), Client()
    client.log_batch("run", rows[:written])
    send_missing_only(client, "run")
    for point in (*rows[len(rows) - kept :], last):
        client.log_batch(run_id="run", metrics=[point], params=[])
        client.log_batch("another", [point])
    assert sorted(point for run, point in client.points if run == "run") == sorted([*rows, last])
    assert len([run for run, _ in client.points if run == "another"]) == kept + 1
    assert other.points == []


class Run:
    """As a run of wandb."""

    def __init__(self, step: int) -> None:
        self.step = step

    def log(self, row: dict[str, Any], step: int | None = None, commit: bool = True) -> None:
        assert not row and not commit and step is not None
        self.step = step


@pytest.mark.parametrize(
    ("there", "first", "known", "number"),
    [(0, 20, 0, 20), (0, 0, 0, 0), (22, 20, 2, 22), (25, 20, 5, 25), (30, 20, 5, 30), (10, 20, 0, 20)],
)
def test_rows_of_wandb_keep_their_numbers(there: int, first: int, known: int, number: int) -> None:
    """Five rows could be sent again. A file of its own has none; a server says how many it has."""
    run = Run(there)
    assert go_on_numbering(run, first, 5) == known
    assert run.step == number


def test_options_of_the_script_stay() -> None:
    given = {"wandb": {"tags": ["a"]}, "tensorboard": {"flush_secs": 1}}
    wanted = {
        "wandb": {"tags": ["a"], "id": "w", "resume": "allow"}, "mlflow": {"run_id": "m"},
        "tensorboard": {"flush_secs": 1},
    }  # fmt: skip
    assert with_ids(given, {"wandb": "w", "mlflow": "m"}) == wanted
    assert given == {"wandb": {"tags": ["a"]}, "tensorboard": {"flush_secs": 1}}
    assert with_ids(None, {}) == {}


class WandbLogger:
    """As Lightning's: what the leader alone logs comes to log_metrics(), too."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.sent.append(metrics)

    def log_image(self, image: object) -> None:
        self.log_metrics({"pictures": [image]}, 1)


def test_pictures_of_the_leader_are_sent_and_not_kept() -> None:
    logger, picture, vector = WandbLogger(), object(), torch.zeros(2)
    rows = rows_of(logger, lambda: True)
    assert rows is not None
    logger.log_metrics({"loss": torch.tensor(1.5)}, 0)
    logger.log_image(picture)
    logger.log_metrics({"loss": 0.5, "picture": picture, "vector": vector}, 2)
    assert logger.sent[1] == {"pictures": [picture]} and logger.sent[2]["picture"] is picture
    assert rows.kept.count == 2
    assert rows.kept.rows == [(0, {"loss": 1.5}), (2, {"loss": 0.5, "vector": vector})]
