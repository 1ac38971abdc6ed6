"""Random numbers drawn once an epoch, before the inner loop and used behind it, and behind the steps. Before the inner
loop the model is evaluated too, and that is logged."""

from __future__ import annotations

import random

import torch

import elastic
from tests.live.scripts import gates

STEPS = 100
SLOW = 40
"""After this step each takes longer than the one before, twelve minutes in all, until the gate `end` is open."""

DATA = torch.ones(4, 4)
job = elastic.join(seed=5)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
job.register(model=model, optimizer=optimizer)
job.state.setdefault(drawn=0.0)
for _epoch in job.epochs(2):
    shift = torch.randn(4)
    for step in job.steps(shards=4, total=STEPS):
        scale = job.once(lambda drawn: drawn, random.random())
        job.state.drawn += scale
        job.log(**job.evaluate(lambda x: {"score": model(x).mean()}, DATA, batch_size=2))
        for _shard in step:
            gates.pace()
            gates.hold("shard")
            loss = model(torch.randn(3, 4) + shift).square().mean()
            loss.backward()
            step.log(loss=loss)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(scale)
        optimizer.step()
        optimizer.zero_grad()
        gates.slow("end", 0.01 * max(0, step.index - SLOW) ** 2)
    with torch.no_grad():
        model.weight.add_(torch.randn(1, 4), alpha=0.01)
job.print("digest", job.digest())
