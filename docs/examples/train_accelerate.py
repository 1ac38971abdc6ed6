"""A classifier by accelerate in a loop of its own, as one writes it for torchrun: it does not use elastic-ring.

torchrun --nproc-per-node=4 docs/examples/train_accelerate.py
elastic run --workers 3 --ranks 4 docs/examples/train_accelerate.py
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def rings(samples: int, seed: int) -> TensorDataset:
    """Points in six dimensions, and whether they lie outside of a sphere."""
    points = torch.randn(samples, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, (points.square().sum(1) > 5.3).long())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--output", default="accelerate-output")
    options = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model: nn.Module = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train = DataLoader(rings(4000, seed=0), batch_size=16, shuffle=True)
    test = DataLoader(rings(1000, seed=1), batch_size=100)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * len(train) // 2)
    model, optimizer, train, test, scheduler = accelerator.prepare(model, optimizer, train, test, scheduler)
    for epoch in range(options.epochs):
        model.train()
        for points, labels in train:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(points), labels)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        right = seen = 0
        losses = []
        for points, labels in test:
            with torch.no_grad():
                logits = model(points)
            losses.append(accelerator.gather_for_metrics(nn.functional.cross_entropy(logits, labels)))
            found, wanted = accelerator.gather_for_metrics((logits.argmax(1), labels))
            right += int((found == wanted).sum())
            seen += len(wanted)
        accelerator.print(f"epoch {epoch}: loss {torch.cat(losses).mean():.4f}, {right} of {seen} right")
        accelerator.save_state(f"{options.output}/epoch-{epoch}")
    accelerator.save_model(model, f"{options.output}/model")


if __name__ == "__main__":
    main()
