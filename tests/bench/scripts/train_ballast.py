"""A small model beside much registered state, in steps of about a tenth of a second; prints when each step ended."""

from __future__ import annotations

import json
import sys
import time

import torch

import elastic

MEGABYTES, STEPS = int(sys.argv[1]), int(sys.argv[2])


class Ballast:
    """State of a size, changed by nobody."""

    def __init__(self) -> None:
        self.tensors = {f"t{n}": torch.full((MEGABYTES << 14,), float(n)) for n in range(16)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.tensors = state


job = elastic.join()
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
job.register(model=model, optimizer=optimizer, ballast=Ballast())
ended_s = []
for step in job.steps(shards=6, total=STEPS):
    for _ in step:
        model(torch.randn(512, 512)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    ended_s.append(time.monotonic())
job.print(json.dumps(ended_s))
