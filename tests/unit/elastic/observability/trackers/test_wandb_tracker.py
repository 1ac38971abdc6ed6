"""With which step a new leader goes on in the files of an offline run; wandb is not needed for that."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.observability.trackers import wandb_tracker
from elastic.observability.trackers.wandb_files import Held
from elastic.observability.trackers.wandb_tracker import WandBTracker


def segment(directory: Path, time: str) -> Path:
    path = directory / "wandb" / f"offline-run-{time}-r1" / "run-r1.wandb"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    return path


def next_step(directory: Path) -> int:
    return WandBTracker("p", "r1", str(directory), offline=True, token="t")._next_on_file()


def test_a_clock_that_was_set_back_makes_no_step_come_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        segment(tmp_path, "20261025_025900"): Held([0, 1, 2], ended=True),
        segment(tmp_path, "20261025_020500"): Held([3, 4], ended=True),
        segment(tmp_path, "20261025_030000"): Held([], ended=True),
    }
    monkeypatch.setattr(wandb_tracker, "held", lambda path: files[path])
    assert next_step(tmp_path) == 5


def test_a_file_that_still_grows_is_waited_for_once_with_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, growing = segment(tmp_path, "20261025_020000"), segment(tmp_path, "20261025_030000")
    monkeypatch.setattr(
        wandb_tracker,
        "held",
        lambda path: (
            Held([0], ended=False) if path == left else Held([*range(1, 1 + path.stat().st_size)], ended=False)
        ),
    )
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) < 3:
            growing.write_bytes(growing.read_bytes() + b"x")

    monkeypatch.setattr("elastic.observability.trackers.wandb_tracker.time.sleep", sleep)
    assert next_step(tmp_path) == 3 and len(slept) == 3
    (tmp_path / "none").mkdir()
    assert next_step(tmp_path / "none") == 0
