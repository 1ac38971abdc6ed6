"""What goes wrong in the middle of a run: each mistake as a user makes it, and the same error on all workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elastic.errors import ConfigError, NonFinite, NotCarried, Unregistered
from runtime.loop.job import Job
from runtime.loop.step import Step
from runtime.session import Session
from tests.unit.features import mlp
from tests.unit.jobs import SHARDS, Recorded, cross_entropy, dataset, make_job
from tests.unit.worlds import Killed, World

BAD = 2
"""The step in which it happens."""


def script(
    session: Session,
    *,
    body: Callable[[Step, Any], Any] = lambda step, loss: loss,
    after: Callable[[Step, nn.Sequential, torch.optim.Optimizer], object] = lambda step, model, optimizer: None,
    data: Any = None,
    **arguments: Any,
) -> tuple[Job, nn.Sequential]:
    """Five steps. body: loss -> loss; after: called behind optimizer.step()."""
    job = make_job(session)
    model = mlp(nn.BatchNorm1d(8), nn.ReLU())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=0.1)
    job.register(model=model, optimizer=optimizer)
    for step in job.steps(job.loader(data or dataset(), 16, shards=SHARDS), total=5, **arguments):
        for x, y in step:
            loss = body(step, cross_entropy(model(x), y))
            loss.backward()
            step.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        after(step, model, optimizer)
    return job, model


def digest(session: Session, **arguments: Any) -> str:
    job, _ = script(session, **arguments)
    found = job.digest()
    job.close()
    return found


def raised_by_all(kind: type[Exception], **arguments: Any) -> str:
    """In a world of three, all raise the same; returns what they say."""
    world = World(3)
    world.run(lambda session: digest(session, **arguments))
    assert {type(error) for error in world.errors.values()} == {kind}, world.errors
    (said,) = {str(error) for error in world.errors.values()}
    return said


# Parameters that become something else


def in_step(change: Callable[[nn.Sequential, torch.optim.Optimizer], object]) -> Any:
    return lambda step, model, optimizer: change(model, optimizer) if step.index == BAD else None


def widen(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    first = model.get_submodule("0")
    assert isinstance(first, nn.Linear)
    first.weight.data = torch.zeros(16, 6)


def grow(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model.append(nn.Linear(2, 2))
    optimizer.add_param_group({"params": list(model[-1].parameters())})


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda model, _: model.double(), NotCarried, "model.0.weight is float64 [8, 6], and was float32 [8, 6] when"),
        (lambda model, _: model.bfloat16(), NotCarried, "use torch.autocast"),
        (widen, NotCarried, "model.0.weight is float32 [16, 6], and was float32 [8, 6] when the loop began"),
        (grow, Unregistered, "parameter group 1 of optimizer holds a parameter of no registered module, or one that"),
    ],
)
def test_parameters_that_change_their_kind_are_named(change: Any, kind: type[Exception], words: str) -> None:
    assert words in raised_by_all(kind, after=in_step(change))


# Buffers that become something else


class Counting(nn.Module):
    """Has a buffer of its own, which `change` may replace: the script by itself in step BAD, or a shard of it."""

    seen: torch.Tensor

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor], in_pass: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)
        self.register_buffer("seen", torch.zeros(2))
        self.change, self.in_pass, self.step = change, in_pass, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.change(self.seen) if self.in_pass and self.step == BAD else self.seen + 1
        result: torch.Tensor = self.layer(x)
        return result

    def begin(self, step: int) -> None:
        self.step = step
        if step == BAD and not self.in_pass:
            self.seen = self.change(self.seen)


def count(session: Session, *arguments: Any) -> str:
    job = make_job(session)
    model = Counting(*arguments)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    job.register(buffers={"model.seen": "mean"}, model=model, optimizer=optimizer)
    for step in job.steps(job.loader(dataset(), 16, shards=SHARDS), total=5):
        model.begin(step.index)
        for x, y in step:
            cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return job.digest()


@pytest.mark.parametrize("in_pass", [True, False], ids=["in a pass", "between two steps"])
@pytest.mark.parametrize(
    ("change", "kind"),
    [(lambda seen: torch.cat([seen, seen]), "float32 [4]"), (lambda seen: seen.double(), "float64 [2]")],
    ids=["shape", "dtype"],
)
def test_buffers_that_change_their_kind_are_named(change: Any, kind: str, in_pass: bool) -> None:
    world = World(3)
    world.run(lambda session: count(session, change, in_pass))
    assert {type(error) for error in world.errors.values()} == {NotCarried}, world.errors
    (said,) = {str(error) for error in world.errors.values()}
    assert f"buffer model.seen is {kind}, and was float32 [2] when the loop began" in said
    assert "before the loop, and write into it" in said


# Gradients that are not finite


def overflows(step: Step, loss: Any) -> Any:
    """In one shard only."""
    return loss * float("inf") if step.index == BAD and step.shard.index == 1 else loss


def test_they_are_passed_on_and_counted_where_nothing_else_is_said() -> None:
    session = Recorded()
    job, model = script(session, body=overflows)
    job.close()
    assert [record.scalars.get("elastic.nonfinite") for record in session.records] == [None, None, 1.0, 1.0, 1.0]
    assert not all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -float("inf")])
def test_a_skipped_step_changes_neither_parameters_nor_buffers(factor: float) -> None:
    before: list[dict[str, torch.Tensor]] = []

    def after(step: Step, model: nn.Module, optimizer: object) -> None:
        before.append({name: value.clone() for name, value in model.state_dict().items()})

    session = Recorded()

    def body(step: Step, loss: Any) -> Any:
        return loss * factor if step.index == BAD else loss

    script(session, body=body, after=after, nonfinite="skip")[0].close()
    assert all(torch.equal(before[BAD - 1][name], before[BAD][name]) for name in before[0])
    assert not torch.equal(before[BAD]["0.weight"], before[BAD + 1]["0.weight"])
    assert [record.scalars.get("elastic.nonfinite") for record in session.records] == [None, None, 1.0, None, None]


@pytest.mark.parametrize("policy", ["pass", "skip"])
def test_all_workers_decide_alike_whoever_dies_or_joins(policy: str) -> None:
    """Also the one who dies is the one who had the bad shard; a newcomer enters with the bad step's result."""
    quiet = digest(Recorded(), body=overflows, nonfinite=policy)
    world = World(3, kills={"w1": (BAD + 1, 1)})
    world.run(
        lambda session: digest(session, body=overflows, nonfinite=policy), newcomers=1, asked_at=BAD, admit_at=BAD
    )
    assert {type(error) for error in world.errors.values()} == {Killed}
    assert world.digests == dict.fromkeys(("w0", "w2", "n0"), quiet)


