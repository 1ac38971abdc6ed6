"""Sizes of what a script changes from step to step: which are told, and of what kind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from runtime.frontends.ddp.frames.model_copies import ModelCopies
from runtime.frontends.ddp.frames.places import DEPTH_MAX, OBJECTS_MAX, ScriptFrames
from runtime.frontends.ddp.frames.plain_values import LIST_MAX, TENSOR_MAX
from runtime.frontends.ddp.frames.size_limits import Size, SizeWatch

HERE = ScriptFrames()


def told(found: list[Size]) -> dict[str, tuple[str, int, int]]:
    return {name.partition(" in ")[0]: (kind, size, most) for name, kind, size, most in found}


def none() -> ModelCopies:
    return ModelCopies(HERE, [])


def test_what_has_changed_is_told_with_its_size() -> None:
    seen: list[int] = []
    short, long = torch.zeros(TENSOR_MAX // 2), torch.zeros(TENSOR_MAX + 1)
    counted, visited = np.zeros(3), {1}
    by_name = {str(number): number for number in range(OBJECTS_MAX - 1)}
    many = {str(number): number for number in range(OBJECTS_MAX + 1)}
    watch, copies = SizeWatch(HERE), none()
    assert watch.step(copies) == []
    seen.append(1)
    for tensor in (short, long):
        tensor += 1
    counted += 1
    visited.add(2)
    by_name["0"] = many["0"] = 5
    assert told(watch.step(copies)) == {
        "seen": ("list", 1, LIST_MAX),
        "long": ("tensor", TENSOR_MAX + 1, TENSOR_MAX),
        "counted": ("array", 3, 0),
        "visited": ("set", 2, 0),
        "by_name": ("dict", OBJECTS_MAX - 1, OBJECTS_MAX),
        "many": ("dict", OBJECTS_MAX + 1, OBJECTS_MAX),
    }
    assert told(watch.step(copies)) == {}, "nothing has changed since"


def test_what_is_another_object_in_each_step_is_a_batch() -> None:
    def step(batch: Any) -> list[Size]:
        return watch.step(copies)

    watch, copies = SizeWatch(HERE), none()
    step(torch.zeros(TENSOR_MAX + 1))
    assert told(step(torch.ones(TENSOR_MAX + 1))) == {}


def test_a_number_at_the_last_level_is_told() -> None:
    state = SimpleNamespace(best=SimpleNamespace(meter=SimpleNamespace(count=0)))
    watch, copies = SizeWatch(HERE), none()
    watch.step(copies)
    state.best.meter.count += 1
    assert told(watch.step(copies)) == {"state.best.meter.count": ("level", DEPTH_MAX, DEPTH_MAX)}


def test_an_average_of_the_weights_has_no_limit() -> None:
    model = nn.Linear(16, 8)
    average = [parameter.detach().clone() for parameter in model.parameters()]
    copies = ModelCopies(HERE, [model])
    watch = SizeWatch(HERE)
    watch.step(copies)
    average[0] += 1
    assert copies.found and told(watch.step(copies)) == {}


def test_many_objects_in_one_function_are_told() -> None:
    things = {f"thing_{number}": SimpleNamespace(count=0) for number in range(OBJECTS_MAX // 2 + 1)}
    watch, copies = SizeWatch(HERE), none()
    kind, size, most = told(watch.step(copies))["the values"]
    assert (kind, most) == ("objects", OBJECTS_MAX) and size > len(things)
