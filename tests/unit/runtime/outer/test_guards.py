"""Mistakes in a loop of replicas are named, and what the page promises of them is so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, cast

import pytest
import torch
from torch import nn

from elastic.errors import BufferChanged, ConfigError, NoGradient, NotCarried, StateChanged, TooEarly, UsageError
from elastic.records import exactly_once
from runtime.loop.job import Job
from runtime.outer import DiLoCo, LocalSGD
from tests.unit.jobs import Recorded, dataset, make_job, one_thread


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@dataclass
class Setup:
    job: Job
    model: nn.Module
    optimizer: torch.optim.Optimizer
    outer: DiLoCo

    def inner_step(self, x: torch.Tensor) -> None:
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def set_up(
    make: Callable[[nn.Module, Any], DiLoCo] = lambda m, o: DiLoCo(m, o, every=2), *, register: bool = True
) -> Setup:
    job = make_job(Recorded())
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = make(model, optimizer)
    job.register(model=model, optimizer=optimizer)
    if register:
        job.register(outer=outer)
    return Setup(job, model, optimizer, outer)


def steps(setup: Setup, **options: Any) -> Any:
    data = setup.job.loader(dataset(), 8, shards=2)
    return setup.job.steps(data, total=2, outer=setup.outer, **options)


def test_a_loop_without_its_diloco_and_a_diloco_without_its_loop() -> None:
    setup = set_up(register=False)
    with pytest.raises(ConfigError, match="same DiLoCo"):
        steps(setup)
    setup = set_up()
    with pytest.raises(ConfigError, match="same DiLoCo"):
        setup.job.steps(shards=2, total=2)


def test_arguments_that_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="gradients='sum'"):
        steps(set_up(), gradients="sum")
    setup = set_up()
    with pytest.raises(ConfigError, match="stream"):
        setup.job.steps(setup.job.stream(lambda shard, epoch: iter([]), shards=2), outer=setup.outer)
    setup = set_up()
    with pytest.raises(ConfigError, match="workers="):
        setup.job.steps(setup.job.loader(dataset(), 8, shards=2, workers=1), total=2, outer=setup.outer)
    setup = set_up()
    with pytest.raises(ConfigError, match="one DiLoCo"):
        setup.job.register(second=DiLoCo(setup.model, setup.optimizer, every=1))
    setup = set_up()
    with pytest.raises(ConfigError, match="number of shards"):
        next(iter(setup.job.epochs(1)))
    setup = set_up()
    other = nn.Linear(1, 1)
    setup.job.register(other=other, third=torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="third"):
        next(iter(steps(setup)))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda m, o: DiLoCo(m, o, every=2, alpha=1.5), "alpha"),
        (lambda m, o: DiLoCo(m, o, every=2, moments=cast(Any, "none")), "moments"),
        (lambda m, o: DiLoCo(m, o, every=2, alpha=0.5, moments="mean"), "alike"),
        (lambda m, o: DiLoCo(m, o, o, every=2), "same object"),
        (lambda m, o: DiLoCo(nn.Linear(1, 1), o, every=2), "inner_optimizer"),
        (lambda m, o: DiLoCo(m, o, torch.optim.SGD(nn.Linear(1, 1).parameters()), every=2), "outer_optimizer"),
    ],
)
def test_a_diloco_that_cannot_be(make: Callable[[nn.Module, Any], DiLoCo], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        set_up(make)


def test_a_replica_without_an_inner_step() -> None:
    setup = set_up()
    with pytest.raises(NoGradient, match="inner optimizer"):
        for step in steps(setup):
            for x, _ in step:
                setup.model(x).square().mean().backward()


@pytest.mark.parametrize("call", ["skip", "weigh"])
def test_a_replica_is_not_skipped_and_not_weighed(call: str) -> None:
    setup = set_up()
    with pytest.raises(UsageError, match="outer="):
        for step in steps(setup):
            for _ in step:
                getattr(step, call)(*[2] * (call == "weigh"))


def test_a_step_has_one_pass() -> None:
    setup = set_up()
    with pytest.raises(UsageError, match="one pass"):
        for step in steps(setup):
            for _ in range(2):
                for x, _ in step:
                    setup.inner_step(x)


def test_a_parameter_is_not_frozen_in_mid_run() -> None:
    setup = set_up()
    with pytest.raises(NotCarried, match="requires_grad"):
        for step in steps(setup):
            for x, _ in step:
                setup.inner_step(x)
            setup.model.bias.requires_grad_(False)


def test_job_state_does_not_change_in_a_round() -> None:
    setup = set_up()
    setup.job.state.setdefault(seen=[0])
    with pytest.raises(StateChanged, match="seen"):
        for step in steps(setup):
            for x, _ in step:
                setup.inner_step(x)
                setup.job.state.seen[0] += 1


def test_an_undeclared_buffer_does_not_change_in_a_round() -> None:
    setup = set_up()
    setup.model.register_buffer("seen", torch.zeros(1))
    with pytest.raises(BufferChanged, match="seen"):
        for step in steps(setup):
            for x, _ in step:
                setup.inner_step(x)
                cast(torch.Tensor, setup.model.seen).add_(1)


def test_an_error_in_a_body_leaves_the_usual_guards_for_a_loop_without_replicas() -> None:
    job = make_job(Recorded())
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.register(model=model, optimizer=optimizer)
    with pytest.raises(TooEarly):
        for step in job.steps(job.loader(dataset(), 8, shards=2), total=1):
            for x, _ in step:
                model(x).square().mean().backward()
                optimizer.step()


def test_local_sgd_ends_each_round_with_the_mean_of_the_replicas() -> None:
    """DiLoCo with SGD(1.0) as outer optimizer, up to the rounding of p - mean(p - q)."""
    setup = set_up(lambda m, o: LocalSGD(m, o, every=3))
    with one_thread():
        for step in steps(setup):
            begun = [parameter.detach().clone() for parameter in setup.model.parameters()]
            replicas: dict[int, list[torch.Tensor]] = {}
            for x, _ in step:
                if step.shard.inner == 0:
                    assert all(map(torch.equal, setup.model.parameters(), begun))
                setup.inner_step(x)
                replicas[step.shard.index] = [parameter.detach().clone() for parameter in setup.model.parameters()]
            assert len(replicas) == 2
            for now, one, other in zip(setup.model.parameters(), replicas[0], replicas[1], strict=True):
                torch.testing.assert_close(now.detach(), (one + other) / 2, rtol=1e-6, atol=1e-7)


def test_one_inner_step_of_sgd_is_the_synchronous_step_up_to_rounding() -> None:
    """p - mean(p - (p - lr g)) is p - lr mean(g), but each difference is rounded."""

    def weights(replicas: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        if replicas:
            setup = set_up(lambda m, o: LocalSGD(m, o, every=1))
            for step in steps(setup):
                for x, _ in step:
                    setup.inner_step(x)
            return list(setup.model.parameters())
        job = make_job(Recorded())
        model = nn.Linear(6, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job.register(model=model, optimizer=optimizer)
        for step in job.steps(job.loader(dataset(), 8, shards=2), total=2):
            for x, _ in step:
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters())

    with one_thread():
        for one, other in zip(weights(True), weights(False), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_the_ledger_proves_that_each_sample_was_used_once() -> None:
    job = make_job(session := Recorded())
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = DiLoCo(model, optimizer, every=3)
    data = job.loader(dataset(50), 8, shards=2, shuffle=True, tail="pad")
    job.register(model=model, optimizer=optimizer, outer=outer)
    for _ in job.epochs(2):
        for step in job.steps(data, outer=outer):
            for x, _ in step:
                assert len(x) == 4
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    job.close()
    epochs = exactly_once.prove([asdict(record) for record in session.records])
    assert [(epoch.steps, epoch.used, epoch.proved) for epoch in epochs] == [(3, 50, True)] * 2
