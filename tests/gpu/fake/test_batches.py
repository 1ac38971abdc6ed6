"""Processes that fetch batches are forked from a process that uses a GPU, and so they cannot use it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from runtime.data.prefetcher import Wanted
from runtime.frontends.frameworks.rank_batches import RankBatches
from tests.gpu.fake.device import FakeDevice

DATA = TensorDataset(torch.arange(12))
RANKS, EPOCHS = 2, 3


def drawn(processes: int) -> list[list[int]]:
    """The samples of all batches. The order of an epoch is drawn in the process that fetches its first batch."""
    torch.zeros(1, device="cuda")
    sampler: DistributedSampler[Any] = DistributedSampler(DATA, RANKS, 0)
    loader: DataLoader[Any] = DataLoader(DATA, 3, sampler=sampler, num_workers=processes)
    source = RankBatches(loader, RANKS, 1, 7)
    try:
        return [
            source.batch(Wanted(epoch, step, 0, rank), tuple(range(RANKS)))[0][0].tolist()
            for epoch in range(EPOCHS)
            for step in range(len(source))
            for rank in range(RANKS)
        ]
    finally:
        source.close()


def test_the_order_of_an_epoch_is_drawn_without_the_gpu_in_a_process_that_fetches(device: FakeDevice) -> None:
    found = device.call(drawn, 1)
    assert found == device.call(drawn, 0)
    first = found[: len(found) // EPOCHS]
    assert sorted(sample for batch in first for sample in batch) == list(range(len(DATA)))
