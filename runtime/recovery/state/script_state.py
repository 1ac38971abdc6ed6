"""job.state: the script's own values, copied to newcomers and written into checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from elastic.checkpoints.description import PACKED
from elastic.errors import ConfigError, NotCarried, StateChanged
from runtime.allreduce.reduction.partial_sum import Json
from runtime.recovery.state import small_values
from runtime.recovery.state.encoding import NamedTensor, decode, encode


class Values:
    """Values by attribute: ``job.state.best = 0.9``. Numbers, strings, bools, None, lists, tuples, dicts (also
    OrderedDict, Counter, and defaultdict of a builtin type), tensors.

    Raises NotCarried for any other type, and for a large tensor that is read where a newcomer cannot have it yet;
    StateChanged for an assignment inside a pass, AttributeError for a value that is not set.
    """

    __slots__ = ("_early", "_locked", "_read", "_values")
    _early: set[str] | None
    """Before an epoch's first step: names that were assigned there; else None."""
    _locked: bool
    _read: bool
    _values: dict[str, Any]

    def __init__(self) -> None:
        object.__setattr__(self, "_early", None)
        object.__setattr__(self, "_locked", False)
        object.__setattr__(self, "_read", False)
        object.__setattr__(self, "_values", {})

    def __getattr__(self, key: str) -> Any:
        object.__setattr__(self, "_read", True)
        try:
            if key.startswith("_"):
                raise KeyError(key)
            value = self._values[key]
        except KeyError:
            raise AttributeError(
                f"job.state has no value {key!r}; set its start value with job.state.setdefault({key}=...)"
            ) from None
        if self._early is not None and key not in self._early:
            _check_early(key, value)
        return value

    def __setattr__(self, key: str, value: object) -> None:
        self._check_writable(key)
        if key.startswith("_") or hasattr(type(self), key):
            raise ConfigError(f"job.state.{key} cannot be used as a name; choose another one")
        encode_value(key, value, [])
        self._values[key] = value
        if self._early is not None:
            self._early.add(key)

    def __delattr__(self, key: str) -> None:
        self._check_writable(key)
        if key not in self._values:
            raise AttributeError(f"job.state has no value {key!r}")
        del self._values[key]

    def __contains__(self, key: object) -> bool:
        try:
            getattr(self, str(key))
        except AttributeError:
            return False
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def _check_writable(self, key: str) -> None:
        if self._locked:
            raise StateChanged(
                f"job.state.{key} was assigned inside a pass, where workers run different shards; "
                "assign it after the inner loop"
            )

    def setdefault(self, **defaults: object) -> None:
        """Set the values that are not set yet; a newcomer keeps those that it was given."""
        for key, value in defaults.items():
            if key not in self._values:
                setattr(self, key, value)

    def keys(self) -> list[str]:
        """Names, in the order they were first set."""
        return [key for key, _ in self.items()]

    def items(self) -> list[tuple[str, Any]]:
        """(name, value), in the order they were first set."""
        object.__setattr__(self, "_read", True)
        return [(key, getattr(self, key)) for key in self._values]

    @property
    def was_read(self) -> bool:
        """Whether the script has read values since `forget_reads`."""
        return self._read

    def forget_reads(self) -> None:
        object.__setattr__(self, "_read", False)

    def lock(self) -> None:
        """Begin a pass: assignments raise StateChanged until `unlock`."""
        object.__setattr__(self, "_locked", True)

    def unlock(self) -> None:
        """End the pass."""
        object.__setattr__(self, "_locked", False)

    def begin_early(self) -> None:
        """Begin an epoch. Until `end_early` reads are refused unless `to_json(packed=True)` has the value."""
        object.__setattr__(self, "_early", set())

    def end_early(self) -> None:
        """End the early phase: the first step of the epoch is handed out."""
        object.__setattr__(self, "_early", None)

    def to_json(self, *, packed: bool = False) -> dict[str, Json]:
        """The values without tensors. packed: also values with small tensors, for a newcomer without the state."""
        found: dict[str, Json] = {}
        for key, value in self._values.items():
            tensors: list[NamedTensor] = []
            plain = encode_value(key, value, tensors)
            if not tensors:
                found[key] = plain
            elif packed and small_values.fits(tensors):
                found[key] = {PACKED: small_values.packed(plain, tensors)}
        return found

    def update_from_json(self, values: dict[str, Json], place: Callable[[str], torch.device]) -> None:
        """Take over the result of another worker's `to_json`; other values stay. Raises ValueError.

        place: the type of the device where a tensor was -> its device here.
        """
        for key, value in values.items():
            if isinstance(value, dict) and PACKED in value:
                setattr(self, key, small_values.unpack(value[PACKED], place))
            else:
                setattr(self, key, decode(value, _no_tensor_number))

    def rewind(self, values: dict[str, Json], place: Callable[[str], torch.device]) -> None:
        """Take over the result of another worker's `to_json(packed=True)` and delete other values; large tensors stay.
        Parameters as in update_from_json."""
        for key in self.to_json(packed=True).keys() - values.keys():
            del self._values[key]
        self.update_from_json(values, place)

    def as_dict(self) -> dict[str, Any]:
        """All values, for a copy and for `replace`; this does not count as a read by the script."""
        return dict(self._values)

    def replace(self, values: dict[str, Any]) -> None:
        """Become exactly these values, also inside a pass: a copy of the state has arrived."""
        self._values.clear()
        self._values.update(values)


def encode_value(key: str, value: object, tensors: list[NamedTensor]) -> Json:
    """As encoding.encode. Raises NotCarried, also for a tensor that would come back as another kind of tensor."""
    first = len(tensors)
    plain = encode(value, f"job.state.{key}", tensors)
    for path, tensor in tensors[first:]:
        if tensor.requires_grad or type(tensor) is not torch.Tensor:
            kind = "a tensor that requires a gradient" if type(tensor) is torch.Tensor else f"a {type(tensor).__name__}"
            raise NotCarried(
                f"{path} is {kind}, and would come back as a plain tensor; write x.detach(), or keep what is trained "
                "in a registered module"
            )
    return plain


def without_tensors(values: dict[str, Json]) -> dict[str, Any]:
    """Those values of `to_json` that have no tensors, decoded."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if not (isinstance(value, dict) and PACKED in value):
            with contextlib.suppress(_HasTensor):
                found[key] = decode(value, _no_tensor_number)
    return found


def _check_early(key: str, value: object) -> None:
    tensors: list[NamedTensor] = []
    encode_value(key, value, tensors)
    if not small_values.fits(tensors):
        raise NotCarried(
            f"job.state.{key} was read before the steps of an epoch, where a newcomer does not have it yet: it holds "
            f"tensors of more than {small_values.BYTES_MAX} bytes, which come with the copy of the whole state. Read "
            "it inside `for step in job.steps(...)`, behind the inner loop or in it"
        )


class _HasTensor(ValueError):
    pass


def _no_tensor_number(number: int) -> torch.Tensor:
    raise _HasTensor(f"tensor {number} in a plain JSON value")
