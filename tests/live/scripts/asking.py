"""Asks in each shard of job.steps() whether this worker's node has to go (asks.py)."""

from __future__ import annotations

import torch

import elastic
from tests.live.scripts import gates
from tests.live.scripts.asks import ask

assert elastic.notice() is None, "this process has not joined a job yet"
job = elastic.join(seed=3)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
job.register(model=model, optimizer=optimizer)
ask()
for step in job.steps(shards=4, total=1_000_000):
    for _ in step:
        ask()
        gates.pace()
        model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if gates.shut("stop"):
        job.stop("the test has seen enough")
