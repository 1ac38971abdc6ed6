"""A training that is often busy with something else than steps: it compiles, evaluates, prepares, saves.

What its leader has done is a line of its output each.
"""

import argparse
import time
from pathlib import Path

import torch

import elastic

parser = argparse.ArgumentParser()
parser.add_argument("--until", type=Path, required=True, help="end when this file exists")
parser.add_argument(
    "--busy-s", type=float, default=8.0, help="of processor time: how long an evaluation and a once take"
)
parser.add_argument("--every", type=int, default=40, help="steps between two of them")
args = parser.parse_args()

SHARDS, STEPS_MAX, PARTS = 8, 1_000_000, 6

job = elastic.join(seed=5)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
job.register(model=model, optimizer=optimizer)
compiled = torch.compile(model)
held_out = torch.utils.data.TensorDataset(torch.randn(PARTS, 16))


def compute(seconds: float) -> None:
    """With Python's lock held most of the time, as preparations and metrics in Python do."""
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        sum(range(100_000))


def score(x: torch.Tensor) -> dict[str, torch.Tensor]:
    compute(args.busy_s / PARTS * job.world_size)  # each worker has its part of the parts
    return {"mean": model(x).mean()}


def prepare() -> bool:
    compute(args.busy_s)
    return True


for step in job.steps(shards=SHARDS, total=STEPS_MAX):
    for _ in step:
        x = torch.randn(8, 16)
        loss = (compiled(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        step.log(loss=loss)
    optimizer.step()
    optimizer.zero_grad()
    match step.index % args.every:
        case 10:
            job.evaluate(score, held_out, batch_size=1)
            job.print("evaluated")
        case 20:
            job.once(prepare)
            job.print("prepared")
        case 30:
            job.save("named")
            job.print("saved")
    if args.until.exists():
        job.stop("that was long enough")
job.print("digest", job.digest())
