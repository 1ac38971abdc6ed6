"""In step MISSED the worker in slot 2 gives its part of the sum to the one in slot 0 only: slot 1 gets no result.

Slot 0 goes on to the next step, and stands at the gate `ahead`.
"""

from __future__ import annotations

import os

import torch

import elastic
from runtime.allreduce.ring.frames import Frame, FrameKind, Payload, PeerLink
from tests.live.scripts import gates

MISSED, STEPS = 5, 10
SLOT = os.environ.get("ELASTIC_SLOT")


def withhold() -> None:
    send = PeerLink.send

    def send_to_some(link: PeerLink, frame: Frame, payload: Payload = b"") -> None:
        if frame.kind is not FrameKind.GATHER or link.peer.split(".")[-2] != "1":
            send(link, frame, payload)

    setattr(PeerLink, "send", send_to_some)  # noqa: B010 (mypy refuses the assignment)


job = elastic.join(seed=3)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
job.register(model=model, optimizer=optimizer)
for step in job.steps(shards=8, total=STEPS):
    if step.index == MISSED and SLOT == "2":
        withhold()
    if step.index == MISSED + 1:
        gates.hold("ahead")
    for _ in step:
        x = torch.randn(8, 8)
        loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
        loss.backward()
        step.log(loss=loss)
    optimizer.step()
    optimizer.zero_grad()
job.print("digest", job.digest())
