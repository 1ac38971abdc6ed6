"""Modules and long tensors that callbacks of Trainer keep: newcomers and resumed runs have them, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elastic.errors import ConfigError
from runtime.frontends.frameworks import long_tensors, trainer_callbacks
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
        nn.init.constant_(self.module.weight, value)
        self.module.register_buffer("count", torch.tensor(int(value)))
        self.by_name: dict[str, Any] = {"vector": torch.full((LONG,), value), "step": int(value)}
        self.helper = Helper(value)
        self.model = model


def everything(callback: Keeps) -> list[Any]:
    tensors = [*callback.module.state_dict().values(), callback.by_name["vector"], *callback.helper.shadow]
    plain = [callback.number, callback.by_name["step"], callback.helper.updates]
    return [*plain, *(value.tolist() for value in tensors)]


def moved(giver: Any, taker: Any, *, strict: bool = True, model: nn.Module | None = None) -> None:
    trainer_callbacks.put_back([taker], trainer_callbacks.kept([giver], model), strict=strict)


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
    ((_, _, told),) = trainer_callbacks.kept([giver], model)
    assert told["values"].keys() == {"by_name"} and told["modules"].keys() == {"module"}
    assert told["values"]["by_name"]["vector"].data_ptr() == giver.by_name["vector"].data_ptr()
    assert told["modules"]["module"]["weight"].data_ptr() == giver.module.weight.data_ptr()


@pytest.mark.parametrize("name", ["module", "helper"])
def test_what_a_worker_lacks_is_named_once_training_has_begun(name: str) -> None:
    taker = Keeps(1.0)
    setattr(taker, name, None)
    moved(Keeps(2.0), taker, strict=False)
    assert taker.number == 2.0 and taker.by_name["step"] == 2
    with pytest.raises(ConfigError, match=f"{name} of callback {__name__}.Keeps has tensors in the other workers"):
        moved(Keeps(2.0), taker)


def test_a_module_of_another_shape_is_named() -> None:
    wider = Keeps(1.0)
    wider.module = nn.Linear(4, 2)
    with pytest.raises(ConfigError, match="make it in __init__"):
        moved(Keeps(2.0), wider)


def test_a_callback_with_long_tensors_alone_has_to_be_in_all_workers() -> None:
    class Alone:
        def __init__(self) -> None:
            self.module = nn.Linear(2, 2)

    with pytest.raises(ConfigError, match="Alone has a state in the other workers"):
        trainer_callbacks.put_back([], trainer_callbacks.kept([Alone()]))
    with pytest.raises(ConfigError, match="Alone has a state in this worker"):
        trainer_callbacks.put_back([Alone()], [])


CHANGES: list[Callable[[Keeps], object]] = [
    lambda callback: nn.init.zeros_(callback.module.weight),
    lambda callback: callback.by_name["vector"].add_(1),
    lambda callback: callback.helper.shadow[1].add_(1),
]


def noted(handed_out: long_tensors.CallbackTensors, callback: Keeps) -> tuple[bool, Keeps]:
    """(whether it was told without a copy, another callback that has got it), when a step is handed out."""
    ((name, plain, long),) = trainer_callbacks.kept([callback])
    (told,) = handed_out.note([(name, long)])
    shares = [told["modules"]["module"]["weight"].data_ptr() == callback.module.weight.data_ptr()]
    shares += [told["values"]["by_name"]["vector"].data_ptr() == callback.by_name["vector"].data_ptr()]
    assert len(set(shares)) == 1
    taker = Keeps(0.0)
    trainer_callbacks.put_back([taker], [[name, plain, told]])
    return shares[0], taker


@pytest.mark.parametrize("change", CHANGES)
def test_a_callback_that_changes_tensors_before_gradients_is_copied_first(
    change: Callable[[Keeps], object],
) -> None:
    handed_out, callback = long_tensors.CallbackTensors(), Keeps(2.0)
    for _ in range(3):
        before = everything(callback)
        by_reference, taker = noted(handed_out, callback)
        change(callback)
        handed_out.look()
        assert not by_reference and everything(taker) == before


@pytest.mark.parametrize("change", CHANGES)
def test_a_callback_that_changes_tensors_behind_the_step_is_copied_once(change: Callable[[Keeps], object]) -> None:
    handed_out, callback, found = long_tensors.CallbackTensors(), Keeps(2.0), []
    for _ in range(3):
        found.append(noted(handed_out, callback)[0])
        handed_out.look()
        change(callback)
    assert found == [False, True, True]
    noted(handed_out, callback)
    change(callback)
    with pytest.raises(ConfigError, match=r"callback .*Keeps changes tensors .* as in on_step_end\(\)"):
        handed_out.look()


def test_a_checkpoint_of_an_older_version_has_no_long_tensors() -> None:
    taker = Keeps(1.0)
    rows = [row[:2] for row in trainer_callbacks.kept([Keeps(2.0)])]
    trainer_callbacks.put_back([taker], rows)
    assert taker.number == 2.0 and taker.module.weight.sum() == 6.0
