"""A model with dropout, batch norm and moments, trained until the gate `end` is there; the test flips bits of it."""

from __future__ import annotations

import os
from pathlib import Path

import torch

import elastic

STEPS = int(os.environ.get("STEPS", "1000000"))
job = elastic.join(seed=0)
layers = (torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(256, 8))
train = job.loader(data, batch_size=32, shards=8, shuffle=True)
job.register(model=model, optimizer=optimizer)
end = Path(os.environ.get("LIVE_GATES", ".")) / "end"
for _ in job.epochs(STEPS):
    for step in job.steps(train):
        for (x,) in step:
            loss = model(x).square().mean()
            loss.backward()
            step.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        if end.exists() or step.index == STEPS - 1:
            job.stop("the test is over")
job.print("digest", job.digest())
