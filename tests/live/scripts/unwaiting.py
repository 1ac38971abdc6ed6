"""Trains without waiting, through the store or in pairs: `unwaiting.py store|gossip ROUNDS [PHASE_S]`. Each inner
step leaves a line `phase worker inner_index` in the directory of the job."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import elastic
from tests.live.scripts import gates
from tests.live.scripts.unwaiting_job import EVERY, PHASE_S, SHARDS

job = elastic.join(seed=11)
made = torch.Generator().manual_seed(1)
inputs = torch.randn(2048, 16, generator=made)
labels = (inputs[:, :8].sum(1) > inputs[:, 8:].sum(1)).long()
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
outer: elastic.Asynchronous | elastic.Gossip = (
    elastic.Asynchronous(model, optimizer, every=EVERY)
    if sys.argv[1] == "store"
    else elastic.Gossip(model, optimizer, every=EVERY)
)
train = job.loader(torch.utils.data.TensorDataset(inputs, labels), batch_size=64, shards=SHARDS, shuffle=True)
job.register(model=model, optimizer=optimizer, outer=outer)
lines = Path(os.environ["ELASTIC_JOB_DIR"], "inner.txt")
if job.restarted:
    gates.hold("newcomer")

for phase in elastic.asynchronous(
    job, train, outer=outer, total=int(sys.argv[2]), phase_s=float(sys.argv[3]) if sys.argv[3:] else PHASE_S
):
    for x, y in phase:
        gates.pace()
        gates.hold("inner")
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        phase.log(loss=loss)
        with lines.open("a") as file:
            file.write(f"{phase.index} {job.worker_id} {phase.inner_index}\n")
    found = job.evaluate(lambda x, y: {"loss": F.cross_entropy(model(x), y)}, train._dataset)
    if lines.with_name("enough").exists():
        job.stop("enough")
    job.print("phase", phase.index, "loss", found["loss"], phase.metrics)
job.print("digest", job.digest())
