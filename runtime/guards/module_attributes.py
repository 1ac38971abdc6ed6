"""Detects changes of plain attributes of registered modules, such as `dropout.p`, which no copy of the state carries.

A process that comes later has the values that the script sets when it builds the modules, at the start of an epoch
(between job.epochs and job.steps) and at the start of a step (between job.steps and the inner loop). So any other
change of an attribute has to be repeated there. Changes inside passes, and in job.evaluate and job.once, are ignored:
counters, cached shapes and the like, on which training may or may not depend.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from operator import is_
from typing import Any

from torch import nn

ABSENT = object()
"""The value of an attribute that does not exist."""
_PLAIN = (bool, int, float, str, type(None))
_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of torch's own, also `training`, which is carried."""

_listeners: list[set[tuple[int, str]]] = []
"""Sets to which each assignment to an attribute of a module is added, as (id of the module, name)."""
_patches: list[_Patch] = []
"""The patch of nn.Module while there are listeners."""


@dataclass(frozen=True, slots=True)
class Changed:
    """name: such as "model.1.p". was: the value in a process that comes now. now: the value in this one."""

    name: str
    was: object
    now: object


class Attributes:
    """Watches assignments to attributes of these modules. `begin_epoch`, `begin_step`, `begin_pass`, `end_pass` are
    called when the script comes there."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        """The present values are those that every process has when its loop begins."""
        self._modules: dict[int, tuple[str, nn.Module]] = {
            id(owner): (path, owner)
            for name, module in modules.items()
            for path, owner in module.named_modules(prefix=name)
        }
        self._names: list[tuple[int, str]] = []
        self._watched: set[tuple[int, str]] = set()
        self._dicts: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._all = [vars(owner) for _, owner in self._modules.values()]
        self._sizes: list[int] = []
        self._own: set[int] = set()
        """Indices of attributes that passes change."""
        self._initial: list[object] = []
        self._initial = self._look()
        self._fresh = self._initial
        """The values of a process that comes in this epoch, without what each step sets."""
        self._before: list[object] = []
        self._stale: list[int] = []
        """Indices of attributes that differed from `_fresh` when the epoch or the step began."""
        self._assigned: set[tuple[int, str]] | None = None
        self._starts = ""
        """"epoch" or "step" while that begins; else ""."""

    def begin_epoch(self) -> None:
        self._fresh = self._initial
        self._begin("epoch")

    def begin_step(self) -> None:
        if self._starts == "epoch":
            now, assigned = self._look(), self._end()
            changed, fresh = self._differing(now, self._before), self._extended(self._initial)
            for i in self._differing(now, fresh):
                if i in changed or self._names[i] in assigned:
                    fresh[i] = now[i]
            self._fresh = fresh
        self._begin("step")

    def begin_pass(self) -> None:
        now = self._look()
        if self._starts == "step":
            assigned, changed = self._end(), self._differing(now, self._before)
            self._stale = [i for i in self._stale if i not in changed and self._names[i] not in assigned]
        self._before = now

    def end_pass(self) -> list[Changed]:
        """Attributes that differed from those of a process that comes now, and were not set by step or pass."""
        self._own.update(self._differing(self._look(), self._before))
        fresh, stale = self._extended(self._fresh), [i for i in self._stale if i not in self._own]
        self._stale = []
        return [
            Changed(f"{self._modules[self._names[i][0]][0]}.{self._names[i][1]}", fresh[i], self._before[i])
            for i in stale
        ]

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """Ignore attributes that change inside from now on."""
        before = self._look()
        try:
            yield
        finally:
            self._own.update(self._differing(self._look(), before))

    def close(self) -> None:
        """Stop listening."""
        self._end()

    def _begin(self, what: str) -> None:
        self._end()
        self._before, self._starts = self._look(), what
        self._stale = self._differing(self._before, self._fresh)
        if self._stale:
            self._assigned = set()
            _listen(self._assigned)

    def _end(self) -> set[tuple[int, str]]:
        """The assignments since `_begin`, if they were listened to."""
        assigned, self._assigned, self._starts = self._assigned, None, ""
        if assigned is None:
            return set()
        _listen_no_more(assigned)
        return assigned

    def _look(self) -> list[object]:
        sizes = list(map(len, self._all))
        if sizes != self._sizes:
            self._find()
            self._sizes = sizes
        return list(map(dict.get, self._dicts, self._keys, repeat(ABSENT)))

    def _find(self) -> None:
        """Find attributes that did not exist at the last look."""
        for owner, (_, module) in self._modules.items():
            for key, value in vars(module).items():
                if key not in _OF_TORCH and (owner, key) not in self._watched and _is_plain(value):
                    self._watched.add((owner, key))
                    self._names.append((owner, key))
                    self._dicts.append(vars(module))
                    self._keys.append(key)

    def _extended(self, values: list[object]) -> list[object]:
        return values + [ABSENT] * (len(self._names) - len(values))

    def _differing(self, now: list[object], before: list[object]) -> list[int]:
        if len(now) == len(before) and all(map(is_, now, before)):
            return []
        pairs = enumerate(zip(now, self._extended(before), strict=True))
        return [i for i, (a, b) in pairs if a is not b and i not in self._own and _differ(a, b)]


def _is_plain(value: object) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(map(_is_plain, value)))


def _differ(a: object, b: object) -> bool:
    """Whether two plain or absent values differ; False if another object has replaced a plain value."""
    plain = all(value is ABSENT or _is_plain(value) for value in (a, b))
    return plain and a != b and not (a != a and b != b)


def _listen(assigned: set[tuple[int, str]]) -> None:
    if not _listeners:
        _patches.append(_Patch())
    _listeners.append(assigned)


def _listen_no_more(assigned: set[tuple[int, str]]) -> None:
    _listeners[:] = [listener for listener in _listeners if listener is not assigned]
    if not _listeners:
        _patches.pop().undo()


class _Patch:
    """Tells the listeners about assignments to attributes of modules."""

    def __init__(self) -> None:
        original = self._original = nn.Module.__setattr__

        def noting(module: nn.Module, name: str, value: Any) -> None:
            for listener in _listeners:
                listener.add((id(module), name))
            original(module, name, value)

        self._noting = noting
        nn.Module.__setattr__ = noting  # type: ignore[method-assign,assignment]

    def undo(self) -> None:
        """Undo the patch, unless other code has put a patch around it: then both stay, without listeners."""
        if nn.Module.__setattr__ is self._noting:
            nn.Module.__setattr__ = self._original  # type: ignore[method-assign]
