"""The file of CSVLogger: the next leader goes on with the rows that were logged, no more and no less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runtime.frontends.frameworks.lightning.state import CsvRows
from runtime.frontends.frameworks.trackers import rows as tracker_rows

INSTALLED = "frameworks are installed by `make test-frameworks`"
loggers = pytest.importorskip("lightning.pytorch.loggers", reason=INSTALLED)
rank_zero_only = pytest.importorskip("lightning_utilities.core.rank_zero", reason=INSTALLED).rank_zero_only


class Worker:
    """One of two, that log the same rows."""

    def __init__(self, home: Path) -> None:
        self.logger = loggers.CSVLogger(home, name=None, version="")
        self.leads = False
        self.rows = CsvRows(self.logger, self._asked)

    def _asked(self) -> bool:
        if self.leads:
            self.rows.lead()
        return self.leads

    def log(self, step: int, **values: float) -> None:
        rank_zero_only.rank = 0 if self.leads else 1
        self.logger.log_metrics(values, step)
        self.logger.save()


@pytest.fixture(autouse=True)
def rank() -> Any:
    before = rank_zero_only.rank
    yield
    rank_zero_only.rank = before


def text(home: Path) -> str:
    return (home / "metrics.csv").read_text()


def wanted(home: Path, steps: int) -> str:
    alone = Worker(home / "alone")
    alone.leads = True
    for step in range(steps):
        alone.log(step, **values(step))
    return text(home / "alone")


def values(step: int) -> dict[str, float]:
    return {"loss": 1 / (step + 3)} if step % 2 else {"accuracy": step / 7}


@pytest.mark.parametrize("written", [0, 2, 4, 5])
@pytest.mark.parametrize("kept", [256, 3])
def test_a_leader_that_dies_leaves_no_trace(
    written: int, kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """written: rows that are in the file when the others have logged four."""
    monkeypatch.setattr(tracker_rows, "ROWS_KEPT", kept)
    first, second = Worker(tmp_path), Worker(tmp_path)
    first.leads = True
    for step in range(written):
        first.log(step, **values(step))
    for step in range(4):
        second.log(step, **values(step))
    second.leads = True
    for step in range(4, 8):
        second.log(step, **values(step))
    if written == 0 and kept == 3:  # more is lost than a leader can be behind
        assert text(tmp_path).count("\n") == 1 + 7
    else:
        assert text(tmp_path) == wanted(tmp_path, 8)


def test_a_newcomer_that_leads_has_the_rows_of_before(tmp_path: Path) -> None:
    first, newcomer = Worker(tmp_path), Worker(tmp_path)
    first.leads = True
    for step in range(3):
        first.log(step, **values(step))
    newcomer.rows.load_state_dict(first.rows.state_dict())
    newcomer.leads = True
    newcomer.log(3, **values(3))
    assert text(tmp_path) == wanted(tmp_path, 4)
