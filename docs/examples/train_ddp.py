"""A script for torchrun, as anybody would write it; it knows nothing of elastic-ring.

    torchrun --nproc-per-node=4 docs/examples/train_ddp.py
    elastic run --workers 3 --ranks 4 docs/examples/train_ddp.py

Kill any worker of the second one: it trains on, and ends with the bits of the run in which nobody died.
"""

import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def spirals(points: int) -> TensorDataset:
    """Points of two spirals, and which one each belongs to."""
    generator = torch.Generator().manual_seed(0)
    label = torch.arange(points) % 2
    angle = torch.rand(points, generator=generator) * 9
    radius = angle / 9 * (1 - 2 * label)
    x = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return TensorDataset(x + 0.02 * torch.randn(points, 2, generator=generator), label)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--log-every", type=int, default=10, help="steps")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step, to watch it")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = DDP(nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = spirals(4096)
    sampler = DistributedSampler(data, num_replicas=world, rank=rank)
    loader = DataLoader(data, batch_size=64, sampler=sampler)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs * len(loader))

    step = 0
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            if step % options.log_every == 0:
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                if rank == 0:
                    print(f"epoch {epoch} step {step} loss {mean.item() / world:.7f}", flush=True)
            step += 1
            time.sleep(options.pause)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
