"""A program that launches a function of its own. Arguments: job directory, options of elastic.launch() as JSON, what
the function does at its end. Prints what it gets back."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import dataclass

import torch

import elastic
from tests.live.scripts import gates

STEPS = 120


class Net(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Dropout(0.2), torch.nn.Linear(width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


@dataclass
class Trained:
    digest: str
    losses: list[float]
    model: Net


def step_of(model: Net) -> torch.Tensor:
    return model.forward(torch.randn(8, 4)).square().mean()


def train(width: int, end: str) -> Trained:
    job = elastic.join(seed=3)
    model = Net(width)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    job.register(model=model, optimizer=optimizer)
    job.state.setdefault(losses=[])
    for step in job.steps(shards=4, total=STEPS):
        for _ in step:
            gates.pace()
            loss = step_of(model)
            loss.backward()
            step.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        job.state.losses = [*job.state.losses, step.metrics["loss"]]
        if end == "raise" and step.index == 5:
            raise ArithmeticError("five is too much")
    job.print("trained")
    trained = Trained(job.digest(), job.state.losses, model)
    return (lambda: trained)() if end != "generator" else (one for one in [trained])  # type: ignore[return-value]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
    made = elastic.launch(train, 16, sys.argv[3], job_dir=sys.argv[1], **json.loads(sys.argv[2]))
    assert type(made) is Trained and type(made.model) is Net, "the classes are those of this program"
    print(json.dumps({"digest": made.digest, "losses": made.losses}))
