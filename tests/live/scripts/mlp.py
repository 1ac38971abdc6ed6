"""A small classifier with BatchNorm and Dropout on made-up data, slow enough to be killed in the middle of a step."""

import argparse
import time

import torch
import torch.nn.functional as F

import elastic

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--samples", type=int, default=640)
parser.add_argument("--shards", type=int, default=8)
parser.add_argument("--pause-s", type=float, default=0.0, help="per shard, so that a kill meets a worker inside a step")
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--spike-every", type=int, default=0, help="steps after which gradients are larger than before")
args = parser.parse_args()

job = elastic.join(seed=7)
made = torch.Generator().manual_seed(1)
inputs = torch.randn(args.samples, 16, generator=made)
labels = (inputs.sum(1) > 0).long()
data = torch.utils.data.TensorDataset(inputs, labels)
model = torch.nn.Sequential(
    torch.nn.Linear(16, args.width),
    torch.nn.BatchNorm1d(args.width),
    torch.nn.ReLU(),
    torch.nn.Dropout(0.1),
    torch.nn.Linear(args.width, 2),
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
train = job.loader(data, batch_size=32, shards=args.shards, shuffle=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * len(train))
job.register(model=model, optimizer=optimizer, scheduler=scheduler)
job.state.setdefault(best=0.0)


def score(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"accuracy": (model(x).argmax(1) == y).float().mean()}


def scale(index: int) -> float:
    """What the loss of a step is multiplied by: 16, 256 and so on in each `--spike-every`-th step, otherwise 1."""
    spikes, rest = divmod(index + 1, args.spike_every) if args.spike_every else (0, 1)
    return 1.0 if rest else 16.0**spikes


for epoch in job.epochs(args.epochs):
    for step in job.steps(train):
        for x, y in step:
            loss = F.cross_entropy(model(x), y)
            (loss * scale(step.index)).backward()
            step.log(loss=loss)
            time.sleep(args.pause_s)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= scale(step.index)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    result = job.evaluate(score, data, batch_size=128)
    job.print(f"epoch {epoch} loss {step.metrics['loss']:.6f} accuracy {result['accuracy']:.4f}")
    job.state.best = max(job.state.best, result["accuracy"])
job.print("digest", job.digest())
