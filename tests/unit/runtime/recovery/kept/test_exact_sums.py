"""Sums of FSDP2's gradients have the same bits in any world; what would not have them is refused by name."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import elastic
from elastic.errors import ConfigError, UsageError
from runtime.recovery.kept.exact_sums import SCALE, dealt
from runtime.recovery.kept.keep import KeptScript
from tests.unit.sources import ROOT


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def digests(*runs: str) -> dict[str, set[str]]:
    """Name -> digests. runs: names and worlds, as in worlds.py."""
    program = [sys.executable, "-m", "tests.unit.runtime.recovery.kept.worlds", *runs]
    done = subprocess.run(program, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found: dict[str, set[str]] = {}
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == sum(len(run.partition(":")[2]) for run in runs)
    for name, _, digest in lines:
        found.setdefault(name, set()).add(digest)
    return found


def test_a_training_has_the_same_bits_in_worlds_of_1_2_and_3_ranks() -> None:
    found = digests("exact:123", "plain:13")
    assert len(found["exact"]) == 1
    assert len(found["plain"]) == 2, "torch's own sums differ, so this model tells the difference"


@pytest.mark.long
def test_so_it_has_with_foreach_with_bf16_and_with_a_loss_that_is_infinite() -> None:
    assert [len(each) for each in digests("foreach:124", "bf16:124", "nan:124").values()] == [1, 1, 1]


@pytest.mark.long
def test_so_it_has_with_replicas() -> None:
    """Two of them, of two shards each, beside shards alone."""
    found = digests("exact:13", "hsdp:14", "nan:1", "hsdp-nan:4")
    assert len(found["exact"] | found["hsdp"]) == 1
    assert len(found["nan"] | found["hsdp-nan"]) == 1


@pytest.mark.long
def test_so_it_has_with_tensor_parallelism_of_one_size() -> None:
    """Of two ranks, in one shard and in two."""
    assert [len(each) for each in digests("tp:24", "tp-nan:24").values()] == [1, 1]


@given(st.integers(1, 40), st.integers(1, 12))
def test_each_unit_counts_once_and_all_ranks_have_as_many_turns(units: int, world: int) -> None:
    every = [dealt(units, rank, world) for rank in range(world)]
    counting = sorted(unit.index for turns in every for unit in turns if not unit.idle)
    assert counting == list(range(units))
    assert len({len(turns) for turns in every}) == 1
    assert all(0 <= unit.index < units for turns in every for unit in turns)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, *, both: bool = True) -> Any:
        found = self.first(x)
        return self.second(found) if both else found


def script(units: int = 3) -> tuple[Any, KeptScript]:
    torch.manual_seed(0)
    model: Any = Two()
    fully_shard(model.second)
    fully_shard(model)
    return model, elastic.keep(model, units=units)


def gradients(model: Any) -> list[torch.Tensor]:
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


def batch() -> torch.Tensor:
    """Of the unit that has just begun: torch is seeded."""
    return torch.randn(4, 3)


def test_the_loop_finds_the_sum_of_all_units_in_its_gradients() -> None:
    model, kept = script()
    for _ in kept.units():
        model(batch()).square().sum().backward()
    found = gradients(model)
    torch.manual_seed(0)
    plain = Two()
    for _ in kept.units():
        plain(batch()).square().sum().backward()
    for mine, parameter in zip(found, plain.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(mine, parameter.grad)


def test_the_generators_are_seeded_from_step_and_unit() -> None:
    _, kept = script()
    first = [(unit, float(torch.rand(1))) for unit in kept.units()]
    assert [(unit, float(torch.rand(1))) for unit in kept.units()] == first
    kept.step += 1
    later = [(unit, float(torch.rand(1))) for unit in kept.units()]
    assert len({value for _, value in first + later}) == 6


def _outside(model: Any, kept: KeptScript) -> None:
    model(batch()).sum().backward()


def _twice(model: Any, kept: KeptScript) -> None:
    for _ in kept.units():
        model(batch()).sum().backward()
        model(batch()).sum().backward()


def _unsynchronized(model: Any, kept: KeptScript) -> None:
    for unit in kept.units():
        model.set_requires_gradient_sync(unit == 2)
        model(batch()).sum().backward()


def _unused(model: Any, kept: KeptScript) -> None:
    for unit in kept.units():
        model(batch(), both=unit != 1).sum().backward()


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        (_outside, r"gradients of model.* outside `for unit in kept.units\(\)`"),
        (_twice, r"gradients of model.* twice in a unit"),
        (_unsynchronized, r"gradients of model.* came in turns \[3\] of the 3 .*set_requires_gradient_sync"),
        (_unused, r"gradients of model\.second came in turns \[1, 3\] of the 3 of this step"),
    ],
)
def test_a_loop_without_exact_sums_is_refused(loop: Callable[[Any, KeptScript], None], said: str) -> None:
    model, kept = script()
    with pytest.raises(UsageError, match=said):
        loop(model, kept)


def test_a_step_that_was_left_leaves_nothing_for_the_next_one() -> None:
    model, kept = script()
    for _ in kept.units():
        model(batch()).sum().backward()
        break
    model.zero_grad()
    for _ in kept.units():
        model(batch()).sum().backward()
    found = gradients(model)
    other, again = script()
    for _ in again.units():
        other(batch()).sum().backward()
    assert all(map(torch.equal, found, gradients(other)))


@pytest.mark.parametrize("factor", [math.inf, math.nan, 2.0 ** (61 - SCALE)])
def test_what_cannot_be_summed_is_nan_and_so_are_clipped_gradients(factor: float) -> None:
    model, kept = script()
    for unit in kept.units():
        (model(batch()).sum() * (factor if unit == 1 else 1.0)).backward()
    assert all(bool(each.isnan().all()) for each in gradients(model))
    assert math.isnan(kept.clip_norm(1.0))
    for _ in kept.units():
        model.zero_grad()
        model(batch()).sum().backward()
    assert not any(bool(each.isnan().any()) for each in gradients(model))


def test_the_norm_is_that_of_torch() -> None:
    model, kept = script()
    for _ in kept.units():
        model(batch()).square().sum().backward()
    before = gradients(model)
    norm = float(nn.utils.get_total_norm(before))
    assert kept.clip_norm(1e9) == pytest.approx(norm)
    assert all(map(torch.equal, before, gradients(model))), "nothing was to be clipped"
    assert kept.clip_norm(0.5) == pytest.approx(norm)
    assert float(nn.utils.get_total_norm(gradients(model))) == pytest.approx(0.5, rel=1e-4)
    model.zero_grad()
    assert kept.clip_norm(0.5) == 0.0


def test_a_norm_that_is_a_sum_of_floats_is_refused_also_where_it_was_imported_before() -> None:
    clip = nn.utils.clip_grad_norm_
    plain = nn.Linear(2, 2)
    plain(torch.ones(1, 2)).sum().backward()
    model, kept = script()
    for _ in kept.units():
        model(batch()).square().sum().backward()
    before = gradients(model)
    with pytest.raises(UsageError, match=r"write kept.clip_norm\(limit\)"):
        clip(model.parameters(), 0.5)
    assert all(map(torch.equal, before, gradients(model)))
    assert float(clip(plain.parameters(), 1.0)) == pytest.approx(6**0.5), "of a model that is not sharded it is torch's"


def test_the_norm_of_zeros_is_zero() -> None:
    model, kept = script()
    for _ in kept.units():
        (model(batch()).sum() * 0.0).backward()
    assert kept.clip_norm(0.5, model.parameters()) == 0.0


def fused() -> KeptScript:
    model: Any = fully_shard(Two())
    return elastic.keep(model, torch.optim.AdamW(model.parameters(), fused=True), units=3)


def muon() -> KeptScript:
    model: Any = fully_shard(Two())
    weights = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    return elastic.keep(model, torch.optim.Muon(weights), units=3)


def parallel(*, replicas: bool) -> KeptScript:
    """Tensor parallelism with replicas of shards, or beside shards."""
    mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("replicas", "shards", "parallel"))
    model: Any = Two()
    if replicas:
        parallelize_module(model.first, mesh["parallel"], ColwiseParallel())
        fully_shard(model, mesh=mesh["replicas", "shards"])
    else:
        parallelize_module(model, mesh["parallel"], {"first": ColwiseParallel()})
        fully_shard(model.second, mesh=mesh["shards"])
    return elastic.keep(model, units=3)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: parallel(replicas=True), r"model is sharded over .*, or shards and then tensor parallelism"),
        (lambda: parallel(replicas=False), r"model.first.weight is sharded without fully_shard\(\), as by tensor"),
        (lambda: elastic.keep(Two(), units=3), r"none of the objects has a module with fully_shard\(\)"),
        (lambda: script(0), r"units=0 must be an integer from 1 to 4096"),
        (fused, r"optimizer has fused=True"),
        (muon, r"optimizer is Muon, which does not compute each element of a parameter for itself"),
        (lambda: elastic.keep(Two()).units(), r"needs elastic.keep\(..., units=N\)"),
        (lambda: _plain_clip(), r"a gradient is no DTensor"),
    ],
)
def test_what_is_not_exact_is_refused_by_name(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


def _plain_clip() -> float:
    model = Two()
    model(torch.ones(3)).sum().backward()
    return elastic.keep(model).clip_norm(1.0)
