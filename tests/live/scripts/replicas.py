"""Replicas that train by themselves, with DiLoCo, by fragments, delayed, with a quorum or as --outer says: BatchNorm,
dropout, AdamW and a scheduler."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F

import elastic
from tests.live.scripts import gates

streaming = "streaming" in sys.argv[1:]
delay = int(streaming or "delayed" in sys.argv[1:])
job = elastic.join(seed=3)
inputs = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())
model = torch.nn.Sequential(
    torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 2)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
said: dict[str, Any] = {}
if "unsaid" not in sys.argv[1:]:
    said["outer"] = elastic.DiLoCo(
        model, optimizer, every=4, fragments=2 if streaming else 1, delay=delay, alpha=0.5 * streaming
    )
if "quorum" in sys.argv[1:]:
    said["outer"].with_quorum(2, grace_s=0.3)
weight = next(model.parameters())
initial = weight.detach().clone()
train = job.loader(data, batch_size=16, shards=4, shuffle=True)
job.register(model=model, optimizer=optimizer, scheduler=scheduler, **said)

gates.hold("loop")
for step in job.steps(train, epochs=6, **said):
    for x, y in step:
        gates.pace()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        step.log(loss=loss, moved=(weight.detach() - initial).norm())
gates.hold("end")
