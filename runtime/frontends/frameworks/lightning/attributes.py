"""Plain attributes of a LightningModule: what one part of a step, or of an evaluation, adds to them, taken back here
and had on every worker. Those that a LightningModule has by itself are Lightning's own."""

from __future__ import annotations

import functools
import math
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn

from elastic.errors import ConfigError

NUMBERS = (bool, int, float)

CLONED_MAX = 1 << 16
"""Elements of a tensor whose changes are recorded; a part that changes a larger one is refused."""

NESTED_MAX = 64
"""Elements of a list, or keys of a dictionary, in which lists and numbers are looked at. Larger ones are caches."""

DICTIONARIES = (dict, defaultdict, OrderedDict)

_set_from_none: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""Module -> attributes that were None when a part of this worker began, and a tensor with rows behind it."""


class PlainAttributes:
    """What the attributes of a module are before a part runs."""

    def __init__(self, module: Any) -> None:
        own = _own_names(cast(Hashable, type(module)))
        self._module = module
        self._names = frozenset(vars(module))
        self._before: dict[str, Any] = {}
        self._nested: dict[str, Any] = {}
        self._large: dict[str, tuple[torch.Tensor, int]] = {}
        for name, value in vars(module).items():
            if type(value) in NUMBERS or (value is None and name not in own):
                self._before[name] = value
            elif type(value) is torch.Tensor and value.numel() <= CLONED_MAX:
                self._before[name] = (value, value.detach().clone())
            elif type(value) is torch.Tensor:
                self._large[name] = (value, value._version)
            elif name not in own and _is_nested(value):
                self._nested[name] = _snapshot(value)
            elif type(value) is list and name not in own:
                self._before[name] = (value, len(value))

    def changes(self) -> dict[str, Any]:
        """Attribute -> what was added to a number or to a tensor, appended to a list, or {"rows": appended to a
        tensor}. Raises ConfigError for a large tensor."""
        for name, (large, version) in self._large.items():
            if large._version != version:
                raise ConfigError(
                    f"self.{name} is changed in place, and has {large.numel()} elements; what a batch adds to a tensor "
                    f"is carried up to {CLONED_MAX}. Use a metric of torchmetrics, or a list"
                )
        found: dict[str, Any] = {}
        for name, old in self._before.items():
            new = getattr(self._module, name, None)
            if not _adds(old):
                continue
            if not isinstance(old, tuple):
                if type(new) in NUMBERS and new != old:
                    found[name] = new - old
            elif isinstance(old[0], list):
                if isinstance(new, list) and len(new) > old[1]:
                    found[name] = [detached(item) for item in new[old[1] :]]
            elif isinstance(new, torch.Tensor) and (change := _change_of(new, old[1])) is not None:
                if isinstance(change, dict) and name in _set_from_none.get(self._module, ()):
                    raise ConfigError(
                        f"self.{name} begins with None, and batches put rows behind it: other workers begin it, too. "
                        "Begin with torch.empty(0), or append to a list"
                    )
                found[name] = change
        return found

    def values(self) -> dict[str, Any]:
        """The numbers that attributes were set to that had none before, or an infinity or NaN, or a tensor instead of a
        number, or the other way round."""
        values: dict[str, Any] = {}
        for name, new in vars(self._module).items():
            if name in self._names and name not in self._before:
                continue
            old = self._before.get(name)
            is_tensor = type(new) is torch.Tensor and new.dim() == 0
            was_tensor = isinstance(old, tuple) and isinstance(old[0], torch.Tensor)
            if is_tensor and (type(old) in NUMBERS or not _adds(old)):
                values[name] = new.detach().clone()
            elif type(new) in NUMBERS and (was_tensor or not _adds(old)) and new != old:
                values[name] = new
        return values

    def nested(self) -> dict[str, Any]:
        """Attribute, a dictionary or a list of lists -> what `with_added` adds to it."""
        found = {name: _added_to(vars(self._module).get(name), old) for name, old in self._nested.items()}
        return {name: added for name, added in found.items() if added is not None}

    def put_back(self) -> None:
        module = self._module
        for name in [name for name, new in vars(module).items() if name not in self._names and _is_number(new)]:
            delattr(module, name)
        for name, old in self._before.items():
            if not isinstance(old, tuple):
                new = getattr(module, name, None)
                if old is not None or _is_number(new):
                    setattr(module, name, old)
                elif (
                    type(new) is torch.Tensor
                ):  # what was None and is no number stays, such as a mask that is made once
                    _set_from_none.setdefault(module, set()).add(name)
                continue
            thing, kept = old
            if isinstance(thing, list):
                del thing[kept:]
            else:
                thing.data.copy_(kept)
            setattr(module, name, thing)
        for name, old in self._nested.items():
            _restore(old)
            setattr(module, name, old[0])


@functools.cache
def _own_names(kind: Any) -> frozenset[str]:
    """Of a LightningModule without anything of a user's."""
    base = next((each for each in kind.__mro__ if each.__name__ == "LightningModule"), nn.Module)
    return frozenset(vars(base()))


