"""Modules and long tensors that callbacks of Trainer keep: newcomers and resumed runs have them, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from elastic.errors import ConfigError
from runtime.frontends.frameworks import long_tensors, trainer_callbacks
from runtime.frontends.frameworks.long_tensors import CallbackReader, CallbackTensors
from runtime.frontends.frameworks.plain_state import ELEMENTS_MAX

LONG = ELEMENTS_MAX + 1


class Helper:
    """An object of a user's own."""

    def __init__(self, value: float) -> None:
        self.updates = int(value)
        self.shadow = [torch.full((LONG,), value), torch.full((2,), value)]


class Keeps:
    """A callback."""

    def __init__(self, value: float, model: nn.Module | None = None) -> None:
        self.number = value
        self.module = nn.Linear(3, 2)
        for parameter in self.module.parameters():
            nn.init.constant_(parameter, value)
        self.module.register_buffer("count", torch.tensor(int(value)))
        self.by_name: dict[str, Any] = {"vector": torch.full((LONG,), value), "step": int(value)}
        self.helper = Helper(value)
        self.model = model


def everything(callback: Keeps) -> list[Any]:
    tensors = [*callback.module.state_dict().values(), callback.by_name["vector"], *callback.helper.shadow]
    plain = [callback.number, callback.by_name["step"], callback.helper.updates]
    return [*plain, *(value.tolist() for value in tensors)]


def kept(callbacks: list[Any], model: nn.Module | None = None, apart: list[object] | None = None) -> list[Any]:
    return trainer_callbacks.kept(callbacks, CallbackReader(model, apart or []))


def put_back(callbacks: list[Any], state: list[Any], model: nn.Module | None = None, *, strict: bool = True) -> None:
    trainer_callbacks.put_back(callbacks, state, CallbackReader(model), strict=strict)


def moved(giver: Any, taker: Any, *, strict: bool = True) -> None:
    put_back([taker], kept([giver]), strict=strict)


def test_modules_long_tensors_and_objects_with_such_are_carried() -> None:
    giver, taker = Keeps(2.0), Keeps(1.0)
    module = taker.module
    moved(giver, taker)
    assert everything(taker) == everything(giver)
    assert taker.module is module and taker.module.weight.requires_grad
    taker.by_name["vector"].zero_()
    taker.helper.shadow[0].zero_()
    assert giver.by_name["vector"].sum() == 2 * LONG and giver.helper.shadow[0].sum() == 2 * LONG


def test_they_are_told_without_a_copy_and_those_of_the_model_are_not_told() -> None:
    model = nn.Sequential(nn.Linear(LONG, 1), nn.Linear(3, 2))
    giver = Keeps(2.0, model)
    giver.head = model[1]  # type: ignore[attr-defined]
    giver.views = {"weight": model[0].weight.data, "of": "the model"}  # type: ignore[attr-defined]
    ((_, _, told),) = kept([giver], model)
    assert told["values"].keys() == {"by_name"} and told["modules"].keys() == {"module"}
    assert told["values"]["by_name"]["vector"].data_ptr() == giver.by_name["vector"].data_ptr()
    assert told["modules"]["module"]["weight"].data_ptr() == giver.module.weight.data_ptr()


