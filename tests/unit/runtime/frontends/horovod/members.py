"""An elastic script for Horovod in the world of threads of tests/unit/worlds.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic.horovod.torch as hvd
from runtime.frontends.horovod import current
from runtime.frontends.horovod.member_world import MemberWorld
from runtime.frontends.horovod.process_sets import ProcessSets
from runtime.session import Session
from tests.unit.jobs import make_job
from tests.unit.worlds import Killed, World

SAMPLES, BATCH = 48, 2


@dataclass
class Worker:
    """What one worker has seen."""

    sizes: list[int] = field(default_factory=list)
    samples: list[tuple[int, int]] = field(default_factory=list)
    """(epoch, sample) of each batch behind whose commit it came."""
    steps: int = 0
    weights: list[float] = field(default_factory=list)
    metric: float = 0.0
    calls: int = 0
    """How often the function that trains was called."""
    counted: int = 0
    """The same, as a value of the state counts it."""


def enter(session: Session) -> MemberWorld:
    """As hvd.init() in a worker of that session."""
    current.shutdown()
    world = MemberWorld(make_job(session))
    current._here.world = world
    current._here.sets = ProcessSets(current.global_process_set, lambda: current.here("size").standing)
    return world


def train(worker: Worker, epochs: int = 2, norm: bool = True, every: int = 1) -> None:
    """every: batches between two commits."""
    torch.manual_seed(1)
    x = torch.randn(SAMPLES, 6)
    data = TensorDataset(x, x.sum(1).gt(0).long(), torch.arange(SAMPLES))
    sampler = hvd.elastic.ElasticSampler(data, seed=2)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    layers = [nn.Linear(6, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def body(state: Any) -> None:
        worker.calls += 1
        state.calls += 1
        while state.epoch < epochs:
            for x, y, numbers in loader:
                optimizer.zero_grad()
                # BatchNorm takes two rows at least, and the last batch of a part of an epoch may have one.
                F.cross_entropy(model(torch.cat([x, -x])), torch.cat([y, 1 - y])).backward()
                optimizer.step()
                worker.sizes.append(hvd.size())
                worker.steps += 1
                sampler.record_batch(state.batch, len(x))
                state.batch += 1
                session = current._here.world._training.session  # type: ignore[union-attr]
                if session.worker_id in session.place().members:  # not while it follows the others
                    worker.samples += [(state.epoch, int(number)) for number in numbers]
                if state.batch % every == 0:
                    state.commit()
            state.epoch, state.batch = state.epoch + 1, 0
            sampler.set_epoch(state.epoch)
            state.commit()

    def scale() -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * hvd.size()

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0, calls=0)
    state.register_reset_callbacks([scale])
    body(state)
    worker.counted = state.calls
    worker.metric = float(hvd.allreduce(torch.tensor(float(hvd.rank())), op=hvd.Sum))
    worker.weights = [float(value) for weight in model.parameters() for value in weight.detach().flatten()]


def together(
    workers: int,
    script: Callable[[Worker], None] = train,
    kills: dict[str, tuple[int, int]] | None = None,
    **newcomers: Any,
) -> tuple[World, dict[str, Worker]]:
    """The world when all have ended, and what each worker has seen. Raises what a worker has raised."""
    world = World(workers, kills=kills)
    seen: SimpleQueue[tuple[str, Worker]] = SimpleQueue()

    def one(session: Any) -> str:
        worker = Worker()
        seen.put((session.worker_id, worker))
        mine = enter(session)
        try:
            script(worker)
            mine.close()
            return str(session.carrier.digest()) if hasattr(session, "carrier") else ""  # a script without a loop
        finally:
            current.shutdown()

    world.run(one, **newcomers)
    errors = [error for error in world.errors.values() if not isinstance(error, Killed)]
    if errors:
        raise errors[0]
    assert len(set(world.digests.values())) == 1, "a job whose workers end with different states has failed"
    return world, dict(seen.get() for _ in range(seen.qsize()))
