"""Output and files of silent turns: what is heard and what is there all the same."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from runtime.frontends.ddp.rank_script import RankScript
from tests.unit.runtime.frontends.ddp import threads


@pytest.fixture(autouse=True)
def seams() -> Iterator[None]:
    with threads.seams():
        yield


def steps() -> Iterator[int]:
    """Trains; gives the number of the step behind optimizer.step() in each turn. With one worker and 4 ranks, three
    turns of four are silent."""
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(24, 3), torch.randn(24, 1))
    model = DDP(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (x, y) in enumerate(DataLoader(data, batch_size=2, sampler=DistributedSampler(data))):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        yield step


def test_an_error_that_the_script_handles_in_a_silent_turn_is_heard(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def main() -> None:
        try:
            for _step in steps():
                raise ValueError("a bad value")
        except ValueError as error:
            logging.getLogger("train").warning("stopped by %s", error)
            print(f"training failed: {error}", file=sys.stderr)
            sys.exit(3)

    with pytest.raises(SystemExit, match="3"):
        threads.alone(main)
    assert capsys.readouterr().err == "training failed: a bad value\n"
    assert caplog.messages == ["stopped by a bad value"]


def test_a_record_of_an_error_is_heard_in_each_turn(caplog: pytest.LogCaptureFixture) -> None:
    """Also where no exception is in progress any more; it may say what is wrong with one rank's batch."""

    def main() -> None:
        for _step in steps():
            logging.getLogger("train").warning("a warning")
            logging.getLogger("train").error("an error")

    threads.alone(main)
    assert caplog.messages.count("a warning") == 3
    assert caplog.messages.count("an error") == 12


def replace(source: Path, target: Path) -> None:
    os.replace(source, target)


def rename(source: Path, target: Path) -> None:
    os.rename(dst=target, src=source)


def move(source: Path, target: Path) -> None:
    shutil.move(source, target)


def copy_and_remove(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    os.remove(path=source)


@pytest.mark.parametrize("handle", [replace, rename, move, copy_and_remove])
def test_a_file_that_the_last_turn_has_put_in_place_can_be_copied(
    handle: Callable[[Path, Path], object], tmp_path: Path
) -> None:
    """The script asks once whether it is rank 0, so that each turn saves, and only the last one of a step does it."""
    new, last, best = tmp_path / "new.pt", tmp_path / "last.pt", tmp_path / "best.pt"

    def main() -> None:
        for step in steps():
            torch.save({"step": step}, new)
            handle(new, last)
        shutil.copy(last, best)

    threads.alone(main)
    assert torch.load(best) == {"step": 2}
    assert not new.exists()


def test_a_file_may_be_copied_into_a_directory(tmp_path: Path) -> None:
    """Only that file is not there in a silent turn, and the directory is."""
    last, kept, whole = tmp_path / "last.pt", tmp_path / "kept", tmp_path / "whole"
    kept.mkdir()

    def main() -> None:
        for step in steps():
            torch.save({"step": step}, last)
            shutil.copy(last, kept)
            shutil.copy(kept / "last.pt", tmp_path / "best.pt")
        os.rename(kept, whole)

    threads.alone(main)
    assert torch.load(tmp_path / "best.pt") == {"step": 2}
    assert torch.load(whole / "last.pt") == {"step": 2}


def test_a_file_by_hand_under_the_name_of_one_that_was_renamed_in_a_silent_turn_is_there(tmp_path: Path) -> None:
    new, best = tmp_path / "new", tmp_path / "best"

    def main() -> None:
        for step in steps():
            if RankScript.running().silent:
                torch.save({"step": step}, new)
                os.replace(new, tmp_path / "last")
        new.write_text("by hand")
        os.replace(new, best)

    threads.alone(main)
    assert best.read_text() == "by hand"
