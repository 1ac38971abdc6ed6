"""job.agree and job.allreduce: values that workers have for themselves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from elastic.errors import ConfigError, Disagree, LeaderOnly, NotCarried, UsageError
from runtime.loop.job import Job
from runtime.recovery.state import small_values
from runtime.session import Session
from tests.unit.jobs import Recorded, dataset, make_job, set_up
from tests.unit.worlds import FakeMember, Killed, World


def loop(session: Session, after: Callable[[Job, int], Any], total: int = 3) -> list[Any]:
    """What `after(job, step)` gave behind the inner loop of each step."""
    setup = set_up(make_job(session))
    found = []
    for step in setup.job.steps(setup.job.loader(dataset(), 16, shards=4), total=total):
        for x, _ in step:
            setup.model(x).sum().backward()
        setup.optimizer.step()
        setup.optimizer.zero_grad()
        found.append(after(setup.job, step.index))
    setup.job.close()
    return found


def in_world(
    after: Callable[[Job, int], Any], kills: dict[str, tuple[int, int]] | None = None, newcomers: int = 0
) -> tuple[World, dict[str, list[Any]]]:
    found: dict[str, list[Any]] = {}

    def script(session: FakeMember) -> str:
        found[session.worker_id] = loop(session, after)
        return ""

    world = World(3, kills=kills)
    world.run(script, newcomers=newcomers, asked_at=0, admit_at=1)
    return world, found


def own(job: Job) -> float:
    return float(job.worker_id[1:])


# agree


def test_everybody_gets_the_leaders_value() -> None:
    world, found = in_world(lambda job, step: job.agree({"from": job.worker_id, "x": torch.full((2,), own(job))}))
    assert world.errors == {}
    for values in found.values():
        assert [value["from"] for value in values] == ["w0"] * 3
        assert all(torch.equal(value["x"], torch.zeros(2)) for value in values)


def test_the_next_leader_decides_when_the_leader_dies() -> None:
    """Operation 2 is the first agree(), between the passes 1 and 3."""
    world, found = in_world(lambda job, step: job.agree(job.worker_id), kills={"w0": (2, 0)})
    assert found == {"w1": ["w1"] * 3, "w2": ["w1"] * 3}
    assert set(world.errors) == {"w0"}


@pytest.mark.parametrize(
    "value",
    [1, 0.1, -math.inf, True, None, "a", [1, (2, 3)], {"a": {1: 2}}, torch.arange(6).view(2, 3), torch.tensor(1.5)],
)
def test_a_value_comes_back_as_it_was(value: object) -> None:
    (found,) = loop(Recorded(), lambda job, step: job.agree(value), total=1)
    assert type(found) is type(value)
    if isinstance(value, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        found, value = found.tolist(), value.tolist()
    assert found == value


def test_a_bfloat16_value_comes_back_bit_by_bit() -> None:
    value = torch.tensor([0.1, math.nan], dtype=torch.bfloat16)
    packed = small_values.pack(value, "x")
    back = small_values.unpack(packed, torch.device)
    assert torch.equal(back.view(torch.int16), value.view(torch.int16))


def test_a_tensor_without_elements_comes_back() -> None:
    packed = small_values.pack([torch.empty(0, 3), torch.ones(1)], "x")
    empty, other = small_values.unpack(packed, torch.device)
    assert (tuple(empty.shape), empty.dtype, other.item()) == ((0, 3), torch.float32, 1.0)


def test_what_cannot_be_carried_is_named() -> None:
    with pytest.raises(NotCarried, match=r"job\.agree\(x\) is a .*Generator"):
        loop(Recorded(), lambda job, step: job.agree(torch.Generator()))
    with pytest.raises(ConfigError, match=r"80000 bytes.*registered module or job\.state"):
        loop(Recorded(), lambda job, step: job.agree(torch.zeros(20000)))


# allreduce


@pytest.mark.parametrize(("op", "expected"), [("mean", 1.0), ("sum", 3.0), ("max", 2.0), ("min", 0.0)])
def test_numbers_and_tensors_are_reduced_over_the_workers(op: small_values.Op, expected: float) -> None:
    def both(job: Job, step: int) -> object:
        return job.allreduce(own(job), op), job.allreduce(torch.full((2, 1), own(job)), op).tolist()

    world, found = in_world(both)
    assert world.errors == {}
    assert found == {name: [(expected, [[expected], [expected]])] * 3 for name in ("w0", "w1", "w2")}


def test_integers_are_added_exactly() -> None:
    large = (1 << 53) + 1
    _, found = in_world(lambda job, step: job.allreduce(torch.tensor([large]), "sum").item())
    assert found["w1"] == [3 * large] * 3


def test_a_worker_that_dies_takes_its_value_along_and_a_newcomer_brings_one() -> None:
    """w2 dies in the allreduce of step 0; n0 enters in step 1. A newcomer gets the same as those that were there."""
    world, found = in_world(lambda job, step: job.allreduce(1.0, "sum"), kills={"w2": (2, 0)}, newcomers=1)
    assert {type(error) for error in world.errors.values()} == {Killed}
    assert found["w0"] == found["w1"] == [2.0, 3.0, 3.0]
    assert found["n0"] == [3.0, 3.0]


@pytest.mark.parametrize("op", ["max", "min", "mean", "sum"])
def test_nan_stays_nan_whoever_has_it(op: small_values.Op) -> None:
    for values in ({"a": math.nan, "b": 1.0}, {"a": 1.0, "b": math.nan}):
        assert math.isnan(float(small_values.reduce(values, op)))


def test_different_kinds_are_a_disagreement_which_names_them() -> None:
    world, _ = in_world(lambda job, step: job.allreduce(torch.zeros(job.rank + 1)))
    assert {type(error) for error in world.errors.values()} == {Disagree}
    assert "allreduce(mean) of float32 [2]" in str(world.errors["w0"])


def test_a_call_by_the_leader_alone_is_told() -> None:
    world, _ = in_world(lambda job, step: job.allreduce(1.0) if job.is_leader else None)
    assert {type(error) for error in world.errors.values()} == {LeaderOnly}


@pytest.mark.parametrize(
    ("value", "op", "named"),
    [
        (torch.zeros(2, dtype=torch.int64), "mean", r'write x\.float\(\), or op="sum"'),
        (torch.zeros(0), "sum", "at least one"),
        ([1], "sum", "one real number"),
    ],
)
def test_what_cannot_be_reduced_is_refused(value: Any, op: small_values.Op, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        loop(Recorded(), lambda job, step: job.allreduce(value, op))


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(ConfigError, match='"mean", "sum", "max", "min"'):
        loop(Recorded(), lambda job, step: job.allreduce(1.0, "prod"))  # type: ignore[call-overload]


def test_both_belong_behind_the_inner_loop() -> None:
    setup = set_up(make_job())
    with pytest.raises(UsageError, match="before the loop"):
        setup.job.allreduce(1.0)
    for _ in next(setup.job.steps(shards=1, total=1)):
        with pytest.raises(UsageError, match="behind the inner loop"):
            setup.job.agree(1)
        break
    setup.job._detach()
