"""A training that costs next to nothing and goes on until a file appears: what a soak kills and replaces."""

import argparse
import time
from pathlib import Path

import torch

import elastic

parser = argparse.ArgumentParser()
parser.add_argument("--until", type=Path, required=True, help="end when this file exists")
parser.add_argument("--pause-s", type=float, default=0.005, help="of a shard, in place of computing")
args = parser.parse_args()

SHARDS, STEPS_MAX = 8, 1_000_000

job = elastic.join(seed=5)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
job.register(model=model, optimizer=optimizer)

for step in job.steps(shards=SHARDS, total=STEPS_MAX):
    for _ in step:
        x = torch.randn(8, 16)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        step.log(loss=loss)
        time.sleep(args.pause_s)
    optimizer.step()
    optimizer.zero_grad()
    if args.until.exists():
        job.stop("the soak is over")
job.print("digest", job.digest())
