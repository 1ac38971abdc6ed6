"""Epochs of one quick step, and a first batch that takes a while: a newcomer gets ready when its epoch is over."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

import elastic
from tests.live.scripts import gates

WARM_UP_S = 0.5
END = Path(os.environ["LIVE_GATES"]) / "end"

job = elastic.join(seed=5)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
job.register(model=model, optimizer=optimizer)
data = torch.utils.data.TensorDataset(torch.randn(8, 4, generator=torch.Generator().manual_seed(1)))
train = job.loader(data, batch_size=8, shards=2)
cold = True
for _epoch in job.epochs(1_000_000):
    for step in job.steps(train):
        for (x,) in step:
            if cold:
                time.sleep(WARM_UP_S)
                cold = False
            gates.pace()
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if not END.exists():
        job.stop("the test has seen enough")
