"""The training that every contender does: the same model, optimizer and micro-batches, from the same seed.

BENCH_MODEL says which: "mlp" (10.0 million parameters in 8 tensors) or "transformer" (3.4 million in 53). A step is
BENCH_SHARDS micro-batches (shards). Batches are slices of tensors in memory, so that no data loader is measured.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SHARDS = int(os.environ.get("BENCH_SHARDS", "8"))
MODEL = os.environ.get("BENCH_MODEL", "mlp")
INPUTS, WIDTH, CLASSES = 784, 2048, 10
VOCABULARY, DIMENSION, LENGTH = 1024, 256, 32
SAMPLES = 4096
SEED = 11
MICRO_BATCH = int(os.environ.get("BENCH_MICRO_BATCH", "32"))
SEQUENCES = 4
"""Of LENGTH tokens in a micro-batch of the transformer."""


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """float32, on the CPU. Plain SGD with momentum: the cheapest optimizer step hides the least."""
    torch.manual_seed(SEED)
    model = Transformer() if MODEL == "transformer" else mlp()
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def mlp() -> nn.Module:
    """(B, INPUTS) float32 to (B, CLASSES)."""
    return nn.Sequential(
        nn.Linear(INPUTS, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, CLASSES),
    )


class Transformer(nn.Module):
    """(B, LENGTH) int64 tokens to (B, CLASSES). Without dropout, whose random numbers would differ between workers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIMENSION)
        layer = nn.TransformerEncoderLayer(DIMENSION, 4, 4 * DIMENSION, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(DIMENSION, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.embed(tokens)).mean(1))
        return logits


class Batches:
    """inputs: float32 (SAMPLES, INPUTS), or int64 (SAMPLES, LENGTH) tokens; labels: int64 (SAMPLES,)."""

    def __init__(self) -> None:
        made = torch.Generator().manual_seed(SEED)
        if MODEL == "transformer":
            self._inputs = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=made)
            self._labels = self._inputs[:, 0] % CLASSES
        else:
            self._inputs = torch.randn(SAMPLES, INPUTS, generator=made)
            self._labels = self._inputs[:, :CLASSES].argmax(1)

    def take(self, step: int, shard: int) -> tuple[Tensor, Tensor]:
        size = SEQUENCES if MODEL == "transformer" else MICRO_BATCH
        first = ((step * SHARDS + shard) * size) % SAMPLES
        return self._inputs[first : first + size], self._labels[first : first + size]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)
