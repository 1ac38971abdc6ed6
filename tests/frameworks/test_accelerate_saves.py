"""Directories that accelerate numbers by itself, in a job of one worker that has all ranks, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from runtime.frontends.frameworks import accelerate as our_accelerate
from tests.frameworks.in_process import adapted, forget
from tests.unit.runtime.frontends.ddp import threads

accelerate = pytest.importorskip("accelerate", reason="frameworks are installed by `make test-frameworks`")
STEPS = 3


@pytest.fixture(autouse=True)
def in_place() -> Iterator[None]:
    with adapted():
        yield


def saved_in_each_step(home: Path, rate: float = 0.1) -> dict[str, Any]:
    """Name of each directory -> the weights that are in it."""

    def main() -> None:
        forget(accelerate)
        settings = accelerate.utils.ProjectConfiguration(project_dir=str(home), automatic_checkpoint_naming=True)
        accelerator = accelerate.Accelerator(cpu=True, project_config=settings)
        model = nn.Linear(3, 1)
        data = DataLoader(TensorDataset(torch.randn(24, 3)), batch_size=2)
        model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=rate), data)
        for (x,) in data:
            accelerator.backward(model(x).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            accelerator.save_state(safe_serialization=False)

    threads.alone(main)
    return {
        path.name: torch.load(path / "pytorch_model.bin")["weight"] for path in sorted((home / "checkpoints").iterdir())
    }


def test_a_step_that_is_done_again_saves_its_state_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved_in_each_step(tmp_path)
    assert list(before) == [f"checkpoint_{number}" for number in range(STEPS)]
    (tmp_path / "checkpoints" / "checkpoint_1" / "of a step that was lost").touch()
    with pytest.raises(ValueError, match=r"checkpoint_0 .0. already exists"):  # of another job
        saved_in_each_step(tmp_path)
    monkeypatch.setattr(our_accelerate, "comes_later", lambda script: True)
    again = saved_in_each_step(tmp_path, rate=0.2)
    assert list(again) == list(before)
    assert [torch.equal(again[name], before[name]) for name in before] == STEPS * [False]
    assert not (tmp_path / "checkpoints" / "checkpoint_1" / "of a step that was lost").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
