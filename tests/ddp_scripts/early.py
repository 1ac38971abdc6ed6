"""Stops when its evaluation gets no better; counts its batches itself to accumulate, with an average of its own, a
weight decay that is halved in each epoch, and rates that are set for the next step."""

import os
import sys
import time
from collections import Counter

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def evaluate(model, loader):
    model.eval()
    total, number = 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            total += F.mse_loss(model(x), y).item() * len(y)
            number += len(y)
    model.train()
    mean = torch.tensor(total / number, dtype=torch.float64)
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def main(epochs=3):
    dist.init_process_group("gloo")
    torch.manual_seed(4)
    x = torch.randn(128, 8)
    y = x.prod(1, keepdim=True).tanh()
    data, held_out = TensorDataset(x[:96], y[:96]), TensorDataset(x[96:], y[96:])
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 1)))
    average = {name: weight.detach().clone() for name, weight in model.module.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=6, sampler=sampler)
    test_loader = DataLoader(held_out, batch_size=4, sampler=DistributedSampler(held_out, shuffle=False))
    counts, best, bad = Counter(batches=0, steps=0), float("inf"), 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            model.require_backward_grad_sync = counts["batches"] % 2 == 1
            loss = F.mse_loss(model(x), y) / 2
            loss.backward()
            counts["batches"] += 1
            if counts["batches"] % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
                counts["steps"] += 1
                with torch.no_grad():
                    for name, weight in model.module.named_parameters():
                        average[name].lerp_(weight, 0.1)
                for group in optimizer.param_groups:
                    group["lr"] = 0.02 / (1 + 0.1 * counts["steps"])
            time.sleep(float(os.environ.get("NAP", "0")))
        for group in optimizer.param_groups:
            group["weight_decay"] *= 0.5
        mean = evaluate(model, test_loader)
        best, bad = (mean, 0) if mean < best else (best, bad + 1)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {counts['steps']} steps, loss {mean:.6f}, best {best:.6f}, {bad} bad", flush=True)
        if bad == 4:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
