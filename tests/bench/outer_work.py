"""The training that `tests.bench.outer` measures: the GPT of docs/examples/train_gpt.py, by replicas that make
INNER_STEPS inner steps each and then an outer step.

BENCH_SEED: of the weights and samples. BENCH_PACE: a file with the least seconds of an inner step, which may change.
BENCH_STAMPS: the directory for what is written down.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from docs.examples.train_gpt import GPT, Windows, stdlib_bytes

REPLICAS = 3
INNER_STEPS = 20
SEQUENCES = 4
"""Of CONTEXT bytes in an inner step of a replica."""
CONTEXT, DIM, LAYERS, HEADS = 64, 64, 2, 4
INNER_LR, OUTER_LR, MOMENTUM, CLIP = 1e-3, 0.7, 0.9, 1.0
HELD_OUT = 512
"""Windows of the text that a model is judged by."""
MARK_ROUNDS = 25
"""After so many rounds each it is."""


def build() -> tuple[GPT, torch.optim.Optimizer, torch.optim.Optimizer]:
    """The model, the inner and the outer optimizer."""
    model = GPT(DIM, LAYERS, HEADS, CONTEXT)
    inner = torch.optim.AdamW(model.parameters(), lr=INNER_LR)
    return model, inner, torch.optim.SGD(model.parameters(), lr=OUTER_LR, momentum=MOMENTUM, nesterov=True)


def texts() -> tuple[Windows, Windows]:
    """To train on, and to judge by."""
    text, held_out = stdlib_bytes()
    return Windows(text, CONTEXT), Windows(held_out, CONTEXT, limit=HELD_OUT)


def loss_of(model: torch.nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """x, y: int64 (B, CONTEXT). Mean over all bytes."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def backward(model: torch.nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss; the model has its clipped gradients."""
    loss = loss_of(model, x, y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    return loss


class Pace:
    """Makes each inner step take as long as BENCH_PACE says, at least: so few cores can carry several replicas."""

    def __init__(self) -> None:
        self._path = Path(os.environ["BENCH_PACE"])
        self._since_s = time.monotonic()

    def begin(self) -> None:
        self._since_s = time.monotonic()

    def wait(self) -> None:
        left_s = self._since_s + float(self._path.read_text()) - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)


@dataclass(frozen=True, slots=True)
class Mark:
    """Of a job after so many rounds, as one worker saw it. loss: held-out, of the outer parameters."""

    rounds: int
    loss: float
    digest: str

    def write(self, worker_id: str) -> None:
        path = Path(os.environ["BENCH_STAMPS"]) / f"{worker_id}-{self.rounds}.mark"
        path.with_suffix(".tmp").write_text(json.dumps(asdict(self)))
        path.with_suffix(".tmp").rename(path)


def marks(directory: Path) -> dict[int, list[Mark]]:
    """After how many rounds -> one of each worker that wrote it down, in order."""
    found: dict[int, list[Mark]] = {}
    for path in directory.glob("*.mark"):
        mark = Mark(**json.loads(path.read_text()))
        found.setdefault(mark.rounds, []).append(mark)
    return dict(sorted(found.items()))
