"""A small model beside much registered state.

    train_ballast.py DIRECTORY MEGABYTES SHARD_S

DIRECTORY holds the turnstile `gate` and takes the `stamps`. SHARD_S: how long a shard keeps an accelerator busy, for
which the worker waits without using a processor; 0: there is none, and the processor computes for about as long.
"""

import sys
import time
from pathlib import Path

import torch

import elastic
from tests.bench.stamps import Shards, Stamps
from tests.bench.turnstile import OPEN, Turnstile

SHARDS = 6
WIDTH = 512


class Ballast:
    """State of a size, changed by nobody."""

    def __init__(self, megabytes: int) -> None:
        self.tensors = {f"t{n}": torch.full((megabytes << 14,), float(n)) for n in range(16)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.tensors = state


directory, megabytes, shard_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
job = elastic.join()
model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
job.register(model=model, optimizer=optimizer, ballast=Ballast(megabytes))
stamps = Stamps(directory / "stamps", job.worker_id)
shards = Shards(directory / "stamps", job.worker_id)
gate = Turnstile(str(directory / "gate"), job.worker_id)
samples = 8 if shard_s else WIDTH

for step in job.steps(shards=SHARDS, total=OPEN):
    began, world = job.generation, job.world_size
    # The bench's own look: reading step.index here would bind a newcomer to this step.
    gate.wait(step._running.place.index)
    for shard in step:
        shards.write(step.index, shard.index)
        loss = model(torch.randn(samples, WIDTH)).square().mean()
        loss.backward()
        time.sleep(shard_s)
        step.log(loss=loss)
    optimizer.step()
    optimizer.zero_grad()
    stamps.write(step.index, began, job.generation, world, step.metrics["loss"])
