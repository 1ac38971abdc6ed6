"""--reduction fixed: the bits of the quiet run, also where a gradient does not fit its integers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic.checkpoints.series import Series
from elastic.checkpoints.settings import Settings
from elastic.checkpoints.storage import storage_at
from elastic.errors import ConfigError, NonFinite, UsageError
from runtime.allreduce.fixed_point.exponents import BlockExponents
from runtime.allreduce.reduction.gradient_harvest import Harvest
from runtime.loop.job import Job
from runtime.loop.passes import NONFINITE, Nonfinite
from runtime.recovery.state.training_state import Carrier, Values
from runtime.session import Op
from tests.unit import jobs
from tests.unit.jobs import SHARDS, Recorded, configure, cross_entropy, digest_of, set_up
from tests.unit.worlds import Killed, World

STEPS = 8
LARGE_AT = 5
ALL = ["fixed", "fixed64"]


def script(
    loss_of: Callable[[int, int], float] = lambda step, shard: 1.0, nonfinite: Nonfinite = "pass"
) -> Callable[[Job], nn.Module]:
    """A training whose losses are multiplied by what loss_of(step, shard) returns."""

    def run(job: Job) -> nn.Module:
        setup = set_up(job)
        data = job.loader(jobs.dataset(), jobs.BATCH, shards=SHARDS, shuffle=True)
        for step in job.steps(data, total=STEPS, nonfinite=nonfinite):
            for x, y in step:
                (cross_entropy(setup.model(x), y) * loss_of(step.index, step.shard.index)).backward()
            setup.optimizer.step()
            setup.optimizer.zero_grad()
        return setup.model

    return run


def grown(step: int, shard: int) -> float:
    """One shard's gradient is a million times the others' and the last ones'."""
    return 1e6 if (step, shard) == (LARGE_AT, 2) else 1.0


class Noted(Recorded):
    """A job of one that also remembers its operations."""

    def __init__(self, reduction: str) -> None:
        super().__init__(reduction)
        self.ops: list[Op] = []

    def begin(self, op: Op, fingerprint, groups=None, own=None, cuts=()) -> None:  # type: ignore[no-untyped-def]
        self.ops.append(op)
        super().begin(op, fingerprint, groups, own, cuts)

    @property
    def repeated(self) -> list[tuple[int, str]]:
        return [(op.step, op.label) for op in self.ops if op.label.startswith("again")]


@pytest.mark.parametrize("reduction", ALL)
@pytest.mark.parametrize("workers", range(1, SHARDS + 2))
def test_any_number_of_workers_has_the_same_bits(workers: int, reduction: str) -> None:
    quiet = digest_of(Recorded(reduction), script())
    world = World(workers, reduction=reduction)
    world.run(lambda session: digest_of(session, script()))
    assert not world.errors
    assert set(world.digests.values()) == {quiet}


def test_the_three_ways_differ_in_their_bits() -> None:
    assert len({digest_of(Recorded(reduction), script()) for reduction in ("exact", *ALL)}) == 3


@pytest.mark.parametrize("reduction", ALL)
def test_only_the_first_pass_and_one_with_a_far_larger_gradient_are_computed_again(reduction: str) -> None:
    session = Noted(reduction)
    digest_of(session, script(grown))
    assert session.repeated == [(0, "again 1"), (LARGE_AT, "again 1")]
    assert len(session.records) == STEPS


def test_gradients_that_grow_from_step_to_step_are_followed() -> None:
    """Those of the last step are 57 times as large as those of the first one, whose integers have room for less."""
    session = Noted("fixed")
    digest_of(session, script(lambda step, shard: 57.0 ** (step / (STEPS - 1))))
    assert session.repeated == [(0, "again 1")]


