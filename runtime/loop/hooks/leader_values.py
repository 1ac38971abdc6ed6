"""Values that only the leader computes, as the note of an operation of one unit; they must be JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import chain
from typing import Any, cast

import torch

from elastic.errors import NotCarried
from runtime.allreduce.reduction.partial_sum import Json, Partial
from runtime.loop.control_scalars import RESERVED
from runtime.recovery.state import small_values

_PACKED = RESERVED + "packed"


def noted(label: str, fn: Callable[[], Any]) -> Callable[[int], Partial]:
    """The one unit of an operation that the leader runs: its note is the value of fn."""

    def compute(unit: int) -> Partial:
        value = fn()
        carried = _through_json(value, label)
        if carried != value and repr(carried) != repr(value):  # a NaN differs from itself
            raise NotCarried(
                f"job.{label} returned {value!r}, which JSON changes; return lists, dicts, strings, numbers"
            )
        return Partial(unit, unit + 1, note={"value": carried})

    return compute


def pack_note(value: object, label: str) -> object:
    """The value as JSON if it has tensors, all of one element; else the value as it is. Raises NotCarried."""
    sizes = [tensor.numel() for tensor in _tensors(value)]
    return {_PACKED: small_values.pack(value, f"job.{label}")} if sizes and set(sizes) == {1} else value


def unpack_note(value: Json, device: torch.device) -> Any:
    """The value that pack_note was given, tensors detached and on this device."""
    if isinstance(value, dict) and _PACKED in value:
        return small_values.unpack(value[_PACKED], lambda there: device)
    return value


def _tensors(value: object) -> Iterator[torch.Tensor]:
    match value:
        case torch.Tensor():
            yield value
        case dict():
            yield from chain.from_iterable(map(_tensors, value.values()))
        case list() | tuple():
            yield from chain.from_iterable(map(_tensors, value))


def value_noted(result: Partial) -> Json:
    """The value, a copy on every worker, because the script may change it while the result is kept."""
    return deepcopy(cast(dict[str, Json], result.note)["value"])


def _through_json(value: object, label: str) -> Json:
    try:
        return cast(Json, json.loads(json.dumps(value)))
    except (TypeError, ValueError) as error:
        raise NotCarried(
            f"job.{label} returned a {type(value).__name__}, which JSON cannot carry: {error}; return lists, dicts, "
            "strings, numbers (x.tolist() of a tensor), or keep it in job.state"
        ) from error
