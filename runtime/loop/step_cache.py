"""step.cached: values of a shard, such as PPO's rollouts, kept for the later passes of its step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch

from elastic.errors import UsageError
from runtime.data.random_state import randomness_kept, seed_all

T = TypeVar("T")
Key = tuple[int, str, int]
"""Shard; name of the function; how many functions of this name the shard's body has called before."""


@dataclass(slots=True)
class Cached:
    """The cached values of one step in one worker."""

    _values: dict[Key, tuple[object, Any]] = field(default_factory=dict)
    """Key -> the code that computed the value, and the value."""
    _calls: Counter[str] = field(default_factory=Counter)

    def begin_shard(self) -> None:
        """The body starts over, perhaps in another pass: calls are counted from 0."""
        self._calls.clear()

    def clear(self) -> None:
        """Drop all values, because those of a rehearsal do not count."""
        self._values.clear()

    def get(self, fn: Callable[[], T], position: tuple[int, int, int], running: Callable[[int], None]) -> T:
        """The value of fn for the shard at position (seed, step, shard), computed if this worker has none.

        fn runs without gradients, and its global random numbers are seeded from the position, the call's name and
        number; the caller's generators are restored. running: called with the seed for that time. Raises UsageError
        when another function has the same name and number in this step.
        """
        name = getattr(fn, "__qualname__", type(fn).__qualname__)
        number = self._calls[name]
        self._calls[name] += 1
        key, code = (position[2], name, number), getattr(fn, "__code__", None)
        if key not in self._values:
            with randomness_kept(), torch.no_grad():
                running(seed_all(*position, "cached", name, number))
                self._values[key] = (code, fn())
        known, value = self._values[key]
        if known != code:
            raise UsageError(
                f"step.cached: two functions are both call {number} of {name!r} in the passes of a step, so one would "
                "get the other's value; give each a name of its own with `def`"
            )
        return cast(T, value)
