"""What workers say to each other beside gradients: shared, agree, allreduce, cached, log_to, on_lead, node_lock."""

from __future__ import annotations

import os
from pathlib import Path

import torch

import elastic
from tests.live.scripts import gates

job = elastic.join(seed=3)
here = Path.cwd()


def name_the_run() -> str:
    with (here / "named").open("a") as file:
        file.write(f"{job.worker_id}\n")
    return "blue run"


run = job.shared("run", name_the_run)
with job.node_lock("together-test"):
    (here / f"saw.{job.worker_id}").write_text(run)

model = torch.nn.Linear(4, 1)
frozen = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
job.register(model=model, frozen=frozen, optimizer=optimizer)
job.log_to(elastic.JsonLines(here / "metrics.jsonl"))
job.on_lead(lambda: (here / f"led.{job.worker_id}").touch())


def rollout() -> torch.Tensor:
    target: torch.Tensor = frozen(torch.randn(8, 4))
    return target


for step in job.steps(shards=6, total=24):
    for number in range(2):
        for shard in step:
            if number == 1 and step.index == 8:
                gates.hold("second pass")
            if number == 0 and step.index == 20 and not job.restarted:
                gates.hold("end")  # with the state open for a newcomer's copy
            gates.pace()
            target = step.cached(rollout)
            x = torch.randn(8, 4, generator=shard.generator)
            loss = (model(x) - target).square().mean()
            loss.backward()
            step.log(**{f"loss{number}": loss})
        optimizer.step()
        optimizer.zero_grad()
    frozen.load_state_dict(model.state_dict())
    leader = job.agree(job.worker_id)
    members = job.allreduce(1.0, "sum")
    ages = job.allreduce(torch.tensor([float(os.getpid())]), "max")
    job.print(f"step {step.index} led by {leader}, {members:.0f} members, {ages.item():.0f}")
job.print("digest", job.digest())
