"""What a framework keeps between steps: state_dict()s, and plain attributes of callbacks that users wrote."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from copy import deepcopy
from math import prod
from typing import Any, Protocol

import torch

DEPTH_MAX = 8
ELEMENTS_MAX = 4096
"""A tensor with more elements is not plain: it is no counter and no average of scores."""
ANY_LENGTH = 1 << 62
"""With this limit of elements parameters and sharded tensors are plain, too."""
VALUES_MAX = 20_000
"""An attribute with more values is data, which each process has by itself."""
_DICTIONARIES = (dict, defaultdict, OrderedDict, Counter)


class Kept(Protocol):
    """What a framework keeps between steps, as newcomers copy it and checkpoints have it."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def is_plain(value: object, elements: int = ELEMENTS_MAX) -> bool:
    """Whether it consists of numbers, strings, lists, tuples, dictionaries and short tensors, and is no data. elements:
    those of a tensor, at most."""
    return _values(value, DEPTH_MAX, elements) <= VALUES_MAX


def is_sharded(value: object) -> bool:
    """Whether it is a DTensor."""
    return isinstance(value, torch.Tensor) and hasattr(value, "to_local")


def _values(value: Any, depth: int, elements: int) -> int:
    """How many values it has; more than VALUES_MAX for what is not plain."""
    if value is None or type(value) in (bool, int, float, str):
        return 1
    if type(value) is torch.Tensor and value.numel() <= elements:
        return 1
    if elements == ANY_LENGTH and (type(value) is torch.nn.Parameter or is_sharded(value)):
        return 1
    if type(value) not in (*_DICTIONARIES, list, tuple) or depth == 0 or len(value) > VALUES_MAX:
        return VALUES_MAX + 1
    items = value
    if type(value) in _DICTIONARIES:
        if not all(type(key) in (str, int) for key in value):
            return VALUES_MAX + 1
        items = value.values()
    total = 1
    for item in items:
        total += _values(item, depth - 1, elements)
        if total > VALUES_MAX:
            break
    return total


def plain_row(values: Mapping[str, Any]) -> dict[str, Any]:
    """What is plain of the values that a script logs. Arrays of one element are numbers."""
    row = {
        name: value.item() if hasattr(value, "item") and prod(getattr(value, "shape", ())) == 1 else value
        for name, value in values.items()
    }
    return {name: value for name, value in row.items() if is_plain(value)}


def plain_attributes(thing: object, *, without: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Copies of the attributes of an object that are plain."""
    return {name: copied(value) for name, value in vars(thing).items() if name not in without and is_plain(value)}


def set_attributes(thing: object, values: dict[str, Any]) -> None:
    """Give an object these attributes."""
    for name, value in values.items():
        setattr(thing, name, deepcopy(value))


def copied(value: Any) -> Any:
    """A copy of a plain value. Of a tensor with a graph, such as a loss, it has the numbers: a step has used up the
    graph, which is of this process."""
    memo: dict[int, Any] = {id(tensor): tensor.detach().clone() for tensor in _with_graph(value)}
    return deepcopy(value, memo)


def _with_graph(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if not value.is_leaf:
            yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _with_graph(item)
