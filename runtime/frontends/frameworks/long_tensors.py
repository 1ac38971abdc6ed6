"""What a callback keeps that plain_state.plain_attributes leaves out: modules, such as an average of the weights or a
reference model that follows them; lists and dictionaries with long tensors; and objects of a user's own with such.

A callback changes them between steps. So they are told as they are, without a copy: who copies the weights while ranks
are computed copies them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from elastic.errors import ConfigError
from runtime.frontends.frameworks.plain_state import copied, is_plain

LIBRARIES = frozenset(
    ("builtins", "functools", "torch", "transformers", "accelerate", "datasets", "tokenizers", "peft", "trl", "runtime")
)
"""Packages of objects whose attributes are not looked at."""
ANY_LENGTH = 1 << 62

Told = dict[str, dict[str, Any]]
"""{"values": {name: value}, "modules": {name: {name of a tensor: tensor}}, "objects": {name: Told}}, of attributes."""
NOTHING: Told = {"values": {}, "modules": {}, "objects": {}}


def addresses(model: nn.Module) -> set[int]:
    """Where its tensors lie."""
    return {tensor.data_ptr() for tensor in chain(model.parameters(), model.buffers()) if is_strided(tensor)}


def is_strided(thing: Any) -> bool:
    """Whether it is a tensor of torch's own class that has memory."""
    return (
        type(thing) in (torch.Tensor, nn.Parameter)
        and thing.layout is torch.strided
        and thing.device.type != "meta"
        and thing.numel() > 0
    )


def told(owner: object, model: nn.Module | None, *, whole: bool = False) -> Told:
    """What an object keeps besides tensors of the model. whole: also what is plain, as copies."""
    own: set[int] | None = None
    found: Told = {"values": {}, "modules": {}, "objects": {}}
    for name, value in list(vars(owner).items()):
        if is_plain(value):
            if whole:
                found["values"][name] = copied(value)
        elif value is model:
            continue
        elif isinstance(value, nn.Module):
            own = addresses(model) if own is None and model is not None else own
            tensors = {key: t.detach() for key, t in _named(value) if is_strided(t) and t.data_ptr() not in (own or ())}
            if tensors:
                found["modules"][name] = tensors
        elif is_plain(value, ANY_LENGTH):
            own = addresses(model) if own is None and model is not None else own
            if not any(tensor.data_ptr() in (own or ()) for tensor in _tensors(value)):
                found["values"][name] = _by_reference(value)
        elif not whole and hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] not in LIBRARIES:
            below = told(value, model)
            if below["values"] or below["modules"]:
                found["objects"][name] = told(value, model, whole=True)
    return found


def versions(found: Told) -> list[int]:
    """Numbers that grow when a tensor is changed in place."""
    tensors = [*_tensors(found["values"]), *_tensors(found["modules"])]
    below = [number for inner in found["objects"].values() for number in versions(inner)]
    return [*(0 if tensor.is_inference() else tensor._version for tensor in tensors), *below]


def put_back(owner: object, found: Told, where: str, *, strict: bool) -> None:
    """Give an object what `told` has told of another. where: how an error calls the object. strict: raise ConfigError
    for what is not there yet, or has other tensors; if not, it is left as it is."""
    put: list[Callable[[], None]] = []
    for name, value in found["values"].items():
        put.append(partial(setattr, owner, name, deepcopy(value)))
    for name, tensors in found["modules"].items():
        module = getattr(owner, name, None)
        here = dict(_named(module)) if isinstance(module, nn.Module) else {}
        if all(key in here and here[key].shape == tensor.shape for key, tensor in tensors.items()):
            put.append(partial(_fill, here, tensors))
        elif strict:
            raise _refusal(where, name)
    for fill in put:
        fill()
    for name, below in found["objects"].items():
        if hasattr(thing := getattr(owner, name, None), "__dict__"):
            put_back(thing, below, f"{name} of {where}", strict=strict)
        elif strict:
            raise _refusal(where, name)


def _named(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from chain(module.named_parameters(), module.named_buffers())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _by_reference(value: Any) -> Any:
    """A copy of the lists and dictionaries, with the tensors themselves."""
    return deepcopy(value, {id(tensor): tensor.detach() for tensor in _tensors(value)})


def _fill(here: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for key, tensor in tensors.items():
            here[key].copy_(tensor)


def _refusal(where: str, name: str) -> ConfigError:
    return ConfigError(
        f"{name} of {where} has tensors in the other workers, or in the checkpoint, and is another, or not there, in "
        "this worker: make it in __init__() or on_train_begin(), in all workers, from the same model"
    )
