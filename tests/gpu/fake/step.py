"""What one step asks of the GPU, counted on the fake device.

    python step.py plain LAYERS NORMED        a loop without any distribution
    python step.py ddp LAYERS NORMED          DistributedDataParallel over NCCL, in a world of one
    elastic run --workers 1 step.py elastic LAYERS NORMED

NORMED: how many of the layers have a BatchNorm's buffers. Prints a JSON object: what was counted in the fifth step.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.gpu.fake.device import FakeDevice

SHARDS, COUNTED, STEPS = 4, 4, 6
WHAT = ("launches", "waits", "stream_waits", "events", "streams", "copies", "host_allocations", "allocations")


class Layer(nn.Module):
    """A layer without a product of matrices, for which the fake device has no library."""

    def __init__(self, normed: bool) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(64)), nn.Parameter(torch.zeros(64))
        self.norm = nn.BatchNorm1d(64) if normed else None

    def forward(self, x: Tensor) -> Tensor:
        if self.norm is not None:
            with torch.no_grad():  # as a BatchNorm does, whose kernels are those of a library
                assert self.norm.running_mean is not None and self.norm.num_batches_tracked is not None
                self.norm.running_mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
                self.norm.num_batches_tracked.add_(1)
        return x * self.weight + self.bias


class Counts:
    """Of the device in one step."""

    def __init__(self) -> None:
        self._device = FakeDevice.of_this_process()
        self._before: dict[str, int] = {}

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        before = {name: self._device.count(name) for name in WHAT}
        yield
        if number == COUNTED:
            print(json.dumps({name: self._device.count(name) - before[name] for name in WHAT}), flush=True)


def made(layers: int, normed: int, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(Layer(number < normed) for number in range(layers))).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)


def plainly(way: str, layers: int, normed: int) -> None:
    model, optimizer = made(layers, normed, torch.device("cuda", 0))
    if way == "ddp":
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0", "WORLD_SIZE": "1"}
        dist.init_process_group("nccl")
        model = nn.parallel.DistributedDataParallel(model)
    counts = Counts()
    data = torch.ones(SHARDS, 8, 64).pin_memory()
    for number in range(STEPS):
        with counts.step(number):
            for part in range(SHARDS):
                last = part == SHARDS - 1 or way == "plain"
                with contextlib.nullcontext() if last else model.no_sync():  # type: ignore[operator]
                    loss: Any = (model(data[part].cuda(non_blocking=True)) / SHARDS).sum()
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def elastically(layers: int, normed: int) -> None:
    import elastic

    job = elastic.join(seed=1)
    model, optimizer = made(layers, normed, job.device)
    data = job.loader(torch.utils.data.TensorDataset(torch.ones(SHARDS * 8, 64)), 8 * SHARDS, shards=SHARDS)
    buffers = [f"model.{name}" for name, value in model.named_buffers() if value.is_floating_point()]
    job.register(model=model, optimizer=optimizer)
    counts, steps = Counts(), job.steps(data, total=STEPS)
    for number in range(STEPS):
        with counts.step(number):
            step = next(steps)
            for (part,) in step:
                loss: Any = model(part).sum()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for _ in steps:
        raise AssertionError("one step too many")


way, layers, normed = sys.argv[1], *map(int, sys.argv[2:4])
elastically(layers, normed) if way == "elastic" else plainly(way, layers, normed)
