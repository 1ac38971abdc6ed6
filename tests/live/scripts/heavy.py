"""A state that takes a newcomer as long as a test wants, with several operations in a step to take over meanwhile.

heavy.py [STEPS [FLOATS]]   STEPS 0, or none: until the gate `on` is open. FLOATS: so many parameters more
"""

from __future__ import annotations

import sys

import torch

import elastic
from tests.live.scripts import gates

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 0
FLOATS = int(sys.argv[2]) if len(sys.argv) > 2 else 0

job = elastic.join(seed=5)
model = torch.nn.Sequential(
    torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)
)
model.wide = torch.nn.Parameter(torch.zeros(FLOATS))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
made = torch.Generator().manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randn(32, 8, generator=made))


class Weight:
    """Something registered that is slow to load."""

    loads = 0

    def state_dict(self) -> dict[str, int]:
        return {"weight": 7}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loads += 1
        gates.hold(f"load {self.loads}")


job.register(model=model, optimizer=optimizer, weight=Weight())
job.state.setdefault(total=0.0)


def score(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"mean": model(x).mean()}


for _ in job.epochs(1):
    for step in job.steps(shards=4, total=STEPS or 100_000):
        for turn in range(2):
            for _ in step:
                gates.pace()
                x = torch.randn(8, 8)
                loss = (model(x).squeeze(1) - x.sum(1)).square().mean() + 1e-3 * model.wide.sum()
                loss.backward()
                step.log(sum={f"loss {turn}": loss})
            optimizer.step()
            optimizer.zero_grad()
        seen = step.metrics["loss 0"]
        if step.index % 3 == 0:
            seen += job.evaluate(score, data, batch_size=8)["mean"]
        job.state.total += seen
        if not STEPS and not gates.shut("on"):
            job.stop("enough")
job.print("digest", job.digest())