class Data(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.rows = torch.zeros(LONG)


class OwnTrainer:
    def __init__(self) -> None:
        self.average, self.rows = nn.Linear(2, 2), [torch.zeros(LONG)]


def test_data_and_the_trainer_are_not_told() -> None:
    class Refers:
        def __init__(self) -> None:
            self.data, self.trainer = Data(), OwnTrainer()
            self.rows = self.trainer.rows

    callback = Refers()
    ((_, _, told),) = kept([callback], apart=[callback.trainer])
    assert told["values"].keys() == {"rows"} and told["modules"] == told["objects"] == {}


def test_what_torch_cannot_write_is_not_told() -> None:
    class Odd:
        def __init__(self) -> None:
            self.sparse = torch.eye(LONG).to_sparse()
            self.meta = torch.zeros(LONG, device="meta")
            self.conjugate = torch.zeros(LONG, dtype=torch.complex64).conj()
            self.module = nn.Module()
            self.module.register_buffer("spread", torch.zeros(1).expand(LONG))
            self.lazy = nn.LazyLinear(3)
            self.plain = 3

    assert kept([Odd()])[0][1:] == [{"plain": 3}, long_tensors.NOTHING]


def test_tensors_stay_those_that_other_objects_have() -> None:
    class Shares:
        def __init__(self, value: float) -> None:
            self.average = nn.Linear(LONG, 1)
            nn.init.constant_(self.average.weight, value)
            self.shadow = {"weight": self.average.weight.data}
            self.learnt = torch.full((LONG,), value, requires_grad=True)
            self.optimizer = torch.optim.SGD([self.learnt], lr=0.1)
            with torch.inference_mode():
                self.frozen = nn.Linear(3, 3)
                nn.init.constant_(self.frozen.weight, value)

    taker = Shares(1.0)
    moved(Shares(2.0), taker)
    assert taker.shadow["weight"].data_ptr() == taker.average.weight.data_ptr() and taker.shadow["weight"].mean() == 2
    (learnt,) = taker.optimizer.param_groups[0]["params"]
    assert learnt is taker.learnt and learnt.requires_grad and learnt.mean() == 2
    assert taker.frozen.weight.detach().mean() == 2


@pytest.mark.parametrize("name", ["module", "helper"])
def test_what_a_worker_lacks_is_named_once_training_has_begun(name: str) -> None:
    taker = Keeps(1.0)
    setattr(taker, name, None)
    moved(Keeps(2.0), taker, strict=False)
    assert taker.number == 2.0 and taker.by_name["step"] == 2
    with pytest.raises(ConfigError, match=f"{name} of callback {__name__}.Keeps has tensors in the other workers"):
        moved(Keeps(2.0), taker)


@pytest.mark.parametrize("module", [nn.Linear(4, 2), nn.LazyLinear(2)])
def test_a_module_of_another_shape_is_named(module: nn.Module) -> None:
    wider: Any = Keeps(1.0)
    wider.module = module
    with pytest.raises(ConfigError, match="make it in __init__"):
        moved(Keeps(2.0), wider)


def test_a_callback_with_long_tensors_alone_has_to_be_in_all_workers() -> None:
    class Alone:
        def __init__(self) -> None:
            self.module = nn.Linear(2, 2)

    with pytest.raises(ConfigError, match="Alone has a state in the other workers"):
        put_back([], kept([Alone()]))
    with pytest.raises(ConfigError, match="Alone has a state in this worker"):
        put_back([Alone()], [])
    alone = Alone()
    put_back([alone], [], alone.module)


CHANGES: list[Callable[[Keeps], object]] = [
    lambda callback: nn.init.zeros_(callback.module.weight),
    lambda callback: callback.module.weight.data.mul_(0.5),
    lambda callback: callback.by_name["vector"].add_(1),
    lambda callback: callback.by_name.update(vector=callback.by_name["vector"] + 1),
    lambda callback: callback.helper.shadow[1].add_(1),
]


def told_of(tensors: CallbackTensors, *callbacks: Any, model: nn.Module | None = None) -> long_tensors.Told:
    """What is told of the last one of these, when a step is handed out."""
    return tensors.note(trainer_callbacks.long_of(kept([*callbacks], model)), model)[-1]


def noted(tensors: CallbackTensors, *callbacks: Keeps) -> tuple[str, Keeps]:
    """(how the last one of these is told, another callback that has got it), when a step is handed out."""
    ((name, plain, long),) = kept([callbacks[-1]])
    told = told_of(tensors, *callbacks)
    taker = Keeps(2.0)
    put_back([taker], [[name, plain, told]])
    if not any(told.values()):
        return "not", taker
    places = [[tensor.data_ptr() for tensor in long_tensors._all_tensors(found)] for found in (told, long)]
    return "itself" if set(places[0]) <= set(places[1]) else "copied", taker


@pytest.mark.parametrize("change", CHANGES)
def test_a_callback_that_changes_tensors_before_the_gradients_is_copied(change: Callable[[Keeps], object]) -> None:
    tensors, callback, found = CallbackTensors(), Keeps(2.0), []
    for step in range(4):
        before = everything(callback)
        how, taker = noted(tensors, Keeps(3.0), callback)
        found.append(how)
        change(callback)
        tensors.look()
        assert not step or everything(taker) == before
    replaces = change is CHANGES[3]  # what was told stays as it was
    assert found == (["not", "copied", "itself", "itself"] if replaces else ["not", "copied", "copied", "copied"])


@pytest.mark.parametrize("change", CHANGES)
def test_a_callback_that_changes_tensors_behind_the_step_is_copied_once(change: Callable[[Keeps], object]) -> None:
    tensors, callback, found = CallbackTensors(), Keeps(2.0), []
    for _ in range(4):
        before = everything(callback)
        how, taker = noted(tensors, callback)
        found.append(how)
        tensors.look()
        assert how == "not" or everything(taker) == before
        change(callback)
    assert found == ["not", "copied", "itself", "itself"]


def test_a_callback_that_begins_to_change_tensors_before_the_gradients_is_refused() -> None:
    tensors, callback = CallbackTensors(), Keeps(2.0)
    for _ in range(3):
        noted(tensors, callback)
        tensors.look()
        CHANGES[0](callback)
        nn.init.ones_(callback.module.weight)
    noted(tensors, callback)
    CHANGES[0](callback)
    with pytest.raises(ConfigError, match=r"callback .*Keeps changes tensors .* as in on_step_end\(\)"):
        tensors.look()


def test_between_two_batches_of_a_step_callbacks_may_change_tensors_at_any_time() -> None:
    tensors, callback = CallbackTensors(copies=True), Keeps(2.0)
    for step in range(6):
        how, _ = noted(tensors, callback)
        assert how == ("copied" if step > 2 else "not")
        if step >= 2:
            CHANGES[1](callback)
        tensors.look()


def test_what_was_loaded_is_told_from_then_on() -> None:
    """A resumed run has what the earlier one has changed, and may not change it for long."""
    tensors, callback = CallbackTensors(), Keeps(2.0)
    tensors.loaded(trainer_callbacks.long_of(kept([Keeps(3.0)])))
    assert noted(tensors, callback)[0] == "copied"


class Late:
    """A callback that makes what it keeps when training has begun."""


def test_tensors_that_a_callback_gets_when_training_has_begun_are_told() -> None:
    tensors, callback = CallbackTensors(), Keeps(2.0)
    made: Any = callback
    assert noted(tensors, callback)[0] == "not"
    made.best = {"weight": torch.full((LONG,), 7.0)}
    made.helper.rows = [nn.Parameter(torch.full((LONG,), 8.0))]
    told = told_of(tensors, callback)
    assert told["values"].keys() == {"best"} and not told["modules"] and not tensors.late
    taker: Any = Keeps(2.0)
    long_tensors.put_back(taker, told, "", strict=True)
    assert taker.best["weight"].mean() == 7 and taker.helper.rows[0].mean() == 8


def test_a_module_that_a_callback_makes_when_training_has_begun_is_told_if_it_may_differ_elsewhere() -> None:
    """A copy of the model is another one in a process that makes it later; what nobody changes is everywhere alike."""
    model, callback, tensors = nn.Linear(3, 2), Late(), CallbackTensors()
    made: Any = callback
    assert told_of(tensors, callback, model=model) == long_tensors.NOTHING
    made.metric = nn.Linear(2, 2)
    assert told_of(tensors, callback, model=model) == long_tensors.NOTHING and not tensors.late
    made.best = copy.deepcopy(model)
    told = told_of(tensors, callback, model=model)
    assert told["modules"].keys() == {"best"} and tensors.late.startswith("best of ")
    with pytest.raises(ConfigError, match="best of callback Late has tensors"):
        long_tensors.put_back(Late(), told, "callback Late", strict=True)
    nn.init.zeros_(made.metric.weight)
    assert told_of(tensors, callback, model=model)["modules"].keys() == {"best", "metric"}


class Helped:
    """A callback with an object that makes its tensors later."""

    def __init__(self) -> None:
        self.helper = Late()


def test_what_an_object_that_was_there_gets_later_is_told_and_filled() -> None:
    tensors, callback = CallbackTensors(behind=True), Helped()
    helper: Any = callback.helper
    assert told_of(tensors, callback) == long_tensors.NOTHING
    helper.shadow = {"weight": torch.full((LONG,), 7.0)}
    told, taker = told_of(tensors, callback), Helped()
    long_tensors.put_back(taker, told, "callback", strict=True)
    found: Any = taker.helper
    assert not tensors.late and found.shadow["weight"].mean() == 7


def test_what_callbacks_make_of_the_weights_when_training_begins_is_told() -> None:
    """The next round makes it of those with which it goes on."""
    tensors, model, callback = CallbackTensors(behind=True), nn.Linear(3, 2), Late()
    made: Any = callback
    made.data = torch.zeros(LONG)
    for _ in range(2):
        tensors.begin(trainer_callbacks.long_of(kept([callback], model)))
        made.reference, made.first = copy.deepcopy(model), torch.ones(LONG)
    told = told_of(tensors, callback, model=model)
    assert (set(told["modules"]), set(told["values"])) == ({"reference"}, {"first"}) and not tensors.late


def test_a_module_that_is_cast_or_whose_tables_grow_is_followed() -> None:
    tensors, callback, taker = CallbackTensors(behind=True), Keeps(2.0), Keeps(2.0)
    told_of(tensors, callback)
    callback.module.double()
    assert told_of(tensors, callback) == long_tensors.NOTHING
    callback.module.register_buffer("count", torch.arange(5))
    long_tensors.put_back(taker, told_of(tensors, callback), "callback", strict=True)
    assert taker.module.get_buffer("count").tolist() == [0, 1, 2, 3, 4]


def test_a_value_that_is_bound_anew_with_another_dtype_has_changed() -> None:
    tensors, callback = CallbackTensors(), Keeps(2.0)
    made: Any = callback
    made.centres = torch.zeros(LONG)
    told_of(tensors, callback)
    made.centres = torch.zeros(LONG, dtype=torch.float64)
    assert told_of(tensors, callback)["values"].keys() == {"centres"}


def test_a_module_that_is_filled_and_cast_at_once_has_changed() -> None:
    tensors, callback = CallbackTensors(), Keeps(2.0)
    told_of(tensors, callback)
    nn.init.ones_(callback.module.weight)
    callback.module.half()
    assert told_of(tensors, callback)["modules"].keys() == {"module"}


def test_a_module_that_does_not_fit_is_left_as_it_is() -> None:
    giver, taker = Keeps(2.0), Keeps(1.0)
    giver.module = nn.Linear(4, 2)
    giver.module.register_buffer("count", torch.arange(5))
    moved(giver, taker, strict=False)
    assert int(taker.module.get_buffer("count")) == 1 and taker.module.weight.detach().mean() == 1


def test_a_table_that_two_modules_share_stays_one() -> None:
    def made(size: int) -> Any:
        callback: Any = Late()
        callback.teacher = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        table = torch.arange(size)
        for part in callback.teacher:
            part.register_buffer("table", table)
        return callback

    taker = made(3)
    moved(made(5), taker)
    first, second = taker.teacher
    assert first.table is second.table and first.table.tolist() == [0, 1, 2, 3, 4]


class Answers(dict[str, Any]):
    """As the configurations of some libraries."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def test_objects_that_answer_any_name_are_no_tensors() -> None:
    callback = Late()
    made: Any = callback
    made.config = Answers(rate=0.1)
    made.frozen = Frozen(torch.zeros(LONG))
    tensors = CallbackTensors(behind=True)
    told_of(tensors, callback)
    made.shadow = [torch.ones(LONG)]
    long_tensors.put_back(callback, told_of(tensors, callback), "callback", strict=True)


@dataclass(frozen=True)
class Frozen:
    rows: torch.Tensor
    size: int = 3


def test_of_two_attributes_that_which_has_changed_is_told() -> None:
    tensors, callback = CallbackTensors(), Keeps(2.0)
    told_of(tensors, callback)
    CHANGES[2](callback)
    callback.helper.updates = 5
    told = told_of(tensors, callback)
    assert told["values"].keys() == {"by_name"} and not told["modules"]
    assert told["objects"]["helper"]["values"]["updates"] == 5, "an object may count something beside its tensors"


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_of_sharded_tensors_the_shards_are_told_and_filled(mesh: Any) -> None:
    def made(value: float) -> Any:
        callback: Any = Late()
        callback.model = fully_shard(nn.Linear(LONG, 1, bias=False), mesh=mesh)
        callback.average = fully_shard(nn.Linear(LONG, 1, bias=False), mesh=mesh)
        nothing = DTensor.from_local(torch.empty(0), mesh)  # of two elements the third of three processes has none
        callback.shadow = {"weight": callback.average.weight.detach().clone(), "bias": nothing}
        for tensor in (callback.average.weight, callback.shadow["weight"]):
            nn.init.constant_(tensor.to_local(), value)
        return callback

    giver, taker = made(2.0), made(1.0)
    weight = taker.average.weight
    ((_, _, told),) = kept([giver], giver.model)
    assert (told["modules"].keys(), told["values"].keys()) == ({"average"}, {"shadow"}), "the model is carried as such"
    long_tensors.put_back(taker, told, "callback", strict=True)
    assert taker.average.weight is weight and all(isinstance(each, DTensor) for each in taker.shadow.values())
    assert weight.full_tensor().detach().mean() == taker.shadow["weight"].full_tensor().mean() == 2
    tensors = CallbackTensors(behind=True)
    assert told_of(tensors, giver, model=giver.model) == long_tensors.NOTHING
    with torch.no_grad():
        factors = torch.cat((torch.ones(1, LONG - 1), torch.zeros(1, 1)), 1)
        giver.average.weight.mul_(DTensor.from_local(factors, mesh))
    assert told_of(tensors, giver, model=giver.model)["modules"].keys() == {"average"}, "behind the first elements"
    giver.late = giver.shadow["weight"].clone()
    told_of(tensors, giver, model=giver.model)
    assert tensors.late.startswith("late of "), "its shard alone makes no sharded tensor"


def test_a_checkpoint_of_an_older_version_has_no_long_tensors() -> None:
    taker = Keeps(1.0)
    rows = [row[:2] for row in kept([Keeps(2.0)])]
    put_back([taker], rows)
    assert taker.number == 2.0 and taker.module.weight.sum() == 6.0


def test_addresses_of_the_model_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[nn.Module] = []

    def addresses(model: nn.Module) -> set[int]:
        asked.append(model)
        return set()

    monkeypatch.setattr(long_tensors, "addresses", addresses)
    model = nn.Linear(2, 2)
    kept([Keeps(1.0), Keeps(2.0)], model)
    assert asked == [model]