def test_a_word_that_comes_for_the_first_time_does_not_make_the_pass_be_computed_again() -> None:
    """All rows of the embedding have small gradients in every step, and those of the step's words far larger ones."""

    def words(job: Job) -> nn.Module:
        embedding = nn.Embedding(SHARDS * STEPS, 256)
        model = nn.Sequential(embedding, nn.Linear(256, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        job.register(model=model, optimizer=optimizer)
        for step in job.steps(shards=SHARDS, total=STEPS):
            for shard in step:
                word = torch.tensor([SHARDS * step.index + shard.index])
                loss: Any = cross_entropy(model(word), word % 2) + 1e-5 * embedding.weight.square().sum()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    session = Noted("fixed")
    digest_of(session, words)
    assert session.repeated == [(0, "again 1")]


@pytest.mark.parametrize("kills", [{}, {"w0": (LARGE_AT + 2, 0)}, {"w0": (LARGE_AT + 3, 1)}, {"w1": (LARGE_AT + 3, 0)}])
def test_a_gradient_that_does_not_fit_makes_all_workers_compute_the_pass_again(
    kills: dict[str, tuple[int, int]],
) -> None:
    """Also when one dies in that pass, or in its repetition."""
    quiet = Noted("fixed")
    digest = digest_of(quiet, script(grown))
    world = World(3, kills=dict(kills), reduction="fixed")
    world.run(lambda session: digest_of(session, script(grown)))
    assert {worker: type(error) for worker, error in world.errors.items()} == dict.fromkeys(kills, Killed)
    assert set(world.digests.values()) == {digest}
    labels = [(op.step, op.label) for op in world.ops.values() if op.label.startswith("again")]
    assert labels == quiet.repeated
    for session in world.sessions.values():
        if session.worker_id not in kills:
            assert [(r.step, r.scalars) for r in session.records] == [(r.step, r.scalars) for r in quiet.records]


@pytest.mark.parametrize(("copy_at", "admit_at"), [(0, 0), (LARGE_AT, LARGE_AT), (LARGE_AT - 1, LARGE_AT), (3, 6)])
def test_a_newcomer_copies_and_follows_through_a_pass_that_is_computed_again(copy_at: int, admit_at: int) -> None:
    quiet = digest_of(Recorded("fixed"), script(grown))
    world = World(2, reduction="fixed")
    world.run(
        lambda session: digest_of(session, script(grown)), newcomers=1, asked_at=0, copy_at=copy_at, admit_at=admit_at
    )
    assert not world.errors
    assert world.digests == {"w0": quiet, "w1": quiet, "n0": quiet}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_in_one_shard_is_decided_alike(bad: float) -> None:
    def run(job: Job) -> nn.Module:
        return script(lambda step, shard: bad if (step, shard) == (3, 1) else 1.0, nonfinite="skip")(job)

    quiet = Recorded("fixed")
    digest = digest_of(quiet, run)
    assert [NONFINITE in record.scalars for record in quiet.records] == [step == 3 for step in range(STEPS)]
    world = World(3, kills={"w1": (5, 0)}, reduction="fixed")
    world.run(lambda session: digest_of(session, run))
    assert set(world.digests.values()) == {digest}


def test_a_run_that_shall_stop_names_the_parameters() -> None:
    with pytest.raises(NonFinite, match=r"model\.0\.weight, model\.0\.bias"):
        digest_of(Recorded("fixed"), script(lambda step, shard: float("nan") if step == 1 else 1.0, nonfinite="stop"))


def test_a_gradient_with_an_infinity_is_undefined_as_a_whole_and_the_others_are_as_they_were() -> None:
    seen: list[torch.Tensor | None] = []

    def run(job: Job) -> nn.Module:
        a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
        model = nn.ParameterList([a, b])
        job.register(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.0))
        for step in job.steps(shards=4, total=1):
            for shard in step:
                factor = torch.tensor([1.0, float("inf") if shard.index == 1 else 1.0, 1.0])
                ((a * factor).sum() + 2 * b.sum()).backward()
            seen.extend(parameter.grad for parameter in (a, b))
        return model

    digest_of(Recorded("fixed"), run)
    assert seen[0] is not None and seen[0].isnan().all()
    assert seen[1] is not None and seen[1].tolist() == [2.0, 2.0]


def test_a_gradient_that_is_undefined_leaves_the_buffers_as_they_are() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 1))

    def run(job: Job) -> nn.Module:
        job.register(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.0))
        for step in job.steps(shards=4, total=1):
            for _ in step:
                (model(torch.randn(5, 3)).sum() * float("nan")).backward()
        return model

    digest_of(Recorded("fixed"), run)
    assert all(parameter.grad is None or parameter.grad.isnan().all() for parameter in model.parameters())
    assert all(buffer.isfinite().all() for buffer in model.buffers())