def _adds(old: Any) -> bool:
    """Whether what a part does to an attribute is added to what it was: a finite number, a tensor or a list."""
    value = old[1] if isinstance(old, tuple) else old  # the tensor itself is changed already
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        value = float(value)
    return value is not None and not (type(value) is float and not math.isfinite(value))


def _change_of(new: torch.Tensor, old: torch.Tensor) -> Any:
    """What was added to a tensor, or the rows that were put behind its own; None: nothing, or it was replaced."""
    if new.shape == old.shape:
        if torch.equal(new, old):
            return None
        is_bool = new.dtype == torch.bool  # of which torch makes no difference
        return new.float() - old.float() if is_bool else (new - old).detach()
    if old.numel() == 0 and new.dim():
        return {"rows": new.detach().clone()}
    rows = old.shape[0] if old.dim() else 0
    grows = old.dim() > 0 and new.dim() == old.dim() and new.shape[1:] == old.shape[1:] and new.shape[0] > rows
    return {"rows": new[rows:].detach().clone()} if grows and torch.equal(new[:rows], old) else None


def with_rows(value: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """A tensor, and rows behind its own."""
    rows = rows.to(value.device)
    return torch.cat([value, rows]) if value.numel() else rows.clone()


def _is_number(value: Any) -> bool:
    return type(value) in NUMBERS or (type(value) is torch.Tensor and value.dim() == 0)


def detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: detached(item) for key, item in value.items()}
    return type(value)(detached(item) for item in value) if isinstance(value, list | tuple) else value


# Dictionaries and lists of lists


def _is_nested(value: Any) -> bool:
    if type(value) is list:
        return 0 < len(value) <= NESTED_MAX and all(type(item) is list for item in value)
    return type(value) in DICTIONARIES and len(value) <= NESTED_MAX


def _snapshot(value: Any) -> tuple[Any, Any]:
    """The thing itself, and what it holds: of a list its length and snapshots of its lists, of a dictionary snapshots
    by key."""
    if type(value) is list:
        return value, (len(value), [_snapshot(item) for item in value] if _is_nested(value) else [])
    if _is_nested(value):
        return value, {key: _snapshot(item) for key, item in value.items()}
    return value, None


def _added_to(new: Any, old: tuple[Any, Any]) -> Any:
    """None: nothing. Of a number what was added, of a list [items behind it, [place, what was added there]...], of a
    dictionary {"keys": [[key, what was added]...]}; a key that was not there had zero, or an empty list."""
    thing, held = old
    if type(thing) in NUMBERS:
        return new - thing if type(new) in NUMBERS and new != thing else None
    if new is not thing or held is None:
        return None
    if type(thing) is list:
        length, lists = held
        inner = [[place, _added_to(new[place], one)] for place, one in enumerate(lists) if place < len(new)]
        inner = [entry for entry in inner if entry[1] is not None]
        return [[detached(item) for item in new[length:]], *inner] if inner or len(new) > length else None
    keys = [[key, _added_to(item, held.get(key) or _nothing(item))] for key, item in new.items() if _is_plain_key(key)]
    keys = [entry for entry in keys if entry[1] is not None]
    return {"keys": keys} if keys else None


def _nothing(item: Any) -> tuple[Any, Any]:
    """The snapshot of what a new key had before."""
    if type(item) in NUMBERS:
        return 0, None
    return item, (0, []) if type(item) is list else {} if _is_nested(item) else None


def _counts(item: Any) -> bool:
    """Whether what a part adds to it is recorded."""
    return type(item) in NUMBERS or type(item) is list or _is_nested(item)


def _is_plain_key(key: Any) -> bool:
    return type(key) in (str, int)


def _restore(old: tuple[Any, Any]) -> None:
    """Give a thing what it held. New keys stay where they hold neither a number nor a list: they are a cache."""
    thing, held = old
    if held is None:
        return
    if type(thing) is list:
        del thing[held[0] :]
        inner: Iterator[tuple[Any, Any]] = iter(held[1])
    else:
        for key in [key for key, item in thing.items() if key not in held and _is_plain_key(key) and _counts(item)]:
            del thing[key]
        for key, one in held.items():
            thing[key] = one[0]
        inner = iter(held.values())
    for one in inner:
        _restore(one)


def with_added(value: Any, added: Any) -> Any:
    """What an attribute holds, and what a part has added."""
    if type(added) in NUMBERS:
        return (value or 0) + added
    if isinstance(added, Mapping):
        value = {} if value is None else value
        for key, more in added["keys"]:
            value[key] = with_added(value.get(key), more)
        return value
    value = [] if value is None else value
    for place, more in added[1:]:
        value[place] = with_added(value[place], more)
    value.extend(detached(item) for item in added[0])
    return value
