"""Mistakes in a loop of replicas are named, and what the page promises of them is so."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, cast

import pytest
import torch
from torch import nn

from elastic.agent.worker.node_notice import NodeNotice
from elastic.errors import BufferChanged, ConfigError, NoGradient, NotCarried, StateChanged, TooEarly, UsageError
from elastic.records import exactly_once
from runtime.allreduce.reduction.partial_sum import Partial
from runtime.loop.job import Job
from runtime.outer import DiLoCo, LocalSGD
from runtime.session import OpKind
from tests.unit.jobs import Recorded, dataset, make_job


@dataclass
class Setup:
    job: Job
    model: nn.Linear
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


def inner_steps(setup: Setup) -> Iterator[None]:
    """Behind each inner step."""
    for step in steps(setup):
        for x, _ in step:
            setup.inner_step(x)
            yield


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
        (lambda m, o: DiLoCo(m, o, every=2, alpha=cast(Any, "0.5")), "alpha"),
        (lambda m, o: DiLoCo(m, o, every=2).with_quorum(cast(Any, "2")), "min_replicas"),
        (lambda m, o: DiLoCo(m, o, every=2).with_quorum(0), "min_replicas"),
        (lambda m, o: DiLoCo(m, o, every=2).with_quorum(1, cast(Any, "5")), "grace_s"),
        (lambda m, o: DiLoCo(m, o, every=2).with_quorum(1, float("nan")), "grace_s"),
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


def test_gradients_are_accumulated_over_inner_steps() -> None:
    """A shard that is tried before the first step has one inner step, in which this body does not step."""
    setup = set_up()
    before = setup.model.weight.detach().clone()
    for step in steps(setup):
        for x, _ in step:
            setup.model(x).square().mean().backward()
            if step.shard.inner == 1:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
    assert not torch.equal(before, setup.model.weight)


def test_a_grad_scaler_may_leave_out_all_inner_steps() -> None:
    setup = set_up(lambda m, o: DiLoCo(m, o, every=1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, backoff_factor=2.0**-40)
    setup.job.register(scaler=scaler)
    before = setup.model.weight.detach().clone()
    for step in steps(setup):
        for x, _ in step:
            scaler.scale(setup.model(x).square().mean() * 100).backward()
            scaler.step(setup.optimizer)
            scaler.update()
            setup.optimizer.zero_grad()
        if step.index == 0:
            assert torch.equal(before, setup.model.weight)
    assert not torch.equal(before, setup.model.weight)


def test_what_no_replica_has_for_itself_does_not_change_in_a_round() -> None:
    """Neither weights of another model, such as an average of them, nor the rate of the outer optimizer."""
    setup = set_up()
    average = nn.Linear(6, 2).requires_grad_(False)
    setup.job.register(average=average)
    with pytest.raises(StateChanged, match=r"average\.weight"):
        for _ in inner_steps(setup):
            average.weight.lerp_(setup.model.weight.detach(), 0.1)
    setup = set_up()
    with pytest.raises(StateChanged, match="learning rate of outer optimizer"):
        for _ in inner_steps(setup):
            setup.outer.outer_optimizer.param_groups[0]["lr"] *= 0.9


def test_a_parameter_that_is_trained_later_is_no_silent_part_of_a_replica() -> None:
    setup = set_up()
    other = nn.Linear(2, 2).requires_grad_(False)
    setup.job.register(other=other)
    with pytest.raises(StateChanged, match=r"other\.weight"):
        for step in steps(setup):
            for x, _ in step:
                other(setup.model(x)).square().mean().backward()
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            other.requires_grad_(True)
            setup.optimizer.add_param_group({"params": list(other.parameters())})


class Average:
    """Of weights, by hand: no module, and its state has tensors."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: value.clone() for name, value in model.state_dict().items()}

    def update(self, model: nn.Module) -> None:
        for name, value in model.state_dict().items():
            self.values[name].lerp_(value, 0.5)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = {name: value.clone() for name, value in state.items()}


