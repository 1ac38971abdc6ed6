"""Unregistered: each mistake as a user makes it, and what is no mistake."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LinearLR, SequentialLR

from elastic.errors import Unregistered
from runtime.loop.job import Job
from tests.unit.jobs import cross_entropy, dataset, make_job
from tests.unit.runtime.recovery.state.test_training_state import AcceleratedOptimizer


@pytest.fixture
def job() -> Iterator[Job]:
    job = make_job()
    yield job
    job._detach()


def nothing() -> None:
    pass


def loop(
    job: Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    after: Callable[[], Any] = nothing,
    total: int = 2,
    **arguments: Any,
) -> None:
    for step in job.steps(job.loader(dataset(), 16, shards=2), total=total, **arguments):
        for x, y in step:
            cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        after()


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(6, 2)
    return model, torch.optim.Adam(model.parameters(), 0.1)


def test_an_optimizer_that_is_not_registered_is_named_with_the_fix(job: Job) -> None:
    model, optimizer = made()
    job.register(model=model)
    with pytest.raises(Unregistered, match=r"optimizer \(Adam\) .*step 0.*job\.register\(optimizer=optimizer\)"):
        loop(job, model, optimizer)


def test_a_scheduler_that_is_not_registered_is_named(job: Job) -> None:
    model, optimizer = made()
    scheduler = ExponentialLR(optimizer, 0.9)
    job.register(model=model, optimizer=optimizer)
    with pytest.raises(Unregistered, match=r"job\.register\(scheduler=scheduler\)"):
        loop(job, model, optimizer, scheduler.step)


def update(average: nn.Module, model: nn.Module) -> None:
    for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
        mean.data.mul_(0.9).add_(parameter.data, alpha=0.1)


def test_an_average_of_the_weights_that_is_not_registered_is_named(job: Job) -> None:
    """Through `.data`, which no version counts."""
    model, optimizer = made()
    ema = copy.deepcopy(model)
    job.register(model=model, optimizer=optimizer)
    with pytest.raises(Unregistered, match=r"ema \(Linear\).*job\.register\(ema=ema\)"):
        loop(job, model, optimizer, lambda: update(ema, model))


def test_a_grad_scaler_that_is_not_registered_is_named(job: Job) -> None:
    model, optimizer = made()
    scaler = torch.amp.GradScaler("cpu", growth_interval=1)
    job.register(model=model, optimizer=optimizer)
    with pytest.raises(Unregistered, match=r"job\.register\(scaler=scaler\)"):
        for step in job.steps(job.loader(dataset(), 16, shards=2), total=2):
            for x, y in step:
                scaler.scale(cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def test_a_second_model_with_its_optimizer_is_named_with_the_others(job: Job) -> None:
    model, optimizer = made()
    critic, of_critic = made()
    job.register(model=model, optimizer=optimizer)

    def train_critic() -> None:
        cross_entropy(critic(torch.ones(1, 6)), torch.tensor([1])).backward()
        of_critic.step()
        of_critic.zero_grad()

    with pytest.raises(Unregistered, match=r"(critic|of_critic).*and so did (of_critic|critic)"):
        loop(job, model, optimizer, train_critic)


def test_what_hangs_on_a_trainer_is_found(job: Job) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model, self.optimizer = made()
            self.parts = {"ema": copy.deepcopy(self.model)}

        def fit(self) -> None:
            job.register(model=self.model, optimizer=self.optimizer)
            loop(job, self.model, self.optimizer, lambda: update(self.parts["ema"], self.model))

    with pytest.raises(Unregistered, match=r"self\.parts\['ema'\] \(Linear\)"):
        Trainer().fit()


def test_a_base_optimizer_inside_an_optimizer_is_named(job: Job) -> None:
    """Its state is in no state_dict of the outer one, unless that says so."""

    class Outer(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, 0.1)
            self.base = torch.optim.Adam(self.param_groups[0]["params"], 0.1)

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            self.base.step()

    class Saying(Outer):
        def state_dict(self) -> dict[str, Any]:
            return self.base.state_dict()

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.base.load_state_dict(state)

    model = nn.Linear(6, 2)
    optimizer = Outer(model.parameters())
    job.register(model=model, optimizer=optimizer)
    with pytest.raises(Unregistered, match=r"optimizer\.base \(Adam\)"):
        loop(job, model, optimizer)
    saying = make_job()
    optimizer = Saying(model.parameters())
    saying.register(model=model, optimizer=optimizer)
    loop(saying, model, optimizer)


def test_a_target_network_that_changes_in_a_later_step_is_noticed_when_the_epoch_ends(job: Job) -> None:
    model, optimizer = made()
    target = nn.Linear(6, 2)
    job.register(model=model, optimizer=optimizer)
    data = job.loader(dataset(), 16, shards=2)
    with pytest.raises(Unregistered, match=r"target \(Linear\) changed by the end of step 2"):
        for _ in job.epochs(2):
            for step in job.steps(data):
                for x, y in step:
                    cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step.index == 2:
                    target.load_state_dict(model.state_dict())


class Proxy:
    """As web frameworks have them: bound to nothing, it raises whatever it is asked."""

    __slots__ = ()

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("bound to nothing")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("bound to nothing")


def test_the_search_asks_nothing_of_what_it_does_not_know(job: Job) -> None:
    model, optimizer = made()
    proxies = [Proxy(), {"a": Proxy()}]
    nameless = type("Nameless", (), {"__module__": None})()
    itself: list[Any] = []
    itself.append(itself)
    large = [[object()] for _ in range(10**5)]
    job.register(model=model, optimizer=optimizer)
    loop(job, model, optimizer)
    assert (len(proxies), len(large), len(itself)) == (2, 10**5, 1)
    assert type(nameless).__name__ == "Nameless"


def test_what_does_not_change_or_is_a_part_of_something_registered_is_left_alone(job: Job) -> None:
    model, optimizer = made()
    teacher, part, compiled = nn.BatchNorm1d(6).eval(), model, torch.compile(model, backend="eager")
    scheduler = SequentialLR(optimizer, [LinearLR(optimizer), CosineAnnealingLR(optimizer, 9)], milestones=[1])
    half = nn.Sequential(part)
    idle = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    lazy = nn.LazyLinear(3)
    job.register(model=model, optimizer=optimizer, scheduler=scheduler)

    def after() -> None:
        scheduler.step()
        teacher(torch.ones(2, 6))

    loop(job, model, optimizer, after, total=3)
    assert (compiled, half, idle, lazy) is not None


def test_a_wrapper_of_a_registered_optimizer_is_left_alone(job: Job) -> None:
    model, optimizer = made()
    prepared = AcceleratedOptimizer(optimizer)
    job.register(model=model, optimizer=prepared.optimizer)
    loop(job, model, prepared.optimizer)
    assert prepared.state


def test_it_can_be_allowed_by_name(job: Job) -> None:
    model, optimizer = made()
    job.register(model=model)
    loop(job, model, optimizer, allow={"Unregistered"})
