"""The parts of runtime/outer, by numbers: schedules, fragments, rows, bytes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elastic.errors import ConfigError, NotCarried
from runtime.outer.fragments import cut, trained
from runtime.outer.replica_rows import ReplicaRows
from runtime.outer.schedule import RoundSchedule
from runtime.outer.traffic import WORKERS_MAX, bytes_of, sent_bytes, summed_bytes
from tests.unit.features import Lion


def test_fragments_are_staggered_and_each_comes_every_h_inner_steps() -> None:
    schedule = RoundSchedule(every=12, fragments=3, delay=1)
    assert (schedule.inner_steps, schedule.taken_after) == (4, 3)
    after: dict[int, list[int]] = {fragment: [] for fragment in range(3)}
    for step in range(9):
        after[schedule.fragment(step)].append((step + 1) * schedule.inner_steps)
    assert after == {0: [4, 16, 28], 1: [8, 20, 32], 2: [12, 24, 36]}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"every": 0}, "every=0"),
        ({"every": True}, "every=True"),
        ({"every": 2.0}, "every=2.0"),
        ({"every": 10, "fragments": 3}, "multiple"),
        ({"every": 6, "fragments": 2, "delay": 3}, "delay=3"),
        ({"every": 6, "delay": -1}, "delay=-1"),
    ],
)
def test_numbers_that_do_not_go_together_are_named(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        RoundSchedule(**arguments)


def layers(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(1, width, bias=False) for width in widths))


def test_a_number_of_fragments_cuts_neighbours_of_about_equal_size() -> None:
    parameters = trained(layers(5, 5, 5, 5, 10, 10))
    assert [[p.numel() for p in one] for one in cut(parameters, 2)] == [[5, 5, 5, 5], [10, 10]]
    assert [len(one) for one in cut(trained(layers(100, 1, 1)), 3)] == [1, 1, 1]
    assert [len(one) for one in cut(trained(layers(1, 1, 100)), 3)] == [1, 1, 1]
    with pytest.raises(ConfigError, match="fragments=7"):
        cut(parameters, 7)


def test_modules_as_fragments_have_each_parameter_once() -> None:
    model = layers(1, 2, 3)
    parameters = trained(model)
    assert [[p.numel() for p in one] for one in cut(parameters, [model[2], model[:2]])] == [[3], [1, 2]]
    with pytest.raises(ConfigError, match="1 trained parameters"):
        cut(parameters, [model[0], model[1]])
    with pytest.raises(ConfigError, match="fragment 1"):
        cut(parameters, [model, model[0]])
    with pytest.raises(ConfigError, match="nothing to train"):
        trained(layers(1).requires_grad_(False))


class Counting(torch.optim.Optimizer):
    """Keeps a Python int, a float, None and a bool."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["scale"] = 0.5 / state["count"]
                state["nothing"], state["on"] = None, True
                parameter.data -= 0.1 * parameter.grad * state["scale"]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "adam fused": lambda p: torch.optim.Adam(p, 0.01, fused=True, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "rprop": lambda p: torch.optim.Rprop(p, 0.1),
    "nadam": lambda p: torch.optim.NAdam(p, 0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.5),
    "lion": lambda p: Lion(p, 0.01),
    "python numbers": Counting,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_replica_that_comes_and_goes_trains_as_one_that_stays(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)
    optimizer = OPTIMIZERS[name](model.parameters())
    stays = copy.deepcopy(model)
    reference = OPTIMIZERS[name](stays.parameters())
    rows = ReplicaRows(3, trained(model), optimizer, own_parameters=True)
    for step in range(4):
        for replica in range(3):
            rows.restore(replica)
            for one, by in ((model, optimizer), (stays, reference)) if replica == 1 else ((model, optimizer),):
                for place, parameter in enumerate(one.parameters()):
                    # The last parameter has no gradient in the first steps, so nothing is kept of it.
                    unused = place == 3 and step < 2
                    parameter.grad = None if unused else torch.full_like(parameter, 0.1 * (place + step + replica))
                by.step()
            rows.keep(replica)
        optimizer.state.clear()
    rows.restore(1)
    for mine_now, other in zip(model.parameters(), stays.parameters(), strict=True):
        assert torch.equal(mine_now, other)
        assert optimizer.state.get(mine_now, {}).keys() == reference.state.get(other, {}).keys()
        for key, value in reference.state.get(other, {}).items():
            mine = optimizer.state[mine_now][key]
            if isinstance(value, torch.Tensor):
                assert torch.equal(mine, value) and mine.dtype == value.dtype
            else:
                assert mine == value and type(mine) is type(value)


def test_a_shared_row_is_merged_by_its_mean() -> None:
    model = layers(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    shared = ReplicaRows(9, trained(model), optimizer, own_parameters=False, shared=True)
    assert shared.merge == "mean" and shared.float32.shape == (1, 3)
    optimizer.state[trained(model)[0]]["momentum_buffer"] = torch.full((2, 1), 5.0)
    shared.keep(7)
    optimizer.state.clear()
    shared.restore(3)
    assert optimizer.state[trained(model)[0]]["momentum_buffer"].tolist() == [[5.0], [5.0]]
    assert ReplicaRows(1, trained(model), optimizer, own_parameters=False).merge == "rows"


def test_an_optimizer_whose_state_is_no_number_is_refused() -> None:
    class Naming(Counting):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["name"] = "of it"

    model = layers(2)
    with pytest.raises(NotCarried, match="'name'"):
        ReplicaRows(2, trained(model), Naming(model.parameters()), own_parameters=False)


def test_a_state_that_changes_its_shape_is_refused() -> None:
    model = layers(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    rows = ReplicaRows(2, trained(model), optimizer, own_parameters=False)
    optimizer.state[trained(model)[0]]["momentum_buffer"] = torch.zeros(7)
    with pytest.raises(NotCarried, match="momentum_buffer"):
        rows.keep(0)


def test_bytes_are_those_of_the_formula() -> None:
    assert bytes_of({"float32": 10, "bfloat16": 3, "int8": 5, "float64": 1}) == 40 + 6 + 5 + 8
    assert summed_bytes(100, 200, 4, 10) == 910
    assert sent_bytes(1000, replicas=1000, workers=WORKERS_MAX + 1) == pytest.approx(2000, rel=0.01)
    assert sent_bytes(1000, replicas=4, workers=1) == 0
    assert sent_bytes(1000, replicas=4, workers=2) == pytest.approx(1000)
    assert sent_bytes(1000, replicas=4, workers=4) == pytest.approx(1500)
    assert sent_bytes(1000, replicas=8, workers=3) > sent_bytes(1000, replicas=12, workers=3)
