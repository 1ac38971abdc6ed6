"""The fragments of a model: lists of parameters that are synchronised together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from elastic.errors import ConfigError


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of the model that are trained, each once, in its order. Raises ConfigError if there are none."""
    found = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not found:
        raise ConfigError("no parameter of the model has requires_grad=True, so there is nothing to train")
    return found


def cut(parameters: Sequence[nn.Parameter], fragments: int | Sequence[nn.Module]) -> list[list[nn.Parameter]]:
    """The parameters of each fragment, in their order.

    fragments: modules, of which each parameter belongs to exactly one; or a number: so many runs of neighbouring
    parameters with about equally many elements. Raises ConfigError.
    """
    if isinstance(fragments, int):
        return _runs(parameters, fragments)
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    found: list[list[int]] = []
    for number, module in enumerate(fragments):
        found.append([places.pop(one) for one in _ids(module) if one in places])
        if not found[-1]:
            raise ConfigError(f"fragment {number} has no trained parameter of the model that no fragment before it has")
    if places:
        raise ConfigError(f"{len(places)} trained parameters of the model belong to no fragment; each must be in one")
    return [[parameters[place] for place in sorted(one)] for one in found]


def _ids(module: nn.Module) -> Iterator[int]:
    yield from map(id, module.parameters())


def _runs(parameters: Sequence[nn.Parameter], count: int) -> list[list[nn.Parameter]]:
    if count > len(parameters):
        raise ConfigError(f"fragments={count} of a model with {len(parameters)} trained parameters: at most as many")
    total = sum(parameter.numel() for parameter in parameters)
    runs: list[list[nn.Parameter]] = [[]]
    before = 0
    for place, parameter in enumerate(parameters):
        still = len(parameters) - place
        full = before * count >= total * len(runs)
        if runs[-1] and len(runs) < count and (full or still == count - len(runs)):
            runs.append([])
        runs[-1].append(parameter)
        before += parameter.numel()
    return runs
