"""An image classifier by Fabric with BatchNorm, random noise, accumulated gradients, a logger and snapshots.
`fabric_images.py OUTPUT_DIR`."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric, seed_everything
from torch import nn
from torch.utils.data import DataLoader, Dataset

EPOCHS = 5


class Bars(Dataset):
    """Images of a bar in one of four places, with noise that is drawn anew each time."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        image = torch.randn(1, 8, 8)
        image[0, 2 * (index % 4) : 2 * (index % 4) + 2] += 1
        return image, index % 4


def pace():
    """Seconds that a step takes at least, which a test sets while the job runs."""
    file = Path(os.environ.get("LIVE_GATES", "")) / "pace"
    return float(file.read_text()) if file.is_file() else 0.0


def main():
    seed_everything(4, verbose=False)
    output = sys.argv[1]
    fabric = Fabric(accelerator="cpu", devices=4, strategy=os.environ.get("STRATEGY", "ddp"))
    fabric.launch()
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(512, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    model, optimizer = fabric.setup(model, optimizer)
    train = DataLoader(Bars(192), batch_size=4, shuffle=True)
    evaluated = DataLoader(Bars(48), batch_size=4)
    train, evaluated = fabric.setup_dataloaders(train, evaluated)
    steps = 0
    for epoch in range(EPOCHS):
        model.train()
        for number, (images, labels) in enumerate(train):
            accumulating = number % 2 == 0
            with fabric.no_backward_sync(model, enabled=accumulating):
                fabric.backward(F.cross_entropy(model(images), labels) / 2)
            if not accumulating:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
                time.sleep(pace())
        scheduler.step()
        model.eval()
        right = seen = 0
        for images, labels in evaluated:
            with torch.no_grad():
                right += int((model(images).argmax(-1) == labels).sum())
            seen += len(labels)
        found = fabric.all_reduce(torch.tensor([right, seen], dtype=torch.float), reduce_op="sum").tolist()
        if fabric.is_global_zero:
            os.makedirs(output, exist_ok=True)
            record = {"epoch": epoch, "steps": steps, "right": found[0], "seen": found[1]}
            with open(os.path.join(output, "metrics.jsonl"), "a") as file:
                file.write(json.dumps(record) + "\n")
        fabric.save(os.path.join(output, f"epoch-{epoch}.ckpt"), {"model": model, "optimizer": optimizer})
    fabric.print("done")


if __name__ == "__main__":
    main()
