"""The sessions of `elastic doctor --ranks`: scripts end with the bits of one worker with all ranks, and with others if
they keep what no newcomer gets."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from elastic.agent.worker.examination import Examination
from runtime.worker.recorded_join import Backwards, Recording, Succeeding
from tests.unit.jobs import Recorded
from tests.unit.runtime.frontends.ddp import threads
from tests.unit.runtime.frontends.ddp.test_worlds import main_of
from tests.unit.runtime.frontends.ddp.threads import Main

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def seams() -> Iterator[None]:
    with threads.seams():
        yield


def entered(main: Main, tmp_path: Path, at: int) -> tuple[str, str]:
    """Digests: of one worker with all ranks, and of a newcomer that enters it in that step and is rank 0 later."""
    path = tmp_path / "recording"
    plain = threads.run(Recording(path, at, CPU), main)
    return plain, threads.run(Succeeding(path, CPU), main)


@pytest.mark.parametrize(
    ("script", "at"), [("plain", 4), ("accumulation", 2), ("early", 4), ("endless", 4), ("evaluated", 3)]
)
def test_a_newcomer_that_becomes_rank_0_has_the_bits_of_the_member(script: str, at: int, tmp_path: Path) -> None:
    """`accumulation` calls all_reduce behind each step, `early` after each epoch, of an evaluation."""
    plain, joined = entered(main_of(script), tmp_path, at)
    assert joined == plain


@pytest.mark.parametrize("script", ["plain", "accumulation", "endless", "evaluated"])
def test_the_order_of_the_turns_changes_no_bit(script: str) -> None:
    main = main_of(script)
    assert threads.run(Backwards(CPU), main) == threads.alone(main)[0]


def small(factor: str) -> Main:
    """A script whose loss has a factor that is kept in the process: a numpy array, or a tensor of many elements."""

    def main() -> None:
        dist.init_process_group("gloo")
        data = TensorDataset(torch.randn(48, 4), torch.randn(48, 1))
        model = DDP(nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
        array, center = np.ones(2), torch.ones(70)
        for _ in range(3):
            for x, y in loader:
                optimizer.zero_grad()
                kept = float(array[0]) if factor == "array" else center.mean().item()
                (F.mse_loss(model(x), y) * kept).backward()
                array += 0.1
                center += 0.1
                optimizer.step()
        dist.destroy_process_group()

    return main


def test_what_goes_on_from_turn_to_turn_differs_with_their_order() -> None:
    main = small("array")
    assert threads.run(Backwards(CPU), main) != threads.alone(main)[0]


def test_what_no_newcomer_gets_differs_in_a_newcomer(tmp_path: Path) -> None:
    main = small("center")
    assert threads.run(Backwards(CPU), main) == threads.alone(main)[0], "silent turns are undone"
    plain, joined = entered(main, tmp_path, 4)
    assert joined != plain


# Under examination


def examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, main: Main, *, whole: bool = False) -> list[int]:
    """The number of steps of each epoch."""
    for name, value in Examination(path=str(tmp_path / "lines"), steps=99, whole_epochs=whole).to_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("os._exit", lambda code: None)
    session = Recorded()
    threads.run(session, main)
    epochs = [record.epoch for record in session.records]
    return [epochs.count(epoch) for epoch in sorted(set(epochs))]


def test_epochs_of_a_for_loop_are_short_under_examination(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert examined(tmp_path, monkeypatch, main_of("plain")) == [3, 3]


def test_epochs_are_whole_if_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = examined(tmp_path, monkeypatch, main_of("plain"), whole=True)
    assert found == [7, 7]


def test_a_loop_that_calls_next_itself_has_whole_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may not expect an end before the last batch."""
    assert examined(tmp_path, monkeypatch, main_of("endless")) == [6, 5]


def test_no_file_is_saved_under_examination(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot of a few steps would be taken for a real one. The script gives it a name when it is written."""
    main = main_of("trainer")
    snapshot = tmp_path / "snapshot.pt"
    examined(tmp_path, monkeypatch, lambda: main(2, 1, str(snapshot)))  # type: ignore[call-arg]
    assert not snapshot.exists()


def test_other_files_are_handled_under_examination(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, best = tmp_path / "vocabulary.txt", tmp_path / "best.pt"
    plain.write_text("a b c")
    main = main_of("trainer")

    def script() -> None:
        shutil.copyfile(plain, tmp_path / "copy.txt")
        torch.save({}, tmp_path / "last.pt")
        shutil.copyfile(tmp_path / "last.pt", dst=best)
        os.remove(best)
        with pytest.raises(FileNotFoundError):
            os.remove(tmp_path / "other.pt")
        main()

    examined(tmp_path, monkeypatch, script)
    assert (tmp_path / "copy.txt").read_text() == "a b c"
    assert not best.exists()
