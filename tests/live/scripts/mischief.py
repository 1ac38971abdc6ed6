"""A tiny training script that does one thing wrong; the first argument says which."""

from __future__ import annotations

import multiprocessing
import os
import sys

import torch

import elastic
from tests.live.scripts import gates

what = sys.argv[1]
slot = int(os.environ["ELASTIC_SLOT"])
restarted = os.environ["ELASTIC_RESTARTED"] == "1"
threads = 1
if what == "threads differ":
    threads += slot
if what == "a newcomer's threads differ":
    threads += restarted
job = elastic.join(threads=threads)
if what == "initial parameters differ":
    torch.manual_seed(slot)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if what == "no shards":
    job.loader(torch.utils.data.TensorDataset(torch.zeros(4, 4)), batch_size=4, shards=0)
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
train = job.loader(data, batch_size=32, shards=4, workers=1) if what == "a loader process is killed" else None
job.register(model=model, optimizer=optimizer)
job.state.setdefault(level=0)
for step in job.steps(train, shards=None if train else 4, total=40):
    for batch in step:
        gates.pace()
        x = batch[0] if train else torch.randn(8, 4)
        if what == "one shard is poison" and step.index == 3 and step.shard.index == 2:
            raise ValueError("poison")
        loss = model(x).square().mean()
        loss.backward()
        step.log(loss=loss)
    optimizer.step()
    optimizer.zero_grad()
    if what == "states differ" and step.index == 5:
        job.state.level = slot
    if what == "a loader process is killed" and step.index == 5 and slot == 1 and not restarted:
        (child,) = multiprocessing.active_children()
        child.kill()
    if what == "two devices fail" and step.index == 5 and slot > 0 and not restarted:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")
    if what == "one leaves the loop" and step.index == 5 and slot == 1:
        break
    if what == "each time another mistake" and step.index >= 2 and slot == 1:
        raise ValueError(f"at step {step.index}")
    if step.index == 30:
        gates.hold("end")
job.print("digest", job.digest())
if what == "an exit with words behind the loop":
    sys.exit("no data")
