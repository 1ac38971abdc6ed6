"""What the trials of the tests train: a line, at the pace that a file says, with what `--lr` says."""

import argparse
import time
from pathlib import Path

import torch

import elastic

words = argparse.ArgumentParser()
words.add_argument("--lr", type=float)
words.add_argument("--steps", type=int, default=40)
words.add_argument("--pace", type=Path)
given = words.parse_args()

job = elastic.join(seed=3)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=given.lr)
job.register(model=model, optimizer=optimizer)
for step in job.steps(shards=4, total=given.steps):
    for _ in step:
        time.sleep(float(given.pace.read_text()))
        loss = (model(torch.randn(16, 8)) - 1).square().mean()
        loss.backward()
        step.log(loss=loss)
    optimizer.step()
    optimizer.zero_grad()
