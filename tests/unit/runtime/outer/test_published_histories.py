"""The seven histories that torchft publishes of its DiLoCo (test_fixtures/, 7eb7087), as numbers: two fragments of one
parameter each, all gradients 2, an inner learning rate of 1 and an outer one of 2, a synchronisation of each fragment
every 6 inner steps.

In the history with a failure the second replica ends at its third inner step, and begins again from the first one's
state at inner step 9, which it counts as 3. Here a worker dies there, and the replica goes on as if nothing had been.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from runtime.outer import DiLoCo
from runtime.session import Session
from tests.unit.jobs import make_job
from tests.unit.worlds import Killed, World

HISTORIES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "torchft_histories.json").read_text())
EVERY, FRAGMENTS, REPLICAS = 6, 2, 2
ROUND = EVERY // FRAGMENTS
LOST_STEPS = 6
"""By which the second replica's count is behind after its failure."""

Values = dict[str, list[float]]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1))


class Seen:
    """What the workers saw: by replica and inner step the replica's parameters, by inner step the outer ones."""

    def __init__(self, history: dict[str, Any]) -> None:
        self.history = history
        self.rounds = -(-max(map(len, (replica["local"] for replica in history["replicas"]))) // ROUND)
        self.local: list[Values] = [{} for _ in range(REPLICAS)]
        self.outer: Values = {}

    def script(self, session: Session) -> str:
        job = make_job(session)
        model = nn.ModuleList(Layer() for _ in range(FRAGMENTS))
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        outer = DiLoCo(
            model,
            inner,
            torch.optim.SGD(model.parameters(), lr=2.0),
            every=EVERY,
            fragments=list(model),
            delay=self.history["delay"],
            alpha=self.history["alpha"],
        )
        job.register(model=model, optimizer=inner, outer=outer)
        for step in job.steps(shards=REPLICAS, total=self.rounds, outer=outer):
            self.outer[str(step.index * ROUND)] = values(model)
            for shard in step:
                self.local[shard.index][str(step.inner_index)] = values(model)
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, 2.0)
                inner.step()
        digest = job.digest()
        job.close()
        return digest


def values(model: nn.Module) -> list[float]:
    return [parameter.item() for parameter in model.parameters()]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("history", HISTORIES, ids=lambda h: f"{h['delay']}, {h['alpha']}, {h['failure']}")
def test_a_published_history_is_reproduced(history: dict[str, Any], workers: int) -> None:
    seen = Seen(history)
    kills = {"w1": (1, 1)} if history["failure"] and workers > 1 else {}
    world = World(workers, kills)
    world.run(seen.script)
    assert {name: type(error) for name, error in world.errors.items()} == dict.fromkeys(kills, Killed)
    for replica, published in enumerate(history["replicas"]):
        for at, expected in published["local"].items():
            mine = int(at) + (LOST_STEPS if history["failure"] and replica == 1 and int(at) >= ROUND else 0)
            assert seen.local[replica][str(mine)] == expected, (replica, at)
        for at, expected in published["outer"].items():
            if not (history["failure"] and replica == 1):
                assert seen.outer[at] == expected, at
