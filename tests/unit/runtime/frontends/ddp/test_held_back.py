"""What a script says about an error is heard in silent turns, too."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.unit.runtime.frontends.ddp import threads


@pytest.fixture(autouse=True)
def seams() -> Iterator[None]:
    with threads.seams():
        yield


def silent_from_first_step() -> Iterator[int]:
    """Trains; gives the number of each turn behind its step. With one worker and 4 ranks, 0 to 2 are silent."""
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(24, 3), torch.randn(24, 1))
    model = DDP(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    turn = 0
    for x, y in DataLoader(data, batch_size=2, sampler=DistributedSampler(data)):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        yield turn
        turn += 1


def test_an_error_that_the_script_handles_in_a_silent_turn_is_heard(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def main() -> None:
        try:
            for _turn in silent_from_first_step():
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
        for _turn in silent_from_first_step():
            logging.getLogger("train").warning("a warning")
            logging.getLogger("train").error("an error")

    threads.alone(main)
    assert caplog.messages.count("a warning") == 3
    assert caplog.messages.count("an error") == 12