def test_an_object_with_tensors_changes_after_the_inner_loop_and_not_in_it() -> None:
    setup = set_up()
    average = Average(setup.model)
    setup.job.register(average=average)
    wanted = average.values["weight"].clone()
    for step in steps(setup):
        for x, _ in step:
            setup.inner_step(x)
        average.update(setup.model)
        wanted.lerp_(setup.model.weight.detach(), 0.5)
    assert torch.equal(average.values["weight"], wanted)
    setup = set_up()
    average = Average(setup.model)
    setup.job.register(average=average)
    with pytest.raises(NotCarried, match="average has tensors that change"):
        for _ in inner_steps(setup):
            average.update(setup.model)


def test_nothing_is_cached_for_a_second_pass() -> None:
    setup = set_up()
    with pytest.raises(UsageError, match="cached"):
        for step in steps(setup):
            for _ in step:
                step.cached(lambda: 0)


@pytest.mark.parametrize(
    "options", [{"fragments": 2}, {"delay": 1}, {"alpha": 0.5, "delay": 1}, {"moments": "mean", "delay": 1}]
)
def test_a_replica_that_is_not_finite_is_left_with_the_round(options: dict[str, Any]) -> None:
    """In the round's last inner step, behind the difference or in a parameter of the other fragment."""
    every = 2 * options.get("fragments", 1)
    setup = set_up(lambda m, _: DiLoCo(m, torch.optim.AdamW(m.parameters(), lr=0.1), every=every, **options))
    optimizer = setup.outer.inner_optimizer
    job = make_job(Recorded())
    job.register(model=setup.model, optimizer=optimizer, outer=setup.outer)
    skipped = []
    for step in job.steps(shards=2, total=5, outer=setup.outer, nonfinite="skip"):
        for _ in step:
            setup.model(torch.randn(4, 6)).square().mean().backward()
            if step.index == 1 and step.shard.index == 1 and step.shard.inner == 1:
                cast(torch.Tensor, setup.model.weight.grad).fill_(torch.nan)
            optimizer.step()
            optimizer.zero_grad()
        skipped.append(step.metrics.get("elastic.nonfinite", 0.0))
    assert skipped == [0.0, 1.0, 0.0, 0.0, 0.0]
    assert all(bool(parameter.isfinite().all()) for parameter in setup.model.parameters())


class Leaving(Recorded):
    """Calls, while all wait for the result of a pass, what has to come before this worker leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], None]] = []
        self.going: NodeNotice | None = None  # type: ignore[assignment]

    def before_leaving(self, call: Callable[[], None]) -> None:
        self.calls.append(call)

    def finish(self) -> Partial | None:
        if self._op is not None and self._op.kind is OpKind.PASS:
            self.going = NodeNotice(because="spot", until_s=time.monotonic() + 60)
            for call in self.calls:
                call()
        return super().finish()


def test_a_worker_that_leaves_in_a_round_has_the_parameters_with_which_it_began() -> None:
    job = make_job(Leaving())
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    outer = DiLoCo(model, optimizer, every=2)
    job.register(model=model, optimizer=optimizer, outer=outer)
    seen: list[torch.Tensor] = []
    job.on_drain(lambda seconds, because: seen.append(model.weight.detach().clone()))
    for step in job.steps(shards=2, total=1, outer=outer):
        begun = model.weight.detach().clone()
        for _ in step:
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not torch.equal(model.weight, begun)
    assert len(seen) == 1 and torch.equal(seen[0], begun)


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
        for _ in inner_steps(setup):
            setup.job.state.seen[0] += 1


def test_an_undeclared_buffer_does_not_change_in_a_round() -> None:
    setup = set_up()
    setup.model.register_buffer("seen", torch.zeros(1))
    with pytest.raises(BufferChanged, match="seen"):
        for _ in inner_steps(setup):
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
