"""Replicas of a model with many parameters; counts what its ring sends, and what the rounds have summed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

import elastic
from tests.bench import sent

every, fragments, moments = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
ROUNDS = 6

job = elastic.join(seed=3)
gates = Path(os.environ["LIVE_GATES"])
count = sent.Sent(gates, job.worker_id)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
outer = elastic.DiLoCo(model, optimizer, every=every, fragments=fragments, moments=moments)  # type: ignore[arg-type]
job.register(model=model, optimizer=optimizer, outer=outer)
summed: list[float] = []
for step in job.steps(shards=4, total=ROUNDS, outer=outer):
    for _ in step:
        model(torch.randn(2, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    summed.append(step.metrics["elastic.summed_bytes"])
    count.write()
(gates / f"{job.worker_id}.json").write_text(
    json.dumps({"summed": summed, "parameters": sum(parameter.numel() for parameter in model.parameters())})
)
