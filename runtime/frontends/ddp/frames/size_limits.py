"""How large is what a script changes while it trains, where the size decides whether it is followed: undone after
silent turns, and given to newcomers. `elastic doctor --ranks` shows what comes near to its limit."""

from __future__ import annotations

import hashlib
from collections import deque
from typing import TypeAlias

import numpy as np
import torch

from runtime.frontends.ddp.frames.model_copies import KEPT_MAX, ModelCopies
from runtime.frontends.ddp.frames.places import DEPTH_MAX, OBJECTS_MAX, ScriptFrames, ValuePlace, is_dict
from runtime.frontends.ddp.frames.plain_values import LIST_MAX, TENSOR_MAX, same
from runtime.recovery.state.change_detection import version_of

Size: TypeAlias = tuple[str, str, int, int]
"""What has the size, as an error would spell it; "list", "dict", "tensor", "level", "objects", "array" or "set"; the
size; and the largest one that is followed, 0 where none is."""

_MOST = {list: ("list", LIST_MAX), deque: ("list", LIST_MAX), set: ("set", 0), np.ndarray: ("array", 0)}


class SizeWatch:
    """Compares what a script has at the beginning of a step with what it had at that of the step before."""

    def __init__(self, frames: ScriptFrames) -> None:
        self._frames = frames
        self._before: dict[ValuePlace, tuple[object, object]] = {}
        """Value, and something that differs when the value has changed in place."""

    def step(self, copies: ModelCopies) -> list[Size]:
        """A step begins. copies: the script's averages of the weights, whose size has no limit. Returns the sizes of
        what has changed since the step before: of lists, which grow, of values at the last level that is looked into,
        and of what is above half of its limit."""
        now = {place: (value, _mark(value)) for place, value in self._frames.values()}
        before, self._before = self._before, now
        found = [
            (place.spelling, *_size(place, value))
            for place, (value, mark) in now.items()
            if place in before and _has_changed(before[place], (value, mark)) and not copies.holds(value)
        ]
        found += [
            (f"the values in {where}", "objects", n, OBJECTS_MAX) for where, n in self._frames.looked_into.items()
        ]
        return [size for size in found if _is_near(size)]


def _is_near(size: Size) -> bool:
    _, kind, number, most = size
    return kind == "list" or (number >= most if kind == "level" else number * 2 > most)


def _size(place: ValuePlace, value: object) -> tuple[str, int, int]:
    if is_dict(value):
        return "dict", len(value), OBJECTS_MAX
    if isinstance(value, torch.Tensor):
        return "tensor", value.numel(), TENSOR_MAX
    if type(value) in _MOST:
        kind, most = _MOST[type(value)]
        return kind, np.size(value) if isinstance(value, np.ndarray) else len(value), most  # type: ignore[arg-type]
    return "level", len(place.path), DEPTH_MAX


def _mark(value: object) -> object:
    """None: its size is of no interest."""
    if type(value) is torch.Tensor:
        return None if value.requires_grad else version_of(value)
    if isinstance(value, np.ndarray):
        known = value.size <= KEPT_MAX and not value.dtype.hasobject
        return hashlib.sha256(value.tobytes()).digest() if known else None
    if is_dict(value):
        return [*value.keys(), *value.values()]
    if type(value) is set:
        return set(value)
    return list(value) if isinstance(value, list | deque) else None


def _has_changed(before: tuple[object, object], now: tuple[object, object]) -> bool:
    """Whether it has changed in place, or, as a number, to another one."""
    (was, old), (value, new) = before, now
    if isinstance(value, int | float | np.number):
        return type(was) is type(value) and was != value
    if was is not value or new is None:
        return False
    return not same(old, new) if isinstance(old, list) and isinstance(new, list) else old != new
