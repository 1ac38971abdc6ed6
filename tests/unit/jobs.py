"""A small training job for tests, and the pieces a test changes in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from elastic.checkpoints.settings import Settings
from elastic.config import Compression, OuterOption, Reduction
from runtime.loop.job import Job
from runtime.session import Session, StepRecord
from runtime.worker.single import SingleSession

if TYPE_CHECKING:
    import pytest

SHARDS = 4
BATCH = 16


class Recorded(SingleSession):
    """A job of one that remembers its ledger."""

    def __init__(self, reduction: str = "exact", compression: str = "none", outer: str = "") -> None:
        super().__init__()
        self.reduction, self.compression = Reduction(reduction), Compression(compression)
        self.outer = OuterOption.parse(outer)
        self.records: list[StepRecord] = []
        self.failures: list[tuple[BaseException, int, int | None]] = []
        self.closed_with: str | None = None

    def applied(self, record: StepRecord) -> None:
        self.records.append(record)

    def failed(self, error: BaseException, step: int, shard: int | None) -> None:
        self.failures.append((error, step, shard))

    def close(self, digest: str) -> None:
        self.closed_with = digest


def make_job(
    session: Session | None = None, seed: int = 0, device: str = "cpu", checkpoints: Settings | None = None
) -> Job:
    """A job on this session, as elastic.join() would make it, without its hooks into the interpreter."""
    torch.manual_seed(seed)
    return Job(
        session or Recorded(),
        seed=seed,
        threads=torch.get_num_threads(),
        device=torch.device(device),
        checkpoints=checkpoints or Settings.from_environment(os.environ),
    )


def cross_entropy(scores: torch.Tensor, labels: torch.Tensor) -> Any:
    """Not typed as a tensor, because torch leaves Tensor.backward untyped."""
    return F.cross_entropy(scores, labels)


def dataset(samples: int = 50, features: int = 6) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(samples, features, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


@dataclass
class Setup:
    """A registered classifier with everything whose bits could depend on the world."""

    job: Job
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    metrics: list[dict[str, float]] = field(default_factory=list)


def set_up(job: Job, *, learning_rate: float = 0.05) -> Setup:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    job.register(model=model, optimizer=optimizer, scheduler=scheduler)
    return Setup(job, model, optimizer, scheduler)


def train(setup: Setup, epochs: int = 2, body: Callable[[Setup], None] | None = None) -> str:
    """A complete script; returns the digest of the final state. body: called after each epoch's steps."""
    job, model, optimizer = setup.job, setup.model, setup.optimizer
    data = job.loader(dataset(), BATCH, shards=SHARDS, shuffle=True)
    job.state.setdefault(seen=0)
    for _ in job.epochs(epochs):
        for step in job.steps(data):
            for x, y in step:
                loss = cross_entropy(model(x), y)
                loss.backward()
                step.log(loss=loss, sum={"samples": len(y)})
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            setup.scheduler.step()
            job.state.seen += int(step.metrics["samples"])
            setup.metrics.append(step.metrics)
        if body is not None:
            body(setup)
    digest = job.digest()
    job.close()
    return digest


@contextmanager
def one_thread() -> Iterator[None]:
    """The bits of a sum depend on torch's thread count."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def digest_of(session: Any, run: Callable[[Job], object]) -> str:
    """What a script comes to."""
    job = make_job(session)
    run(job)
    digest = job.digest()
    job.close()
    return digest


def ledger(session: Any) -> list[object]:
    """The part of its records that must not depend on the world."""
    return [(r.step, r.epoch, r.lr, r.scalars, r.samples) for r in session.records]


def configure(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
    """Settings of the checkpoints of the next job."""
    for name, value in settings.to_environment().items():
        monkeypatch.setenv(name, value)
