"""Drawn elastic scripts for Horovod, and who dies and comes while they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import nn

import elastic.horovod.torch as hvd
from tests.unit.runtime.frontends.horovod.members import Worker

CALLS: dict[str, Callable[[Any], object]] = {
    "none": lambda state: None,
    "sum": lambda state: hvd.allreduce(torch.ones(3) * hvd.rank(), op=hvd.Sum, name="sum"),
    "largest": lambda state: hvd.allreduce(torch.tensor([hvd.rank()]), op=hvd.Max, name="largest"),
    "optimizer": lambda state: hvd.broadcast_optimizer_state(state.optimizer, root_rank=0),
    "rows": lambda state: hvd.allgather(torch.full((600 * (1 + hvd.rank()),), 1.0)),
    "object": lambda state: hvd.broadcast_object([hvd.rank(), "x" * 5000], root_rank=0),
}
"""Name -> collectives of a script, of different sizes and ways."""


@dataclass(frozen=True)
class DrawnScript:
    """top, between, behind: collectives at the top of the function, between its two loops, and at its end.
    evaluation: one at the end of each epoch."""

    steps: int
    every: int
    """Batches from one commit to the next."""
    first: int
    """Batches of the first of two loops."""
    epoch: int
    """Batches of an epoch."""
    top: tuple[str, ...]
    between: str
    behind: str
    evaluation: str
    evaluates_first: bool
    """Whether a commit that comes at the end of an epoch is behind its evaluation."""
    light: bool
    """Whether the script calls check_host_updates() in the place of commit()."""

    @property
    def commits(self) -> int:
        return self.steps // self.every

    def run(self, worker: Worker) -> None:
        """Each worker trains samples of its rank. What it has seen: worker.samples has (step, size) of each batch."""
        torch.manual_seed(1)
        model = nn.Linear(3, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
        sampler = hvd.elastic.ElasticSampler(range(30), seed=3)

        def batch(state: Any) -> None:
            optimizer.zero_grad()
            number = float(sampler.remaining_indices[hvd.rank() % len(sampler.remaining_indices)])
            model(torch.full((2, 3), number)).square().mean().backward()
            optimizer.step()
            sampler.record_batch(0, 1)
            state.step += 1
            worker.samples.append((state.step, hvd.size()))
            ends = state.step % self.epoch == 0
            if ends:
                sampler.set_epoch(state.step // self.epoch)
            if ends and self.evaluates_first:
                CALLS[self.evaluation](state)
            if state.step % self.every == 0:
                state.check_host_updates() if self.light else state.commit()
            if ends and not self.evaluates_first:
                CALLS[self.evaluation](state)

        @hvd.elastic.run  # type: ignore[untyped-decorator]
        def body(state: Any) -> None:
            for name in self.top:
                CALLS[name](state)
            while state.step < self.first:
                batch(state)
            CALLS[self.between](state)
            while state.step < self.steps:
                batch(state)
            CALLS[self.behind](state)

        body(hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, step=0))
        worker.weights = [float(value) for weight in model.parameters() for value in weight.detach().flatten()]


@dataclass(frozen=True)
class Drawn:
    """A script, and what happens meanwhile: as tests.unit.worlds.World has it."""

    script: DrawnScript
    workers: int
    kills: dict[str, tuple[int, int]]
    """Of fewer workers than there are at the begin, and of newcomers."""
    asked_at: int
    newcomers: tuple[tuple[int, int], ...]


def drawn(seed: int) -> Drawn:
    random = Random(seed)
    names = list(CALLS)
    steps = random.randint(4, 10)
    script = DrawnScript(
        steps,
        every=random.randint(1, 3),
        first=random.randint(0, steps),
        epoch=random.randint(2, 5),
        top=tuple(random.choice(names) for _ in range(random.randint(0, 2))),
        between=random.choice(names),
        behind=random.choice(names),
        evaluation=random.choice(names),
        evaluates_first=random.random() < 0.5,
        light=random.random() < 0.3,
    )
    workers = random.randint(1, 3)
    newcomers = []
    for _ in range(random.randint(1, 2)):
        copied = random.randint(0, script.commits)
        newcomers.append((copied, random.randint(copied, script.commits)))
    mortal = random.sample([f"w{number}" for number in range(workers)], random.randint(0, workers - 1))
    mortal += [f"n{number}" for number in range(len(newcomers)) if random.random() < 0.3]
    kills = {name: (random.randint(1, 8 * steps), 0) for name in mortal}
    asked_at = random.randint(0, min(copied for copied, _ in newcomers))
    return Drawn(script, workers, kills, asked_at, tuple(newcomers))
