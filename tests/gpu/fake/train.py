"""A script for jobs on the fake device, of what needs no library of CUDA: no product of matrices, no convolution."""

from __future__ import annotations

import torch
from torch import nn

import elastic
from tests.live.scripts import gates

STEPS = 60
SLOW = 10
"""From this step on each takes a while, as long as the gate `end` is shut."""

job = elastic.join(seed=7)
inputs = torch.randn(320, 16, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sum(1) + self.bias


model = Model().to(job.device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
train = job.loader(data, batch_size=16, shards=8, shuffle=True)
job.register(model=model, optimizer=optimizer)

for step in job.steps(train, total=STEPS):
    for x, y in step:
        gates.pace()
        gates.hold("shard")
        loss = (model(x) - y).square().mean()
        loss.backward()
        step.log(loss=loss)
    optimizer.step()
    optimizer.zero_grad()
    # Nobody can join while all wait for the gate, so there are minutes of slow steps before.
    gates.slow("end", 0.04 * max(0, step.index - SLOW))
    if step.index == STEPS - 2:
        gates.hold("end")
job.print("done", step.index + 1)
