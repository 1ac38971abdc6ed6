"""What adapters carry for Keras and Lightning, with stand-ins for the objects of these frameworks."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime.frontends.frameworks.keras.variables import ModelVariables
from runtime.frontends.frameworks.lightning.state import CsvRows, LoggerRows, rows_of

COUNTS = torch.tensor([[1, 2], [40, 6]], dtype=torch.int32)
"""As the confusion matrix of keras.metrics.MeanIoU, of which no entry times 1 / 49 times 49 has to be whole."""


class Variable:
    def __init__(self, path: str, value: torch.Tensor, *, trainable: bool) -> None:
        self.path, self.value, self.trainable = path, value, trainable


@pytest.mark.parametrize("samples", [(49,), (3, 7, 49), (130, 1, 29, 83)])
def test_a_metric_that_counts_whole_numbers_loses_none(samples: tuple[int, ...]) -> None:
    """samples: of each rank. A mean over them is what ranks are merged by."""
    weight = Variable("dense/kernel", torch.nn.Parameter(torch.zeros(2)), trainable=True)
    matrix = Variable("iou/matrix", torch.zeros(2, 2, dtype=torch.int32), trainable=False)
    total = Variable("loss/total", torch.zeros(()), trainable=False)
    state = Variable("seed/state", torch.zeros(2, dtype=torch.int64), trainable=False)
    model = SimpleNamespace(
        weights=[weight], metrics_variables=[matrix, total], variables=[weight, matrix, total], _flatten_layers=list
    )
    variables = ModelVariables(model, state)
    variables.begin_step()
    merged = torch.zeros_like(variables._sums)
    for number, each in enumerate(samples):
        variables.begin_rank(torch.Generator().manual_seed(number))
        matrix.value.add_(COUNTS)
        total.value.add_(0.5)
        variables.end_rank(each)
        merged += variables._sums * each / sum(samples)
    variables._sums.copy_(merged)
    variables.end_step(sum(samples), 1)
    assert torch.equal(matrix.value, COUNTS * len(samples))
    assert total.value.item() == pytest.approx(0.5 * len(samples))


class CSVLogger:
    """As that of Lightning, as far as its rows are concerned."""

    LOGGER_JOIN_CHAR, _prefix = "-", ""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._experiment: Any = None

    @property
    def experiment(self) -> Any:
        self._experiment = self._experiment or ExperimentWriter(self._path)
        return self._experiment

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.experiment.write({**metrics, "step": step})


class ExperimentWriter:
    def __init__(self, path: Path) -> None:
        self.metrics_file_path = str(path)
        self.metrics: list[Any] = []
        self.metrics_keys: list[str] = []
        self._check_log_dir_exists()

    def _check_log_dir_exists(self) -> None:
        Path(self.metrics_file_path).unlink(missing_ok=True)

    def write(self, row: dict[str, Any]) -> None:
        new = not Path(self.metrics_file_path).exists()
        with open(self.metrics_file_path, "a", newline="") as out:
            writer = csv.DictWriter(out, fieldnames=["loss", "step"])
            if new:
                writer.writeheader()
            writer.writerow(row)


def logged(path: Path) -> list[tuple[str, str]]:
    with open(path, newline="") as file:
        return [(row["loss"], row["step"]) for row in csv.DictReader(file)]


def rows_in(logger: CSVLogger, leads: Callable[[], bool]) -> LoggerRows:
    """As the strategy of a Trainer that has this logger."""
    found = rows_of(logger, leads)
    assert isinstance(found, CsvRows)
    return found


@pytest.mark.parametrize("first", [20, 300])
@pytest.mark.parametrize("newcomer", [False, True])
def test_two_trainers_with_one_logger_write_into_one_file_also_under_the_next_leader(
    tmp_path: Path, newcomer: bool, first: int
) -> None:
    """first: rows of the first fit(). newcomer: a worker that has missed that one joins in the second, and leads."""
    path = tmp_path / "metrics.csv"
    logger = CSVLogger(path)
    rows_in(logger, lambda: True)
    for step in range(first):
        logger.log_metrics({"loss": -1.0}, step)
    rows = rows_in(logger, lambda: True)
    for step in range(30):
        logger.log_metrics({"loss": 1.0}, step)
    wanted = logged(path)
    assert len(wanted) == first + 30
    if newcomer:
        other = CSVLogger(path)
        rows_in(other, lambda: False)
        rows, before = rows_in(other, lambda: False), rows
        rows.load_state_dict(before.state_dict())
    rows.led = False
    rows.lead()
    assert logged(path) == wanted