def test_stopping_names_the_step_and_the_parameters_on_all_workers() -> None:
    said = raised_by_all(NonFinite, body=overflows, nonfinite="stop")
    assert "the gradient of model.0.weight, model.0.bias" in said
    assert "in pass 0 of step 2" in said and 'nonfinite="skip"' in said


def test_large_but_finite_gradients_are_none() -> None:
    """Their sum overflows."""
    session = Recorded()
    model = nn.Linear(2, 1, bias=False)
    job = make_job(session)
    job.register(model=model)
    for step in job.steps(shards=1, total=1, nonfinite="stop"):
        for _ in step:
            model(torch.full((2,), 3e38)).sum().backward()
    assert model.weight.grad is not None and "elastic.nonfinite" not in step.metrics
    job.close()


def test_a_sum_that_float16_cannot_hold_is_not_finite() -> None:
    session = Recorded()
    model = nn.Linear(1, 1, bias=False).half()
    job = make_job(session)
    job.register(model=model)
    with pytest.raises(NonFinite, match=r"the gradient of model\.weight"):
        for step in job.steps(shards=4, total=1, gradients="sum", nonfinite="stop"):
            for _ in step:
                (model.weight.sum() * 30_000).backward()


def test_another_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match='nonfinite=\'ignore\' must be "pass", "skip" or "stop"'):
        script(Recorded(), nonfinite="ignore")


# A dataset that raises


class Damaged:
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 37:
            raise OSError("cannot read it")
        x, y = dataset()[index]
        return x, y


def test_a_damaged_sample_ends_all_workers_with_its_number() -> None:
    """Whoever has the shard raises, and so do its heirs, one after the other."""
    world = World(3)
    world.run(lambda session: digest(session, data=Damaged()))
    assert {type(error) for error in world.errors.values()} == {OSError}
    for error in world.errors.values():
        assert error.__notes__ == ["job.loader: dataset[37] raised, for shard 1 of step 2 in epoch 0"]


class Exhausted:
    """Takes its samples from an iterator that has none."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return next(iter(()))


def test_data_that_raises_stop_iteration_does_not_look_like_the_end_of_a_pass() -> None:
    with pytest.raises(RuntimeError, match="the data raised StopIteration for shard 0 in pass 0 of step 0") as raised:
        digest(Recorded(), data=Exhausted())
    assert "dataset[0] raised" in raised.value.__cause__.__notes__[0]  # type: ignore[union-attr]
