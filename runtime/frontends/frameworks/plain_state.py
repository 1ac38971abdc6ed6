"""Plain attributes of objects: what newcomers and checkpoints can have of a callback that a user wrote."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch

DEPTH_MAX = 8
ELEMENTS_MAX = 4096
"""Of a tensor that counts as plain: a larger one is no counter and no average of scores."""


def is_plain(value: object, depth: int = DEPTH_MAX) -> bool:
    """Whether it consists of numbers, strings, lists, tuples, dictionaries and short tensors."""
    if value is None or type(value) in (bool, int, float, str):
        return True
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.numel() <= ELEMENTS_MAX
    if depth == 0:
        return False
    if type(value) in (list, tuple):
        return all(is_plain(item, depth - 1) for item in value)  # type: ignore[attr-defined]  # it is iterable
    if type(value) is dict:
        return all(type(key) in (str, int) and is_plain(item, depth - 1) for key, item in value.items())
    return False


def plain_attributes(thing: object, *, without: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Copies of the attributes of an object that are plain."""
    return {name: deepcopy(value) for name, value in vars(thing).items() if name not in without and is_plain(value)}


def set_attributes(thing: object, values: dict[str, Any]) -> None:
    """Give an object these attributes."""
    for name, value in values.items():
        setattr(thing, name, deepcopy(value))
