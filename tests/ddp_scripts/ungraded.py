"""One function trains and evaluates, with set_grad_enabled() and without eval(), as in PyTorch's minGPT example."""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, model, optimizer, train_loader, test_loader):
        self.model = model
        self.optimizer = optimizer
        self.train_loader = train_loader
        self.test_loader = test_loader
        self.step = 0

    def run_batch(self, x, y, train):
        with torch.set_grad_enabled(train):
            loss = F.mse_loss(self.model(x), y)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            self.step += 1
            time.sleep(float(os.environ.get("NAP", "0")))
        return loss.item()

    def run_epoch(self, epoch, loader, train):
        if train:
            loader.sampler.set_epoch(epoch)
        total, batches = 0.0, 0
        for i, (x, y) in enumerate(loader):
            loss = self.run_batch(x, y, train)
            if not train:
                total += loss
                batches += 1
            if i == 0:
                print(f"[{os.environ['RANK']}] epoch {epoch} {'train' if train else 'test'} {loss:.5f}")
        return total / max(1, batches)


def main(epochs=3):
    dist.init_process_group(backend="gloo")
    torch.manual_seed(4)
    x = torch.randn(176, 10)
    y = x.sum(1, keepdim=True).sin()
    train_set, test_set = TensorDataset(x[:96], y[:96]), TensorDataset(x[96:], y[96:])
    net = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model = DDP(net)
    train_loader = DataLoader(train_set, batch_size=6, sampler=DistributedSampler(train_set))
    test_loader = DataLoader(test_set, batch_size=5, sampler=DistributedSampler(test_set), num_workers=1)
    trainer = Trainer(model, optimizer, train_loader, test_loader)
    before = float("inf")
    for epoch in range(1, epochs + 1):
        trainer.run_epoch(epoch, train_loader, train=True)
        loss = trainer.run_epoch(epoch, test_loader, train=False)
        if loss > before:
            optimizer.param_groups[0]["lr"] *= 0.5
        before = loss
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
