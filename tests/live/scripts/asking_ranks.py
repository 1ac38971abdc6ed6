"""A script for torchrun that asks for each batch whether this worker's node has to go (asks.py)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from tests.live.scripts import gates
from tests.live.scripts.asks import ask

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(4096, 4, generator=torch.Generator().manual_seed(7)))
sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
for epoch in range(1000):
    sampler.set_epoch(epoch)
    for (x,) in DataLoader(data, batch_size=4, sampler=sampler):
        ask()
        gates.pace()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
