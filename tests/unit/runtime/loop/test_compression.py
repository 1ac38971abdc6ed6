"""--compression: the bits of the quiet run, whoever computes what, from fewer bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from elastic.checkpoints.series import Series
from elastic.checkpoints.settings import Settings
from elastic.checkpoints.storage import storage_at
from elastic.config import Compression
from elastic.errors import ConfigError
from runtime.allreduce.reduction.gradient_harvest import Harvest
from runtime.loop.job import Job
from runtime.loop.passes import NONFINITE, Nonfinite
from runtime.session import Op
from tests.unit import jobs
from tests.unit.jobs import SHARDS, Recorded, configure, cross_entropy, digest_of, set_up
from tests.unit.thoroughness import some
from tests.unit.worlds import Killed, World

STEPS = 6
BAD_AT = 3
ALL = ["bf16", "fp16", "int8"]


def script(factor: float = 1.0, nonfinite: Nonfinite = "pass") -> Callable[[Job], nn.Module]:
    """A training in which the loss of one shard in one step is multiplied by this factor."""

    def run(job: Job) -> nn.Module:
        setup = set_up(job)
        data = job.loader(jobs.dataset(), jobs.BATCH, shards=SHARDS, shuffle=True)
        for step in job.steps(data, total=STEPS, nonfinite=nonfinite):
            for x, y in step:
                scale = factor if (step.index, step.shard.index) == (BAD_AT, 1) else 1.0
                (cross_entropy(setup.model(x), y) * scale).backward()
            setup.optimizer.step()
            setup.optimizer.zero_grad()
        return setup.model

    return run


def quiet(compression: str, run: Callable[[Job], nn.Module] | None = None) -> str:
    return digest_of(Recorded("exact", compression), run or script())


@pytest.mark.parametrize("compression", ALL)
@pytest.mark.parametrize("workers", range(1, SHARDS + 2))
def test_any_number_of_workers_has_the_same_bits(workers: int, compression: str) -> None:
    world = World(workers, compression=compression)
    world.run(lambda session: digest_of(session, script()))
    assert not world.errors
    assert set(world.digests.values()) == {quiet(compression)}


def test_each_has_bits_of_its_own() -> None:
    assert len({quiet(compression) for compression in ("none", *ALL)}) == 1 + len(ALL)


@pytest.mark.parametrize("compression", ALL)
def test_deaths_and_a_newcomer_change_no_bit(compression: str) -> None:
    world = World(3, kills={"w1": (2, 1), "w0": (5, 0)}, compression=compression)
    world.run(lambda session: digest_of(session, script()), newcomers=1, asked_at=1, copy_at=1, admit_at=2)
    assert {worker: type(error) for worker, error in world.errors.items()} == {"w0": Killed, "w1": Killed}
    assert world.digests == dict.fromkeys(("w2", "n0"), quiet(compression))


@pytest.mark.parametrize("compression", ALL)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("nonfinite", ["skip", "pass"])
def test_what_is_no_number_in_one_shard_is_decided_alike(nonfinite: Nonfinite, bad: float, compression: str) -> None:
    """Also which NaN the parameters then have: its bits are in the digest."""
    run = script(bad, nonfinite)
    alone = Recorded("exact", compression)
    digest = digest_of(alone, run)
    assert [NONFINITE in record.scalars for record in alone.records].index(True) == BAD_AT
    for workers in some((2, 3), 1, (nonfinite, bad, compression)):
        world = World(workers, compression=compression)
        world.run(lambda session: digest_of(session, run))
        assert set(world.digests.values()) == {digest}


def test_a_sum_beyond_float16_is_found_like_an_infinity() -> None:
    session = Recorded("exact", "fp16")
    digest_of(session, script(1e6, "skip"))
    assert [NONFINITE in record.scalars for record in session.records] == [step == BAD_AT for step in range(STEPS)]
    session = Recorded("exact", "bf16")
    digest_of(session, script(1e6, "skip"))
    assert not any(NONFINITE in record.scalars for record in session.records)


@pytest.mark.parametrize("compression", ALL)
def test_a_run_goes_on_from_its_checkpoint(compression: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, Settings(root=str(tmp_path), every="4 steps"))
    digest = quiet(compression)
    (entry,) = Series(storage_at(str(tmp_path))).names()
    configure(monkeypatch, Settings(root=str(tmp_path), resume=str(entry)))
    assert quiet(compression) == digest


@pytest.mark.parametrize(("before", "after"), [("none", "bf16"), ("bf16", "none"), ("bf16", "fp16")])
def test_a_run_does_not_go_on_with_another_one(
    before: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(monkeypatch, Settings(root=str(tmp_path), every="4 steps"))
    quiet(before)
    (entry,) = Series(storage_at(str(tmp_path))).names()
    configure(monkeypatch, Settings(root=str(tmp_path), resume=str(entry)))
    with pytest.raises(ConfigError, match=f"begun with --compression {before}, and goes on with {after}"):
        quiet(after)


class Sized(Recorded):
    """A job of one that remembers the bytes of a leaf of each pass."""

    def __init__(self, compression: str) -> None:
        super().__init__("exact", compression)
        self.sizes: list[dict[str, int]] = []

    def begin(self, op: Op, fingerprint, groups=None, own=None, cuts=()) -> None:  # type: ignore[no-untyped-def]
        if groups:
            self.sizes.append({name: size * getattr(torch, name).itemsize for name, size in groups.items()})
        super().begin(op, fingerprint, groups, own, cuts)


def mixed(job: Job) -> nn.Module:
    """Gradients of four dtypes, and buffers that are merged; two backward passes a shard."""
    torch.manual_seed(0)
    half = [nn.Parameter(torch.randn(6, dtype=dtype) / 4) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    parameters = nn.ParameterList([*half, nn.Parameter(torch.randn(6, dtype=torch.float64))])
    model = nn.ModuleList([nn.Linear(6, 6), nn.BatchNorm1d(6), parameters])
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    job.register(model=model, optimizer=optimizer)
    data = job.loader(jobs.dataset(), jobs.BATCH, shards=SHARDS, shuffle=True)
    for step in job.steps(data, total=STEPS):
        for x, y in step:
            for part in (slice(0, 2), slice(2, 4)):
                scores = model[1](model[0](x[part]))
                wide = sum((scores * parameter.to(scores.dtype) for parameter in parameters), torch.zeros(6))
                cross_entropy(wide, y[part]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("compression", ALL)
def test_gradients_of_several_dtypes_and_buffers(compression: str) -> None:
    session, plain = Sized(compression), Sized("none")
    digest = digest_of(session, mixed)
    digest_of(plain, mixed)
    world = World(3, kills={"w1": (3, 1)}, compression=compression)
    world.run(lambda session: digest_of(session, mixed))
    assert set(world.digests.values()) == {digest}
    (of_wide,) = {sizes["float64"] for sizes in plain.sizes}
    for sizes in session.sizes:
        assert sizes["float64"] == of_wide, "the gradients of float64 stay as they are"
        name, narrow = {"bf16": ("bfloat16", 2 * 72), "fp16": ("float16", 2 * 72), "int8": ("int8", 256)}[compression]
        assert sizes[name] == narrow
        assert sizes["float32"] == 4 * (12 + 2), "buffers stay as they are"


@pytest.mark.parametrize("compression", ALL)
def test_a_parameter_of_another_dtype_may_have_no_element(compression: str) -> None:
    """What a leaf has is what the operation is told of."""
    parameters = [("full", nn.Parameter(torch.ones(5))), ("empty", nn.Parameter(torch.ones(0, dtype=torch.float64)))]
    harvest = Harvest(parameters, compression=Compression(compression))
    harvest.begin_pass(0, 0, 0)
    harvest.before(0)
    torch.cat([parameter.float() for _, parameter in parameters]).sum().backward()
    leaf = harvest.leaf(0, 1.0, {})
    leaf.settle()
    assert {name: len(flat) for name, flat in leaf.flats.items()} == harvest.groups()
    harvest.install(leaf, "mean")
    assert [parameter.grad.tolist() for _, parameter in parameters if parameter.grad is not None] == [[1.0] * 5, []]


@pytest.mark.parametrize(("compression", "at_most"), [("bf16", 0.5), ("fp16", 0.5), ("int8", 0.255)])
def test_a_leaf_has_so_many_bytes(compression: str, at_most: float) -> None:
    def large(job: Job) -> nn.Module:
        model = nn.Linear(200, 300)
        job.register(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
        for step in job.steps(shards=2, total=1):
            for _ in step:
                model(torch.ones(1, 200)).sum().backward()
        return model

    narrow, plain = Sized(compression), Sized("none")
    for session in (narrow, plain):
        digest_of(session, large)
    (before,), (after,) = (set(map(sum, (sizes.values() for sizes in of.sizes))) for of in (plain, narrow))
    assert after <= at_most * before


@pytest.mark.parametrize("compression", [Compression.BF16, Compression.FP16])
def test_a_nan_has_the_same_bits_whichever_it_was(compression: Compression) -> None:
    """The sign and the payload of a NaN depend on where in a tensor it was added."""
    model = nn.Linear(3, 1, bias=False)
    harvest = Harvest(list(model.named_parameters()), compression=compression)
    results = []
    for bits in (0x7FC00000, -0x00400000, 0x7FE00000):
        harvest.begin_pass(0, 0, 0)
        harvest.before(0)
        model.weight.grad = torch.tensor([[0x3F800000, bits, 0x40000000]], dtype=torch.int32).view(torch.float32)
        harvest.install(harvest.leaf(0, 1.0, {}), "sum")
        assert model.weight.grad.isnan().tolist() == [[False, True, False]]
        results.append(model.weight.grad.view(torch.int32).tolist())
    assert results[0] == results[1] == results[2]
