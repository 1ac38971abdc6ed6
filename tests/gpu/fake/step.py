"""What one step asks of the GPU, counted on the fake device.

    python step.py plain LAYERS               a loop without any distribution
    elastic run --workers 1 step.py elastic LAYERS

Each layer has two parameters, and a BatchNorm's buffers. Prints a JSON object: what was counted in the fifth step.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import elastic
from tests.gpu.fake.device import FakeDevice

SHARDS, COUNTED, STEPS = 4, 4, 6
WHAT = ("launches", "waits", "copies", "streams", "host_allocations", "allocations")


class Layer(nn.Module):
    """A layer without a product of matrices, for which the fake device has no library."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(64)), nn.Parameter(torch.zeros(64))
        self.norm = nn.BatchNorm1d(64, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():  # as a BatchNorm does, whose kernels are those of a library
            assert self.norm.running_mean is not None and self.norm.num_batches_tracked is not None
            self.norm.running_mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.norm.num_batches_tracked.add_(1)
        return x * self.weight + self.bias


class Counts:
    """Of the device in one step."""

    def __init__(self) -> None:
        self._device = FakeDevice.of_this_process()

    @contextlib.contextmanager
    def of(self, step: int) -> Iterator[None]:
        before = {name: self._device.count(name) for name in WHAT}
        yield
        if step == COUNTED:
            print(json.dumps({name: self._device.count(name) - before[name] for name in WHAT}), flush=True)


def made(layers: int, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(Layer() for _ in range(layers))).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)


def plainly(layers: int) -> None:
    model, optimizer = made(layers, torch.device("cuda", 0))
    counts, data = Counts(), torch.ones(SHARDS, 8, 64).pin_memory()
    for number in range(STEPS):
        with counts.of(number):
            for part in data:
                loss: Any = (model(part.cuda(non_blocking=True)) / SHARDS).sum()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def elastically(layers: int) -> None:
    job = elastic.join(seed=1)
    model, optimizer = made(layers, job.device)
    data = job.loader(torch.utils.data.TensorDataset(torch.ones(SHARDS * 8, 64)), SHARDS * 8, shards=SHARDS)
    job.register(model=model, optimizer=optimizer)
    counts, steps = Counts(), iter(job.steps(data, total=STEPS))
    for number in range(STEPS):
        with counts.of(number):
            for (part,) in next(steps):
                loss: Any = model(part).sum()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not list(steps)


way, layers = sys.argv[1], int(sys.argv[2])
if way == "elastic":
    elastically(layers)
else:
    plainly(layers)
    os._exit(0)  # the end of Python may meet threads of torch in the fake device