def test_gradients_that_grow_each_time_are_the_scripts_mistake() -> None:
    calls = [0]

    def unruly(step: int, shard: int) -> float:
        calls[0] += step == 1
        return 2.0 ** (6 * calls[0])

    with pytest.raises(UsageError, match="pass 0 of step 1 were much larger when the pass was computed again"):
        digest_of(Recorded("fixed"), script(unruly))


@pytest.mark.parametrize("reduction", ALL)
def test_a_run_goes_on_from_its_checkpoint_with_the_same_exponents(
    reduction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(monkeypatch, Settings(root=str(tmp_path), every="4 steps"))
    digest = digest_of(Recorded(reduction), script(grown))
    (entry,) = Series(storage_at(str(tmp_path))).names()
    configure(monkeypatch, Settings(root=str(tmp_path), resume=str(entry)))
    resumed = Noted(reduction)
    assert digest_of(resumed, script(grown)) == digest
    assert resumed.repeated == [(LARGE_AT, "again 1")]


@pytest.mark.parametrize(("before", "after"), [("fixed", "exact"), ("exact", "fixed"), ("fixed", "fixed64")])
def test_a_run_does_not_go_on_with_another_way_to_sum(
    before: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(monkeypatch, Settings(root=str(tmp_path), every="4 steps"))
    digest_of(Recorded(before), script())
    (entry,) = Series(storage_at(str(tmp_path))).names()
    configure(monkeypatch, Settings(root=str(tmp_path), resume=str(entry)))
    with pytest.raises(ConfigError, match=f"begun with --reduction {before}, and goes on with {after}"):
        digest_of(Recorded(after), script())


class TwoMeans(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.good: torch.Tensor
        self.bad: torch.Tensor
        self.w = nn.Parameter(torch.ones(1))
        self.register_buffer("good", torch.zeros(2))
        self.register_buffer("bad", torch.zeros(2))


def test_a_buffer_that_is_undefined_leaves_the_other_ones_as_they_are() -> None:
    model = TwoMeans()

    def run(job: Job) -> nn.Module:
        buffers = {"model.good": "mean", "model.bad": "mean"}
        job.register(buffers=buffers, model=model, optimizer=torch.optim.SGD(model.parameters(), 0.0))
        for step in job.steps(shards=4, total=1):
            for shard in step:
                model.good.add_(1.0)
                model.bad.add_(float("nan") if shard.index == 1 else 1.0)
                model.w.sum().backward()
        return model

    digest_of(Recorded("fixed"), run)
    assert model.good.tolist() == [1.0, 1.0] and model.bad.isnan().all()
    assert model.w.grad is not None and model.w.grad.tolist() == [1.0]


def test_a_buffer_of_the_first_shard_keeps_its_bits() -> None:
    model = TwoMeans()

    def run(job: Job) -> nn.Module:
        buffers = {"model.good": "mean", "model.bad": "first"}
        job.register(buffers=buffers, model=model, optimizer=torch.optim.SGD(model.parameters(), 0.0))
        for step in job.steps(shards=4, total=1):
            for shard in step:
                model.bad.copy_(torch.tensor([0.1, -0.0]) if shard.index == 0 else torch.tensor([5.0, 5.0]))
                model.w.sum().backward()
        return model

    digest_of(Recorded("fixed"), run)
    assert model.bad.view(torch.int32).equal(torch.tensor([0.1, -0.0]).view(torch.int32))


def test_integers_have_room_for_what_is_summed_and_no_more() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, affine=False))
    carrier = Carrier(Values())
    carrier.register(None, model=model)
    carrier.freeze()
    fixed = BlockExponents(always_wide=False)
    harvest = Harvest(carrier.parameters(), carrier.float_buffers(), carrier.int_buffers(), fixed=fixed)
    gradients, means = 3 * 2 + 2, 2 + 2
    assert harvest.groups() == {"int32": gradients, "int64": means + 2, "int16": 2}, "a flag for each buffer"
