"""Small values between workers: the arguments of job.agree and job.allreduce, as JSON in a header or a note; and
numbers that users log, of any type.
"""

from __future__ import annotations

import base64
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast, get_args

import torch

from elastic.errors import ConfigError, UsageError
from runtime.allreduce.reduction.partial_sum import Json
from runtime.recovery.state.encoding import (
    NamedTensor,
    decode,
    dtype_name,
    encode,
    from_blob,
    laid_out,
    strides_of,
    to_blob,
)

Op: TypeAlias = Literal["mean", "sum", "max", "min"]

BYTES_MAX = 64 << 10
"""The most bytes of the tensors of one value: it is in headers, which go to all members."""


def pack(value: object, call: str) -> dict[str, Json]:
    """The value as JSON. Raises NotCarried for a type that job.state would not take, ConfigError for a large value."""
    tensors: list[NamedTensor] = []
    plain = encode(value, call, tensors)
    if not fits(tensors):
        raise ConfigError(
            f"{call} was given tensors of {_bytes(tensors)} bytes; it carries up to {BYTES_MAX}. What is larger "
            "belongs into a registered module or job.state, or into the gradients of a pass"
        )
    return packed(plain, tensors)


def fits(tensors: Sequence[NamedTensor]) -> bool:
    """Whether these tensors are small enough to be packed."""
    return _bytes(tensors) <= BYTES_MAX


def _bytes(tensors: Sequence[NamedTensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)


def packed(plain: Json, tensors: Sequence[NamedTensor]) -> dict[str, Json]:
    """As `pack`, for the result of `encode`."""
    found: list[Json] = [
        {
            "dtype": dtype_name(tensor),
            "shape": list[Json](tensor.shape),
            "strides": strides_of(tensor),
            "device": tensor.device.type,
            "bytes": base64.b64encode(to_blob(tensor).numpy().tobytes()).decode("ascii"),
        }
        for _, tensor in tensors
    ]
    return {"value": plain, "tensors": found}


def unpack(packed: Json, place: Callable[[str], torch.device]) -> Any:
    """The value that `pack` was given. place: the type of the device where a tensor was -> its device here.

    Raises ValueError for what `pack` never writes.
    """
    document = cast(dict[str, Any], packed)

    @functools.cache
    def tensor(number: int) -> torch.Tensor:
        entry = document["tensors"][number]
        content = bytearray(base64.b64decode(entry["bytes"]))
        blob = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        return laid_out(from_blob(blob, entry["dtype"], entry["shape"]), entry["strides"], place(entry["device"]))

    return decode(document["value"], tensor)


def check_reducible(value: object, op: str) -> Number:
    """The number or tensor that allreduce can reduce by op. Raises ConfigError or UsageError."""
    if op not in get_args(Op):
        raise ConfigError(f'job.allreduce: op={op!r} is none of "mean", "sum", "max", "min"')
    if not isinstance(value, torch.Tensor):
        return as_number(value, "job.allreduce: the value")
    if value.numel() == 0 or value.is_complex() or value.dtype == torch.bool:
        raise UsageError(
            f"job.allreduce: a tensor of {value.dtype} and shape {tuple(value.shape)} cannot be reduced; give real "
            "numbers, at least one"
        )
    if op == "mean" and not value.is_floating_point():
        raise UsageError(f'job.allreduce: the mean of {value.dtype} is none; write x.float(), or op="sum"')
    return value


def described(value: Number) -> str:
    """The value's kind for an operation's label, so that workers with different kinds are told at once."""
    if isinstance(value, torch.Tensor):
        return f"{dtype_name(value)} {list(value.shape)}"
    return "a number"


def reduce(values: Mapping[str, Any], op: Op) -> Number:
    """One value from all workers' values, in the order of worker ids: worker_id -> numbers, or tensors of one kind."""
    ordered = [values[worker] for worker in sorted(values)]
    first = ordered[0]
    if not isinstance(first, torch.Tensor):
        match op:
            case "max" | "min":
                # Otherwise the result would depend on the place of a NaN.
                return math.nan if any(map(math.isnan, ordered)) else float((max if op == "max" else min)(ordered))
            case _:
                total = float(torch.tensor(ordered, dtype=torch.float64).sum())
                return total / len(ordered) if op == "mean" else total
    stacked = torch.stack(ordered)
    match op:
        case "max":
            return stacked.amax(0)
        case "min":
            return stacked.amin(0)
        case _:
            wide = stacked.to(torch.float64 if first.is_floating_point() else torch.int64).sum(0)
            return (wide / len(ordered) if op == "mean" else wide).to(first.dtype)


Number: TypeAlias = "torch.Tensor | float"


def same_nan(value: float) -> float:
    """The value; one fixed NaN for all NaNs: a sum's NaN depends on the processor, and on text on the way."""
    return math.nan if math.isnan(value) else value


def as_number(value: object, what: str) -> float:
    """The float64 of a number or of a real tensor of one element. Raises UsageError naming `what`."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value.detach().item())
    try:
        if isinstance(value, (str, bytes, torch.Tensor)):
            raise TypeError(type(value))
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
        raise UsageError(f"{what} is a {type(value).__name__}{shape}, but must be one real number") from error
