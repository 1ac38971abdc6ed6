"""job.state: the script's own values, copied to newcomers and written into checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from elastic.errors import ConfigError, StateChanged
from runtime.encoding import NamedTensor, decode, encode
from runtime.partial import Json


class Values:
    """Values by attribute: ``job.state.best = 0.9``. Numbers, strings, bools, None, lists, tuples, dicts, tensors.

    Raises NotCarried for any other type, StateChanged when assigned inside a pass, AttributeError when read
    before it was set.
    """

    __slots__ = ("_locked", "_values")
    _locked: bool
    _values: dict[str, Any]

    def __init__(self) -> None:
        object.__setattr__(self, "_locked", False)
        object.__setattr__(self, "_values", {})

    def __getattr__(self, key: str) -> Any:
        try:
            if key.startswith("_"):
                raise KeyError(key)
            return self._values[key]
        except KeyError:
            raise AttributeError(
                f"job.state has no value {key!r}; set its start value with job.state.setdefault({key}=...)"
            ) from None

    def __setattr__(self, key: str, value: object) -> None:
        self._check_writable(key)
        if key.startswith("_") or hasattr(type(self), key):
            raise ConfigError(f"job.state.{key} cannot be used as a name; choose another one")
        encode(value, f"job.state.{key}", [])
        self._values[key] = value

    def __delattr__(self, key: str) -> None:
        self._check_writable(key)
        if key not in self._values:
            raise AttributeError(f"job.state has no value {key!r}")
        del self._values[key]

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def _check_writable(self, key: str) -> None:
        if self._locked:
            raise StateChanged(
                f"job.state.{key} was assigned inside a pass, where workers run different shards; "
                "assign it after the inner loop"
            )

    def setdefault(self, **defaults: object) -> None:
        """Set the values that are not set yet; a newcomer keeps those it was given."""
        for key, value in defaults.items():
            if key not in self._values:
                setattr(self, key, value)

    def keys(self) -> list[str]:
        """Names, in the order they were first set."""
        return list(self._values)

    def items(self) -> list[tuple[str, Any]]:
        """(name, value), in the order they were first set."""
        return list(self._values.items())

    def lock(self) -> None:
        """A pass begins: assignments raise StateChanged until `unlock`."""
        object.__setattr__(self, "_locked", True)

    def unlock(self) -> None:
        """The pass is over."""
        object.__setattr__(self, "_locked", False)

    def to_json(self) -> dict[str, Json]:
        """The values without tensors, for a newcomer that has not copied the state yet."""
        found: dict[str, Json] = {}
        for key, value in self._values.items():
            tensors: list[NamedTensor] = []
            plain = encode(value, f"job.state.{key}", tensors)
            if not tensors:
                found[key] = plain
        return found

    def update_from_json(self, values: dict[str, Json]) -> None:
        """Take over what `to_json` of another worker gave; values it does not name stay. Raises ValueError."""
        for key, value in values.items():
            setattr(self, key, decode(value, _no_tensor_number))

    def replace(self, values: dict[str, Any]) -> None:
        """Become exactly these values, also inside a pass: a copy of the state has arrived."""
        self._values.clear()
        self._values.update(values)


def _no_tensor_number(number: int) -> torch.Tensor:
    raise ValueError(f"tensor {number} in a plain JSON value")
