"""Has a handler of its own for SIGTERM, and a process that fetches its batches."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch

import elastic
from tests.live.scripts import gates

told = Path(os.environ["LIVE_GATES"])
job = elastic.join(seed=3)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
job.register(model=model, optimizer=optimizer)


def on_sigterm(number: int, frame: object) -> None:
    with (told / f"sigterm.{job.worker_id}").open("a") as file:
        file.write(f"{signal.Signals(number).name}\n")


signal.signal(signal.SIGTERM, on_sigterm)
assert signal.getsignal(signal.SIGTERM) is on_sigterm
samples = torch.utils.data.TensorDataset(torch.randn(320, 4, generator=torch.Generator().manual_seed(5)))
train = job.loader(samples, batch_size=8, shards=4, shuffle=True, workers=1)
for _ in job.epochs(10):
    for step in job.steps(train):
        for (x,) in step:
            gates.hold("shard")
            gates.pace()
            (model(x).square().mean() + torch.rand(()) * model(x).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
