"""Plain attributes of a LightningModule: what one part of a step, or of an evaluation, adds to them, taken back here
and had on every worker. Those that a LightningModule has by itself are Lightning's own.

Numbers, lists, lists of lists and tensors are carried. Dictionaries are left as each worker has them, as most are
caches; one that counts or collects is refused by name. What is not carried is not taken back either, but for a tensor
of up to ELEMENTS_MAX elements in whose place one of another shape was put.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict, defaultdict
from collections.abc import Hashable
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn

from elastic.errors import ConfigError
from runtime.frontends.frameworks.plain_state import ELEMENTS_MAX

NUMBERS = (bool, int, float)

IN_PLACE_MAX = 1 << 16
"""Elements of a tensor that a part may change in place; a larger one is refused then."""

LISTS_MAX = 64
"""Lists in a list, and keys of a dictionary, that are looked at."""

DICTIONARIES = (dict, defaultdict, OrderedDict)

_set_from_none: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""Module -> attributes that were None when a part of this worker began, and a tensor with rows behind it."""

_with_rows: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""Module -> attributes that were a tensor without elements when a part began: rows are put behind it."""


class PlainAttributes:
    """What the attributes of a module are before a part runs."""

    def __init__(self, module: Any) -> None:
        own = _own_names(cast(Hashable, type(module)))
        self._module = module
        self._names = frozenset(vars(module))
        self._before: dict[str, Any] = {}
        """Attribute -> a number or None; (list, its items); (tensor, its values)."""
        self._large: dict[str, tuple[torch.Tensor, int]] = {}
        """Attribute -> tensor, and how often it was changed in place."""
        self._lists: dict[str, tuple[list[list[Any]], list[tuple[list[Any], int]]]] = {}
        """Attribute -> list of lists, and each of these with its length."""
        self._counted: dict[str, dict[Any, Any]] = {}
        """Attribute, a dictionary -> its numbers, and the lengths of its lists, by key."""
        known: set[int] = set()
        for name, value in vars(module).items():
            if type(value) in NUMBERS or (value is None and name not in own):
                self._before[name] = value
            elif type(value) is torch.Tensor:
                self._take_tensor(name, value)
            elif type(value) in DICTIONARIES and name not in own and len(value) <= LISTS_MAX:
                self._counted[name] = {key: _count(item) for key, item in value.items()}
            elif type(value) is list and name not in own and id(value) not in known:
                inner = value if 0 < len(value) <= LISTS_MAX and all(type(item) is list for item in value) else []
                if inner and known.isdisjoint(map(id, inner)):
                    self._lists[name] = value, [(item, len(item)) for item in inner]
                elif not inner:
                    self._before[name] = (value, list(value))
                known.update(map(id, (value, *inner)))

    def _take_tensor(self, name: str, value: torch.Tensor) -> None:
        if value.numel() <= IN_PLACE_MAX:
            self._before[name] = (value, value.detach().clone())
        elif not value.is_inference():  # torch counts no changes of others
            self._large[name] = (value, value._version)

    def changes(self) -> dict[str, Any]:
        """Attribute -> what was added to a number or to a tensor, appended to a list; {"rows": appended to a tensor};
        or {"list": what it was set to}. Raises ConfigError for a large tensor, and for dictionaries."""
        self._check()
        found: dict[str, Any] = {}
        for name, old in self._before.items():
            new = getattr(self._module, name, None)
            if not _adds(old):
                continue
            if not isinstance(old, tuple):
                if type(new) in NUMBERS and new != old:
                    found[name] = new - old
            elif isinstance(old[0], list):
                if (added := _added_to_list(new, old[1])) is not None:
                    found[name] = added
            elif isinstance(new, torch.Tensor) and (change := self._change_of(name, new, *old)) is not None:
                found[name] = change
        return found

    def _check(self) -> None:
        for name, (large, version) in self._large.items():
            if large._version != version:
                raise ConfigError(
                    f"self.{name} is changed in place, and has {large.numel()} elements; what a batch adds to a tensor "
                    f"is carried up to {IN_PLACE_MAX}. Use a metric of torchmetrics, a list, or a buffer in training"
                )
        for name, counted in self._counted.items():
            now = vars(self._module).get(name)
            if type(now) not in DICTIONARIES:
                continue
            for key, old in counted.items():
                if old is not None and (new := _count(now.get(key))) is not None and new != old:
                    raise ConfigError(
                        f"self.{name}[{key!r}] counts or collects what batches have; other workers would not have it. "
                        "Use an attribute for each key, a number or a list, or a metric of torchmetrics"
                    )

    def _change_of(self, name: str, new: torch.Tensor, thing: torch.Tensor, old: torch.Tensor) -> Any:
        """What was added to a tensor, or the rows that were put behind its own; None: nothing, or it was replaced."""
        if new.shape == old.shape:
            if torch.equal(new, old) or (new is not thing and new.numel() > ELEMENTS_MAX):
                return None
            is_bool = new.dtype == torch.bool  # of which torch makes no difference
            return new.float() - old.float() if is_bool else (new - old).detach()
        if old.numel() == 0 and new.dim():
            _with_rows.setdefault(self._module, set()).add(name)
            return {"rows": new.detach().clone()}
        rows = old.shape[0] if old.dim() else 0
        grows = old.dim() > 0 and new.dim() == old.dim() and new.shape[1:] == old.shape[1:] and new.shape[0] > rows
        if not (grows and torch.equal(new[:rows], old)):
            return None
        if name in _set_from_none.get(self._module, ()):
            raise ConfigError(
                f"self.{name} begins with None, and batches put rows behind it: other workers begin it, too. Begin "
                "with torch.empty(0), or append to a list"
            )
        return {"rows": new[rows:].detach().clone()} if name in _with_rows.get(self._module, ()) else None

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

    def nested(self) -> dict[str, list[Any]]:
        """Attribute, a list of lists -> [place, what was appended to the list there]..."""
        found: dict[str, list[Any]] = {}
        for name, (thing, lists) in self._lists.items():
            if vars(self._module).get(name) is not thing:
                continue
            for place, (item, length) in enumerate(lists):
                if place < len(thing) and thing[place] is item and len(item) > length:
                    found.setdefault(name, []).append([place, [detached(each) for each in item[length:]]])
        return found

    def put_back(self, *, new_lists: bool) -> None:
        """Take back what was recorded. new_lists: also lists that were set anew, which a training step does not
        carry."""
        module = self._module
        for name in [name for name, new in vars(module).items() if name not in self._names and _is_number(new)]:
            delattr(module, name)
        for name, old in self._before.items():
            if not isinstance(old, tuple):
                new = getattr(module, name, None)
                if old is not None or _is_number(new):
                    setattr(module, name, old)
                elif type(new) is torch.Tensor:  # it stays: perhaps a mask that is made once
                    _set_from_none.setdefault(module, set()).add(name)
                continue
            thing, kept = old
            if isinstance(thing, list):
                if not new_lists and isinstance(_added_to_list(getattr(module, name, None), kept), dict):
                    continue
                thing[:] = kept
            elif thing.numel() > ELEMENTS_MAX and getattr(module, name, None) is not thing:
                continue
            else:
                thing.data.copy_(kept)
            setattr(module, name, thing)
        for _, lists in self._lists.values():
            for item, length in lists:
                del item[length:]


@functools.cache
def _own_names(kind: Any) -> frozenset[str]:
    """The names of the attributes that a LightningModule has before a user has set any."""
    base = next((each for each in kind.__mro__ if each.__name__ == "LightningModule"), nn.Module)
    return frozenset(vars(base()))


def _adds(old: Any) -> bool:
    """Whether what a part does to an attribute is added to what it was: a finite number, a tensor or a list."""
    value = old[1] if isinstance(old, tuple) else old  # the tensor itself is changed already
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        value = float(value)
    return value is not None and not (type(value) is float and not math.isfinite(value))


def _added_to_list(new: Any, old: list[Any]) -> Any:
    """What was appended to the items of a list, or {"list": ...} if it has others; None: nothing, or it is none."""
    if not isinstance(new, list):
        return None
    begins = new[: len(old)]
    if len(begins) == len(old) and all(item is kept for item, kept in zip(begins, old, strict=True)):
        return [detached(item) for item in new[len(old) :]] or None
    return {"list": [detached(item) for item in new]}


def _count(item: Any) -> Any:
    """What shows whether a value of a dictionary counts or collects; None: it does neither."""
    if type(item) is list:
        return ("items", len(item))
    return item if type(item) in (int, float) and math.isfinite(item) else None


def with_rows(name: str, value: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """A tensor, and rows behind its own. Raises ConfigError if they do not fit. name: of the attribute."""
    rows = rows.to(value.device)
    if not value.numel():
        return rows.clone()
    if value.shape[1:] != rows.shape[1:]:
        raise ConfigError(
            f"self.{name} begins without elements, and batches put rows of different shapes behind it: "
            f"{tuple(value.shape[1:])} and {tuple(rows.shape[1:])}; append to a list"
        )
    return torch.cat([value, rows])


def with_lists(value: Any, added: list[Any]) -> Any:
    """A list of lists, and what a part has appended to these."""
    value = value if isinstance(value, list) else []
    for place, items in added:
        while len(value) <= place:
            value.append([])
        value[place].extend(detached(item) for item in items)
    return value


def _is_number(value: Any) -> bool:
    return type(value) in NUMBERS or (type(value) is torch.Tensor and value.dim() == 0)


def detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: detached(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(detached, value))
    return type(value)(detached(item) for item in value) if isinstance(value, list | tuple) else value
