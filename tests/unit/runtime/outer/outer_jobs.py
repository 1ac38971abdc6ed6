"""A small job of replicas for tests, in any world, with any fate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from runtime.loop.job import Job
from runtime.outer import DiLoCo
from runtime.session import Session
from tests.unit.jobs import cross_entropy, dataset, make_job
from tests.unit.worlds import Killed, World

REPLICAS = 4
BATCH = 8
SAMPLES = 48
ADAMW = partial(torch.optim.AdamW, lr=0.01)

MakeOuter = Callable[[nn.Module, torch.optim.Optimizer], DiLoCo]


def diloco(**options: Any) -> MakeOuter:
    """Makes a DiLoCo with these options, by default of 3 inner steps."""
    chosen = {"every": 3} | options
    return lambda model, optimizer: DiLoCo(model, optimizer, **chosen)


def small(
    body: Callable[[Job, torch.nn.Linear, torch.optim.Optimizer], None],
    optimizer_of: Any = ADAMW,
) -> Callable[[Session], str]:
    """A script of any body around a small model; returns its digest."""

    def script(session: Session) -> str:
        job = make_job(session)
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 2)
        body(job, model, optimizer_of(model.parameters()))
        digest = job.digest()
        job.close()
        return digest

    return script


@dataclass
class Seen:
    """What one worker's script saw."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


@dataclass
class OuterJob:
    """A script with dropout, BatchNorm, AdamW and a scheduler, all of whose bits could depend on the world."""

    make_outer: MakeOuter
    epochs: int = 3
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.AdamW(parameters, lr=0.01)
    seen: dict[str, Seen] = field(default_factory=dict)

    def script(self, session: Session) -> str:
        job = make_job(session)
        return self.train(job, self.seen.setdefault(session.worker_id, Seen()))

    def train(self, job: Job, seen: Seen) -> str:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
        optimizer = self.optimizer(model.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        outer = self.make_outer(model, optimizer)
        data = job.loader(dataset(SAMPLES), BATCH, shards=REPLICAS, shuffle=True)
        job.register(model=model, optimizer=optimizer, scheduler=scheduler, outer=outer)
        for step in job.steps(data, epochs=self.epochs, outer=outer):
            for x, y in step:
                loss = cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                step.log(loss=loss, sum={"samples": len(y)})
            seen.metrics.append(step.metrics)
            seen.rates.append(optimizer.param_groups[0]["lr"])
        digest = job.digest()
        job.close()
        return digest


@dataclass
class Fate:
    """Of one run: its workers, who dies where, and who joins when."""

    workers: int = 1
    kills: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    newcomers: int = 0
    admit_at: int = 0
    copy_at: int = 0


def run(job: OuterJob, fate: Fate, **world_options: str) -> World:
    """Run it. Raises what a script raised, other than a planned death."""
    world = World(fate.workers, fate.kills, **world_options)
    world.run(job.script, fate.newcomers, fate.copy_at, fate.admit_at, fate.copy_at)
    for name, error in world.errors.items():
        if name not in fate.kills or not isinstance(error, Killed):
            raise error
    return world


def digests(world: World) -> set[str]:
    return set(world.digests.values())


__all__ = ["BATCH", "REPLICAS", "SAMPLES", "Fate", "OuterJob", "Seen", "digests", "diloco", "run"]
