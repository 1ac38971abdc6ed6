"""Every shard has two backward passes, so a gradient is there before it is complete."""

import torch
from torch import nn

import elastic

job = elastic.join(seed=5)
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), 0.01)
job.register(model=model, optimizer=optimizer)
for step in job.steps(shards=8, total=12):
    for shard in step:
        x = torch.randn(4, 6, generator=shard.generator)
        for half in x.split(2):
            model(half).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
job.print(f"digest {job.digest()}")
