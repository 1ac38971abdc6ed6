"""Where a worker enters the epochs of a Trainer; transformers itself is tried in tests/frameworks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic.errors import LeftPass
from runtime.frontends.frameworks.hugging_face import TrainerLoop


def entered(loop_epoch: int, stops: bool) -> tuple[Any, list[int]]:
    """A worker that came later, and the epochs that its trainer has run."""
    own: Any = object.__new__(TrainerLoop)
    ran: list[int] = []
    own._trainer = SimpleNamespace(
        control=SimpleNamespace(should_training_stop=stops),
        args=SimpleNamespace(gradient_accumulation_steps=1, ignore_data_skip=True),
    )
    own._loop = SimpleNamespace(entered=True, epoch=loop_epoch, position=2, enter=lambda closure: None)
    own._found, own._put_back = {}, lambda strict: None

    def run_epoch(epoch: int, **about: Any) -> None:
        assert not own._trainer.args.ignore_data_skip, "Trainer would begin with the first batch"
        assert about["steps_trained_in_current_epoch"] == 2
        ran.append(epoch)

    own._own = {"_run_epoch": run_epoch}
    return own, ran


@pytest.mark.parametrize(
    ("loop_epoch", "stops", "still", "runs"),
    [(0, False, False, [0]), (1, False, True, []), (1, True, False, [])],
)
def test_a_worker_has_entered_when_its_epoch_comes_or_none_follows(
    loop_epoch: int, stops: bool, still: bool, runs: list[int]
) -> None:
    own, ran = entered(loop_epoch, stops)
    own._run_epoch(epoch=0, model=None)
    assert ran == runs
    assert own._loop.entered is still
    assert (own._found is not None) is still
    assert own._trainer.args.ignore_data_skip


def test_a_step_without_a_batch_is_no_step() -> None:
    own: Any = object.__new__(TrainerLoop)
    own._trainer, own._loop = SimpleNamespace(), SimpleNamespace(position=2, rehearsing=False)
    step: Any = None
    with pytest.raises(LeftPass, match="asks for step 3 of an epoch, which has no batch"):
        own._shard(None, [], step)
