"""A script for torchft, as anybody would write it; it knows nothing of elastic-ring.

Under torchft each replica group is started by itself, beside a lighthouse:

    NUM_REPLICA_GROUPS=4 REPLICA_GROUP_ID=0 torchrun --nproc-per-node=1 train_torchft.py      # and 1, 2, 3

docs/torchft.md shows the one line to change. Then all groups are one command, and no batch is dropped:

    elastic run --workers 3 --ranks 4 train_torchft.py
"""

import argparse
import os
import time
from datetime import timedelta

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo


def stripes(images: int) -> TensorDataset:
    """Images of 12 x 12 with stripes, and the direction of the stripes."""
    generator = torch.Generator().manual_seed(0)
    label = torch.arange(images) % 2
    wave = torch.rand(images, 1, 12, generator=generator).sub(0.5).sign().expand(images, 12, 12)
    image = torch.where(label.view(-1, 1, 1) == 0, wave, wave.transpose(1, 2))
    noise = torch.randn(images, 12, 12, generator=generator)
    return TensorDataset((image + 2 * noise).unsqueeze(1), label)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step, to watch it")
    options = parser.parse_args()

    data = stripes(2048)
    sampler = DistributedSampler(
        data,
        replica_rank=int(os.environ.get("REPLICA_GROUP_ID", 0)),
        num_replica_groups=int(os.environ.get("NUM_REPLICA_GROUPS", 2)),
        group_rank=0,
        num_replicas=1,
        shuffle=True,
    )
    loader = DataLoader(data, batch_size=32, num_workers=2, sampler=sampler)

    def state_dict() -> dict:
        return {"model": model.state_dict(), "optim": optimizer.state_dict()}

    def load_state_dict(state: dict) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"train_torchft_{os.environ.get('REPLICA_GROUP_ID', 0)}",
        timeout=timedelta(seconds=30),
    )
    torch.manual_seed(1)
    features = nn.Sequential(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 12, 3), nn.ReLU())
    net = nn.Sequential(features, nn.Flatten(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 2))
    model = DistributedDataParallel(manager, net)
    optimizer = Optimizer(manager, optim.AdamW(model.parameters(), lr=3e-3))

    while True:
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            if manager.current_step() % 50 == 0:
                print(f"[{manager.current_step()}] loss = {loss.item():.4f}", flush=True)
            time.sleep(options.pause)
            if manager.current_step() >= options.steps:
                exit()


if __name__ == "__main__":
    main()
