"""Says in files what it is told of its world; takes its time over each step, and stops nowhere."""

from __future__ import annotations

import os
from pathlib import Path

import torch

import elastic
from tests.live.scripts import gates

job = elastic.join(seed=3)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
job.register(model=model, optimizer=optimizer)
told = Path(os.environ["LIVE_GATES"])


def on_drain(seconds_left: float, because: str) -> None:
    assert seconds_left >= 0
    with (told / f"drain.{job.worker_id}").open("a") as file:
        file.write(f"{because}\n")


def on_resize(old: int, new: int, because: str) -> None:
    with (told / f"resize.{job.worker_id}").open("a") as file:
        file.write(f"{old} {new} {because}\n")


job.on_drain(on_drain)
job.on_resize(on_resize)
steps = int(os.environ.get("LIVE_STEPS", "1000000"))
for step in job.steps(shards=4, total=steps):
    for _ in step:
        gates.hold("shard")
        gates.pace()
        model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step.index >= steps - 100:
        gates.slow("end", 1.0)
