"""What the next leader hides of the files of a dead one, and writes again: each row is shown once, in its order."""

from __future__ import annotations

import random

import pytest

from runtime.frontends.frameworks.trackers import rows as tracker_rows
from runtime.frontends.frameworks.trackers.rows import KeptRows, Row, rewrite


class Files:
    """The points of one directory, as TensorBoard shows them."""

    def __init__(self) -> None:
        self.points: list[Row] = []

    def purge(self, step: int) -> None:
        self.points = [point for point in self.points if point[0] < step]


def takes_over(files: Files, kept: KeptRows) -> None:
    again = kept.rewrite()
    files.purge(again.purge_step)
    files.points += again.rows


@pytest.mark.parametrize("seed", range(40))
def test_each_row_is_shown_once_whoever_dies_where(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaders die with some of their last rows unwritten, or written before the next one has come to them. Steps grow,
    with several rows a step."""
    monkeypatch.setattr(tracker_rows, "ROWS_KEPT", 12)
    draws = random.Random(seed)
    steps = sorted(draws.choices(range(1, 40), k=60))
    rows: list[Row] = [(step, {"loss": number / 7}) for number, step in enumerate(steps)]
    files, written, kept = Files(), 0, KeptRows()
    for number in range(0, 60, 6):  # of each leader
        while kept.count < number:
            kept.add(*rows[kept.count])
        if number:
            takes_over(files, kept)
            written = kept.count
        dies_at = number + 6 + draws.randint(-3, 3) if number < 54 else 60
        while written < dies_at:
            files.points.append(rows[written])
            written += 1
    assert files.points == rows


def test_rows_of_another_order_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one kind of row, and epochs of another one: to hide the last rows would hide others, too."""
    monkeypatch.setattr(tracker_rows, "ROWS_KEPT", 3)
    kept = KeptRows()
    for step, row in ((100, {"loss": 1.0}), (1, {"accuracy": 0.5}), (200, {"loss": 0.9}), (2, {"accuracy": 0.6})):
        kept.add(step, row)
    assert kept.rewrite() == (201, ())
    kept.add(300, {"loss": 0.8})
    assert kept.rewrite() == (300, [(300, {"loss": 0.8})])


def test_step_0_is_left_alone() -> None:
    """A logger's hyperparameters have no step, so step 0."""
    assert rewrite([(0, {"loss": 1.0}), (0, {"loss": 0.9})]) == (1, ())
    assert rewrite([(0, {"loss": 1.0}), (1, {"loss": 0.9})]) == (1, [(1, {"loss": 0.9})])
    assert rewrite([]) == (1, ())
    assert rewrite([], before=7) == (8, ())


def test_a_newcomer_has_the_rows_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_rows, "ROWS_KEPT", 2)
    kept, newcomer = KeptRows(), KeptRows()
    for step in (5, 1, 6, 7):
        kept.add(step, {"loss": float(step)})
    newcomer.load_state_dict(kept.state_dict())
    assert newcomer.count == 4 and newcomer.rewrite() == kept.rewrite() == (6, kept.rows)
    newcomer.load_state_dict({"count": 1, "recent": [{"loss": 1.0, "step": 3}]})  # of an older version
    assert newcomer.rewrite() == (3, [(3, {"loss": 1.0})])
