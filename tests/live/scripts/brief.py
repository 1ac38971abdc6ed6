"""Short steps, checkpoints of a few megabytes, and everything that a resumed run has to find again."""

from __future__ import annotations

import sys

import torch

import elastic
from tests.live.scripts import gates

EPOCHS = int(sys.argv[1])
STEPS = 20
"""Of an epoch."""

job = elastic.join(seed=11)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)


class Ballast:
    """Makes the writing of a checkpoint last long enough to be met by a kill; changes with every epoch."""

    def __init__(self) -> None:
        self.weight = torch.arange(1_000_000.0)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.weight.copy_(state["weight"])


ballast = Ballast()
job.register(model=model, optimizer=optimizer, ballast=ballast)
job.state.setdefault(total=0.0)
for epoch in job.epochs(EPOCHS):
    drawn = job.once(lambda: torch.rand(()).item())
    for step in job.steps(shards=4, total=STEPS):
        for _ in step:
            gates.pace()
            x = torch.randn(8, 8)
            loss = (model(x).squeeze(1) - x.sum(1) - drawn).square().mean()
            loss.backward()
            step.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        job.state.total += step.metrics["loss"]
    ballast.weight += epoch
    if epoch == EPOCHS - 1:
        gates.hold("end")
    if epoch % 10 == 9:
        job.save("tenth")
job.print("digest", job.digest())
