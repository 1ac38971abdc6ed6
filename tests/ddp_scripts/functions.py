"""A function for everything: the process group, the loader, an epoch, a mean over the ranks; samples in their order."""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def setup():
    dist.init_process_group("gloo")


def is_main():
    return dist.get_rank() == 0


def reduce_mean(value):
    value = value.detach().clone()
    dist.all_reduce(value, op=dist.ReduceOp.SUM)
    value /= dist.get_world_size()
    return value


def get_loader(dataset, batch_size):
    sampler = DistributedSampler(dataset, shuffle=False)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler, drop_last=True)


def train(model, loader, optimizer, epoch):
    model.train()
    total, right = 0.0, 0
    for i, (x, y) in enumerate(loader):
        scores = model(x)
        loss = F.cross_entropy(scores, y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean = reduce_mean(loss)
        total += mean.item()
        right += (scores.argmax(1) == y).sum().item()
        if is_main():
            print(f"epoch {epoch} step {i} loss {mean.item():.7f}", flush=True)
        time.sleep(float(os.environ.get("NAP", "0")))
    counts = torch.tensor([float(right), float(len(loader))])
    dist.all_reduce(counts)
    return total / len(loader), counts[0].item() / counts[1].item()


def main(epochs=2):
    setup()
    torch.manual_seed(4)
    x = torch.randn(320, 12)
    data = TensorDataset(x, (x[:, :3].sum(1) > 0).long())
    loader = get_loader(data, batch_size=8)
    net = nn.Sequential(nn.Linear(12, 20), nn.LayerNorm(20), nn.ReLU(), nn.Linear(20, 2))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    best, steps = float("inf"), 0
    for epoch in range(1, epochs + 1):
        loss, right = train(model, loader, optimizer, epoch)
        scheduler.step()
        steps += len(loader)
        if loss < best:
            best = loss
        if is_main():
            print(f"epoch {epoch}: {steps} steps, loss {loss:.5f}, best {best:.5f}, {right:.4f} right", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
