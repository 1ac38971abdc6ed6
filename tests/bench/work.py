"""The training that every contender does: the same model, optimizer and micro-batches, from the same seed.

The model has 10.0 million parameters. A step is 8 micro-batches (shards). Batches are slices of tensors in memory,
so that no data loader is measured.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SHARDS = 8
INPUTS, WIDTH, CLASSES = 784, 2048, 10
SAMPLES = 4096
SEED = 11
MICRO_BATCH = int(os.environ.get("BENCH_MICRO_BATCH", "32"))


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """float32, on the CPU. Plain SGD with momentum: the cheapest optimizer step hides the least."""
    torch.manual_seed(SEED)
    model = nn.Sequential(
        nn.Linear(INPUTS, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, CLASSES),
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


class Batches:
    """inputs: float32 (SAMPLES, INPUTS); labels: int64 (SAMPLES,)."""

    def __init__(self) -> None:
        made = torch.Generator().manual_seed(SEED)
        self._inputs = torch.randn(SAMPLES, INPUTS, generator=made)
        self._labels = self._inputs[:, :CLASSES].argmax(1)

    def take(self, step: int, shard: int) -> tuple[Tensor, Tensor]:
        first = ((step * SHARDS + shard) * MICRO_BATCH) % SAMPLES
        return self._inputs[first : first + MICRO_BATCH], self._labels[first : first + MICRO_BATCH]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)
