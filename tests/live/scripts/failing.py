"""A tiny training script that ends its workers again and again; the first argument says what is the cause."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

import torch

import elastic
from tests.live.scripts import gates

what = sys.argv[1]
BAD = 17
"""The sample that no worker survives."""


class Samples(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, sample: int) -> Any:
        if sample == BAD and what == "a sample that crashes its decoder":
            ctypes.string_at(0)
        if sample == BAD and what == "a sample that cannot be decoded":
            raise ValueError(f"sample {sample} is no image")
        return torch.full((4,), float(sample))


job = elastic.join()
if what == "a node whose data are gone" and job.restarted and job.worker_id.startswith("b."):
    raise RuntimeError("no such file")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
train = job.loader(Samples(), batch_size=16, shards=4, shuffle=True)
job.register(model=model, optimizer=optimizer)
for _ in job.epochs(100 if what == "a node whose data are gone" else 5):
    for step in job.steps(train):
        for x in step:
            gates.pace()
            if what == "a first step that no worker survives":
                os._exit(3)
            if what == "a mistake in a step" and step.index == 5:
                weights = dict[str, float]()["weights"]
            if what == "a shard that is too large" and step.index == 5 and step.shard.index == 1:
                torch.ones(1 << 30)
            loss = model(x).square().mean()
            loss.backward()
            step.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
