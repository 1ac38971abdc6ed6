"""Random models, optimizers, numbers of shards and workers, deaths and newcomers: always the bits of the quiet run.

`make test-exact` draws many more, other ones each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from runtime.loop.job import Job
from tests.unit.features import STEPS, Lion, loader, mlp, train
from tests.unit.jobs import Recorded, ledger, make_job
from tests.unit.thoroughness import EXAMPLES
from tests.unit.worlds import FakeMember, Killed, World

MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": mlp,
    "dropout": lambda: mlp(nn.ReLU(), nn.Dropout(0.5)),
    "batch norm": lambda: mlp(nn.BatchNorm1d(8), nn.ReLU()),
    "all norms": lambda: mlp(nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.BatchNorm1d(8, momentum=None), nn.Dropout(0.1)),
    "deep": lambda: mlp(*(layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.2)))),
    "partly frozen": lambda: nn.Sequential(nn.Linear(6, 6).requires_grad_(False), mlp()),
}
Parameters = Iterable[nn.Parameter]
OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 0.03, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.03, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, 0.03, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "lion": lambda p: Lion(p, 0.01),
}


@dataclass(frozen=True)
class Training:
    model: str
    optimizer: str
    shards: int
    batch_size: int

    def __call__(self, session: FakeMember | Recorded) -> str:
        job: Job = make_job(session)
        model = MODELS[self.model]()
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        train(job, model, OPTIMIZERS[self.optimizer](trainable), data=loader(job, self.batch_size, self.shards))
        digest = job.digest()
        job.close()
        return digest


@dataclass(frozen=True)
class Fate:
    """kills: worker -> (operation, units computed in it). w0, w1, ... begin; n0, n1, ... enter in step admit_at, with
    the state of step copy_at and the results since. loose: gradients are added where backward() has left them, as those
    of large models are."""

    workers: int
    kills: dict[str, tuple[int, int]]
    newcomers: int
    admit_at: int
    copy_at: int
    loose: bool


@dataclass
class Outcome:
    digest: str
    ledger: list[object] = field(default_factory=list)


@cache
def quiet(training: Training) -> Outcome:
    alone = Recorded()
    return Outcome(training(alone), ledger(alone))


@st.composite
def trainings(draw: st.DrawFn) -> Training:
    shards = draw(st.integers(1, 9))
    # BatchNorm takes two samples a shard at least.
    batch_size = draw(st.integers(2 * shards, 2 * shards + 7))
    return Training(draw(st.sampled_from(list(MODELS))), draw(st.sampled_from(list(OPTIMIZERS))), shards, batch_size)


@st.composite
def fates(draw: st.DrawFn) -> Fate:
    workers, newcomers = draw(st.integers(1, 5)), draw(st.integers(0, 2))
    admit_at = draw(st.integers(0, STEPS - 1))
    survivor = draw(st.integers(0, workers - 1))
    moments = st.tuples(st.integers(1, STEPS + 1), st.integers(0, 2))
    mortal = [f"w{i}" for i in range(workers) if i != survivor] + [f"n{i}" for i in range(newcomers)]
    kills = {worker: draw(moments) for worker in mortal if draw(st.booleans())}
    return Fate(workers, kills, newcomers, admit_at, draw(st.integers(0, admit_at)), draw(st.booleans()))


@settings(
    max_examples=EXAMPLES or 20,
    derandomize=not EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(training=trainings(), fate=fates())
def test_any_fate_of_any_training_ends_in_the_bits_of_the_quiet_run(training: Training, fate: Fate) -> None:
    expected = quiet(training)
    world = World(fate.workers, kills=fate.kills)
    with pytest.MonkeyPatch.context() as patched:
        if fate.loose:
            patched.setattr("runtime.allreduce.reduction.leaves.layout.LOOSE_ELEMENTS", 0)
        newcomers, copy_at = fate.newcomers, fate.copy_at
        world.run(training, newcomers=newcomers, asked_at=copy_at, copy_at=copy_at, admit_at=fate.admit_at)
    assert {type(error) for error in world.errors.values()} <= {Killed}, world.errors
    assert set(world.errors) <= set(fate.kills)
    assert set(world.digests.values()) == {expected.digest}
    for worker in world.digests:
        entered = world.joined_at.get(worker, 0)
        assert ledger(world.sessions[worker]) == expected.ledger[entered:]
