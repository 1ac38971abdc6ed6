"""The modules to which tensors belong. Horovod's names are given parameters, and no model."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import nn

Place: TypeAlias = tuple[int, torch.device]
"""Address and device of a tensor."""


def place_of(tensor: torch.Tensor) -> Place:
    """The same of a parameter and of its entry in a state_dict(), which are two objects over one memory."""
    return tensor.data_ptr(), tensor.device


def modules_of(tensors: Sequence[torch.Tensor]) -> list[nn.Module]:
    """The living modules that have these parameters and buffers, in the order of the tensors: of each outermost module,
    the innermost part that has all of its tensors that were asked for. Tensors of no module are left out.

    Nothing else knows them: a script gives its optimizer `model.parameters()`, and keeps the model.
    """
    wanted = [place_of(tensor) for tensor in tensors]
    alive = [found for found in gc.get_objects() if issubclass(type(found), nn.Module)]
    children = {id(child) for module in alive for child in vars(module).get("_modules", {}).values()}
    places = {id(module): _places(module) for module in alive if id(module) not in children}
    by_id = {id(module): module for module in alive}
    found: list[nn.Module] = []
    covered: set[Place] = set()
    for place in wanted:
        owners = [key for key, has in places.items() if place in has]
        if place in covered or not owners:
            continue
        largest = max(owners, key=lambda key: len(places[key]))
        own = places[largest] & set(wanted)
        covered |= own
        found.append(_innermost(by_id[largest], own))
    return found


def _innermost(module: nn.Module, own: set[Place]) -> nn.Module:
    """A script may call a part of a module that has the model and something besides, as a loss or a teacher."""
    while True:
        inside = [child for child in module.children() if own <= _places(child)]
        if len(inside) != 1:
            return module
        module = inside[0]


def of_none(tensors: Sequence[torch.Tensor], modules: Sequence[nn.Module]) -> list[torch.Tensor]:
    """Those of the tensors that belong to none of the modules."""
    places = set[Place]().union(*map(_places, modules))
    return [tensor for tensor in tensors if place_of(tensor) not in places]


def _places(module: nn.Module) -> set[Place]:
    tensors = [*module.parameters(), *module.buffers()]
    return {place_of(tensor) for tensor in tensors if tensor.numel() and tensor.layout is torch.strided}
