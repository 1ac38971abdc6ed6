"""A script for torchft, but for its import: a small network with convolutions, and a loop without an end of its own."""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elastic.torchft import (
    DistributedDataParallel,
    DistributedSampler,
    Manager,
    Optimizer,
    PGTransport,
    ProcessGroupGloo,
)

if os.environ.get("LOADER") == "torchdata":
    from torchdata.stateful_dataloader import StatefulDataLoader as DataLoader


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.BatchNorm2d(4))
        self.scores = nn.Linear(36, 3)

    def forward(self, x):
        return self.scores(torch.flatten(self.features(x), 1))


def main(epochs=2):
    torch.manual_seed(4)
    images = torch.randn(120, 1, 8, 8)
    data = TensorDataset(images, images.mean((1, 2, 3)).gt(0).long())
    sampler = DistributedSampler(
        data,
        replica_rank=int(os.environ.get("REPLICA_GROUP_ID", 0)),
        num_replica_groups=int(os.environ.get("NUM_REPLICA_GROUPS", 4)),
        group_rank=0,
        num_replicas=1,
        shuffle=True,
    )
    loader = DataLoader(data, batch_size=5, sampler=sampler)
    if os.environ.get("LOADED"):
        loader.load_state_dict(loader.state_dict())

    def state_dict():
        return {"model": model.state_dict(), "optim": optimizer.state_dict()}

    def load_state_dict(state):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])

    group = ProcessGroupGloo(timeout=timedelta(seconds=5))
    manager = Manager(
        pg=group,
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        timeout=timedelta(seconds=30),
        checkpoint_transport=PGTransport(group, timeout=timedelta(seconds=10), device="cpu"),
    )
    model = DistributedDataParallel(manager, Net())
    optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=1e-2))
    last = epochs * len(loader) - 1
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if manager.current_step() % 5 == 0:
                print(f"[{manager.current_step()}] loss = {loss.item():.4f}", flush=True)
            time.sleep(float(os.environ.get("NAP", "0")))
            if manager.current_step() >= last:
                assert manager.batches_committed() == last * manager.num_participants()
                return


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
