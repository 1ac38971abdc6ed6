"""When periodic checkpoints are taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.checkpoints.settings import Settings
from runtime.recovery.checkpoint import coordinator
from runtime.recovery.checkpoint.saver import Saver, SaverTask
from tests.unit.jobs import Recorded, make_job, set_up, train


@pytest.mark.parametrize(
    ("busy", "steps"), [((), [10, 20]), ((10,), [12, 20]), ((10, 11, 12), [14, 20]), ((20,), [10, 22])]
)
def test_a_checkpoint_that_was_left_out_is_taken_once_the_one_before_is_written(
    busy: tuple[int, ...], steps: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """busy: steps before which that is still being written. An interval later would be too late."""
    session, taken = Recorded(), list[int]()

    class Slow(Saver):
        own = 0

        def put(self, task: SaverTask) -> None:
            taken.append(task.moment.step)
            super().put(task)

        @property
        def pending(self) -> int:
            return self.own + (len(session.records) in busy)

        @pending.setter
        def pending(self, value: int) -> None:
            self.own = value

    monkeypatch.setattr(coordinator, "Saver", Slow)
    train(set_up(make_job(session, checkpoints=Settings(root=str(tmp_path), every="10 steps"))), epochs=9)
    assert len(session.records) == 27
    assert taken == steps
