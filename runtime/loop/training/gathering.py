"""Values of any size that the workers compute together, part by part, and that each worker then has.

Two operations, because a worker must know how many bytes a unit of parts has before it can send them. The first one
computes the parts and adds up the sizes of the units. The second one adds up vectors in which each unit has filled its
own section: a sum with zeros changes no number. A worker that takes over a unit between the two computes it once more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import torch

from elastic.errors import UsageError
from runtime.allreduce.reduction.partial_sum import Json, Partial
from runtime.data.random_state import randomness_kept
from runtime.loop.training.calls import CallResult, empty_leaf
from runtime.loop.training.training import Training
from runtime.recovery.state.encoding import NamedTensor, decode, dtype_name, encode, from_blob, to_blob
from runtime.session import Op, OpKind

T = TypeVar("T")

UNITS_MAX = 64
"""More units would spread the work more evenly, but each unit fills a vector of the whole size."""


def gather(training: Training, label: str, parts: int, compute: Callable[[int], T]) -> list[T]:
    """`compute(part)` of each part 0..parts-1, in order, on every worker; each part is computed by one of them.

    The values are what job.state takes: numbers, strings, lists, tuples, dictionaries, tensors (given back on the CPU).
    A value must depend on its part only. Raises NotCarried for others, UsageError before the first pass of a step,
    where newcomers would have to be told them.
    """
    if training.at.early or training.at.elsewhere:
        raise UsageError(f"{label} came before the first pass of a step; move it behind the step")
    units = min(parts, UNITS_MAX)
    done: dict[int, bytes] = {}

    def content(unit: int) -> bytes:
        if unit not in done:
            values = [compute(part) for part in range(unit * parts // units, (unit + 1) * parts // units)]
            done[unit] = to_bytes(values, label)
        return done[unit]

    def sizes_of(result: Partial) -> Json:
        return cast(Json, _counted({name: total for name, (_, total, _) in result.scalars.items()}, units))

    with randomness_kept():
        leaf = partial(_size, content=content)
        sizes = cast(list[int], training.calls.collective(OpKind.EVALUATE, label, units, leaf, sizes_of))
        filled = partial(_filled, content=content, sizes=sizes, device=training.session.sums_on)
        groups = {"float32": sum(sizes)}
        whole = training.calls.vectors(OpKind.EVALUATE, f"{label}: values", units, filled, groups, _copied)
    return [value for part in _parts(whole, sizes) for value in cast(list[T], from_bytes(part))]


def _copied(sums: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {group: flat.clone() for group, flat in sums.items()}


def gather_in_turns(training: Training, op: Op, done: dict[int, bytes], found: list[bytes]) -> Iterator[int]:
    """As `gather`, but the caller computes the units. Gives those that `done`, unit -> content, lacks; the caller puts
    such a unit there before it asks for the next one. found: gets the contents of all units."""
    sums: list[CallResult] = []
    content = done.__getitem__
    for unit in training.calls.in_turns(op, partial(_size, content=content), sums):
        if unit not in done:
            yield unit
    sizes = _counted(sums[0].scalars, op.units)
    filled = partial(_filled, content=content, sizes=sizes, device=training.session.sums_on)
    op = replace(op, label=f"{op.label}: values")
    for unit in training.calls.in_turns(op, filled, sums, {"float32": sum(sizes)}):
        if unit not in done:
            yield unit
    found += _parts(sums[1].flats, sizes)


def _size(unit: int, content: Callable[[int], bytes]) -> Partial:
    """The leaf of a unit that says how many numbers its content has."""
    leaf = empty_leaf(unit)
    leaf.scalars = {str(unit): ("sum", float(_digits(content(unit))), 0.0)}
    return leaf


def _counted(scalars: Mapping[str, float], units: int) -> list[int]:
    return [int(scalars[str(unit)]) for unit in range(units)]


def _filled(unit: int, content: Callable[[int], bytes], sizes: Sequence[int], device: torch.device) -> Partial:
    """The leaf of a unit that has the contents of this unit in its own section."""
    vector = torch.zeros(sum(sizes))
    begin = sum(sizes[:unit])
    vector[begin : begin + sizes[unit]] = vector_of(content(unit))
    leaf = empty_leaf(unit)
    leaf.flats = {"float32": vector.to(device)}
    return leaf


def _parts(flats: Mapping[str, torch.Tensor], sizes: Sequence[int]) -> list[bytes]:
    """The content of each unit."""
    whole, ends = flats["float32"].cpu(), np.cumsum(sizes).tolist()
    return [content_of(whole[end - count : end]) for end, count in zip(ends, sizes, strict=True)]


def _digits(content: bytes) -> int:
    return -(-len(content) // 3)


def vector_of(content: bytes) -> torch.Tensor:
    """The bytes, three to a number: float32 has all integers up to 2**24."""
    rows = np.frombuffer(content + bytes(-len(content) % 3), dtype=np.uint8).reshape(-1, 3).astype(np.int32)
    return torch.from_numpy((rows[:, 0] << 16 | rows[:, 1] << 8 | rows[:, 2]).astype(np.float32))


def content_of(vector: torch.Tensor) -> bytes:
    """The bytes of `vector_of`, and up to two more."""
    digits = vector.numpy().astype(np.int32)
    return np.stack([digits >> 16, digits >> 8 & 255, digits & 255], axis=1).astype(np.uint8).tobytes()


def to_bytes(value: object, label: str) -> bytes:
    """What job.state takes, as bytes: the length of a JSON header, the header, the tensors."""
    tensors: list[NamedTensor] = []
    plain = encode(value, label, tensors)
    blobs = [to_blob(tensor).numpy().tobytes() for _, tensor in tensors]
    about = [
        [dtype_name(tensor), list(tensor.shape), len(blob)] for (_, tensor), blob in zip(tensors, blobs, strict=True)
    ]
    header = json.dumps([plain, about]).encode()
    return b"".join((len(header).to_bytes(8, "little"), header, *blobs))


def from_bytes(content: bytes) -> Any:
    """The value of `to_bytes`; its tensors are on the CPU."""
    begin = 8 + int.from_bytes(content[:8], "little")
    plain, about = json.loads(content[8:begin])
    found = []
    for dtype, shape, length in about:
        blob = (
            torch.frombuffer(bytearray(content[begin : begin + length]), dtype=torch.uint8)
            if length
            else torch.empty(0, dtype=torch.uint8)
        )
        found.append(from_blob(blob, dtype, shape))
        begin += length
    return decode(plain, found.__getitem__)
