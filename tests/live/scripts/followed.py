"""A short training with something behind it that takes its time, with a process of its own; stands at the gates `begin`
and `after`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import torch

import elastic
from tests.live.scripts import gates

with elastic.join(seed=3) as job:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    job.register(model=model, optimizer=optimizer)
    gates.hold("begin")
    for step in job.steps(shards=2, total=3):
        for _ in step:
            model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
child = subprocess.Popen(["sleep", "1000"])
told = Path(os.environ["LIVE_GATES"]) / f"child.{os.environ['ELASTIC_JOB']}"
told.with_suffix(".tmp").write_text(str(child.pid))
told.with_suffix(".tmp").rename(told)
gates.hold("after")
