"""A second loader for evaluation, whose result drives the learning rate; meters, as in PyTorch's imagenet example."""

import os
import sys
import time
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class AverageMeter:
    def __init__(self, name):
        self.name = name
        self.sum = 0.0
        self.count = 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    def synchronize(self):
        found = torch.tensor([self.count, self.sum], dtype=torch.float64)
        dist.all_reduce(found)
        self.count, self.sum = int(found[0]), found[1].item()

    @property
    def avg(self):
        return self.sum / max(1, self.count)


class Logger:
    """Makes a meter when it is asked for it first, as MetricLogger of torchvision's references."""

    def __init__(self):
        self.meters = defaultdict(lambda: AverageMeter(""))

    def log_every(self, loader):
        for x, y in loader:
            yield x.float(), y
        for meter in self.meters.values():
            meter.synchronize()


def validate(loader, model):
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64)
    logger = Logger()
    with torch.no_grad():
        for x, y in logger.log_every(loader):
            scores = model(x)
            logger.meters["loss"].update(F.cross_entropy(scores, y).item(), len(y))
            totals[0] += F.cross_entropy(scores, y, reduction="sum").item()
            totals[1] += (scores.argmax(1) == y).sum().item()
            totals[2] += len(y)
    dist.all_reduce(totals)
    assert logger.meters["loss"].count == totals[2] == 80
    assert abs(logger.meters["loss"].avg - totals[0] / totals[2]) < 1e-6
    return (totals[0] / totals[2]).item(), (totals[1] / totals[2]).item()


def train(loader, model, optimizer, epoch, meter):
    model.train()
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y)
        meter.update(loss.item(), len(y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 2 == 1 and dist.get_rank() == 0:
            print(f"Epoch [{epoch}][{i}/{len(loader)}] loss {meter.avg:.4f} of {meter.count}", flush=True)
        time.sleep(float(os.environ.get("NAP", "0")))


def main(epochs=3):
    dist.init_process_group(backend="gloo", init_method="env://")
    torch.manual_seed(11)
    x = torch.randn(176, 10)
    y = (x.prod(1) > 0).long()
    train_set, val_set = TensorDataset(x[:96], y[:96]), TensorDataset(x[96:], y[96:])
    model = DDP(nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7)
    train_sampler = DistributedSampler(train_set)
    val_sampler = DistributedSampler(val_set, shuffle=False, drop_last=True)
    train_loader = DataLoader(train_set, batch_size=6, sampler=train_sampler, num_workers=1)
    val_loader = DataLoader(val_set, batch_size=5, sampler=val_sampler)
    best = 0.0
    for epoch in range(epochs):
        train_sampler.set_epoch(epoch)
        meter = AverageMeter("loss")
        train(train_loader, model, optimizer, epoch, meter)
        loss, accuracy = validate(val_loader, model)
        scheduler.step(loss)
        best = max(best, accuracy)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.6f}, accuracy {accuracy:.4f}, best {best:.4f}", flush=True)
    dist.destroy_process_group()
    return best


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
