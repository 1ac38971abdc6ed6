"""Tensors that a user's own Trainer keeps beside its model, such as an average of the weights, and that its
compute_loss() or training_step() changes: what they have then would depend on the ranks that a worker computes.

They are those of modules, dictionaries and lists in the attributes of the trainer, and in the attributes of objects
there. Tensors that are themselves attributes of the trainer are carried: see trainer_attributes.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from elastic.errors import ConfigError
from runtime.frontends.frameworks.long_tensors import LIBRARIES, addresses, differ, is_strided, samples, version

ITEMS_MAX = 4096
"""Items of a list or dictionary that are looked at; one with more is data."""

Tensors = Mapping[str, torch.Tensor]


class Averages:
    """What these tensors are before a rank is computed."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._before = [
            (path, tensors, _versions(tensors), samples(tensors.values())) for path, tensors in _kept(trainer)
        ]

    def check(self) -> None:
        """Raise ConfigError for one that has changed."""
        for path, tensors, versions, before in self._before:
            if _versions(tensors) != versions or differ(before, samples(tensors.values())) or self._anew(path, tensors):
                raise ConfigError(
                    f"self.{path} of {type(self._trainer).__name__} has tensors that compute_loss() or training_step() "
                    "changes. Each worker calls these for its own ranks, so the values would depend on the workers. "
                    "Update an average of the weights behind the step, in the on_step_end() of a callback, or start "
                    "the script with --restart"
                )

    def _anew(self, path: str, tensors: Tensors) -> bool:
        """Whether a dictionary has other tensors now under the names of weights. Of other names nothing is said: it may
        note what the last batch has."""
        try:
            now = attrgetter(path)(self._trainer)
        except AttributeError:
            return False
        if not isinstance(now, dict):
            return False
        names = {name for name, _ in self._trainer.model.named_parameters()} & tensors.keys()
        return any(isinstance(now.get(name), torch.Tensor) and now[name] is not tensors[name] for name in names)


def _kept(trainer: Any) -> Iterator[tuple[str, Tensors]]:
    """Path of a module, a dictionary or a list -> its tensors that are none of the model."""
    model = getattr(trainer, "model", None)
    own = addresses(model) if isinstance(model, nn.Module) else set()
    for name, value in list(vars(trainer).items()):
        inner = {}
        if type(value).__module__.partition(".")[0] not in LIBRARIES and value is not model:
            inner = {f"{name}.{below}": item for below, item in getattr(value, "__dict__", {}).items()}
        for path, thing in {name: value, **inner}.items():
            if thing is model:
                continue
            found = {key: item for key, item in _items(thing) if is_strided(item) and item.data_ptr() not in own}
            if found:
                yield path, found


def _items(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, nn.Module):
        yield from chain(thing.named_parameters(), thing.named_buffers())
    elif isinstance(thing, dict | list) and len(thing) <= ITEMS_MAX:
        for key, item in thing.items() if isinstance(thing, dict) else enumerate(thing):
            yield str(key), item


def _versions(tensors: Tensors) -> list[int]:
    return [version(tensor) for tensor in tensors.values()]
