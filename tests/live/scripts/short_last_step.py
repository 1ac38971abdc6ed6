"""A script for torchrun that accumulates two batches, of 7: the last step has one. There it waits for a file `last`."""

import os
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(3, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(14, 3, generator=torch.Generator().manual_seed(0)))
loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, num_replicas=1, rank=0, shuffle=False))
for number, (x,) in enumerate(loader):
    adds_up = number % 2 == 0 and number + 1 < len(loader)
    with model.no_sync() if adds_up else nullcontext():
        loss = model(x).square().mean()
        while number == 6 and not (Path(os.environ["LIVE_GATES"]) / "last").exists():
            time.sleep(0.02)
        loss.backward()
    if not adds_up:
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
