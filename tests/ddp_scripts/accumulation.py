"""Accumulation under no_sync(), bfloat16, a GradScaler, a LambdaLR, an all_reduce behind each step, an evaluation."""

import os
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EVERY = 3


def main(epochs=2):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    x = torch.randn(240, 16)
    data = TensorDataset(x, (x[:, :4].sum(1) > 0).long())
    model = DDP(nn.Sequential(nn.Linear(16, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=True)
    loader = DataLoader(data, batch_size=5, sampler=sampler, drop_last=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    best, updates = 0.0, 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        for i, (bx, by) in enumerate(loader):
            last = (i + 1) % EVERY == 0
            with nullcontext() if last else model.no_sync():
                bx = bx + 0.1 * torch.randn_like(bx)
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = F.cross_entropy(model(bx), by) / EVERY
                scaler.scale(loss).backward()
            if last:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                optimizer.zero_grad()
                updates += 1
                seen = torch.tensor([loss.item()])
                dist.all_reduce(seen)
            time.sleep(float(os.environ.get("NAP", "0")))
        model.eval()
        with torch.no_grad():
            right = torch.tensor([float((model(x).argmax(1) == data.tensors[1]).sum())])
        dist.all_reduce(right)
        best = max(best, right.item() / world / len(data))
        if rank == 0:
            print(f"epoch {epoch}: {updates} updates, best {best:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
