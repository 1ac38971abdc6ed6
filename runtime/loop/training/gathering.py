"""Values of any size that the workers compute together, part by part, and that each worker then has.

Two operations, because a worker must know how many bytes a part has before it can send them. The first one computes
the parts and adds up their sizes. The second one adds up vectors in which each part has filled its own section: a sum
with zeros changes no number. A worker that takes over a part between the two computes it once more.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import torch

from elastic.errors import UsageError
from runtime.allreduce.reduction.partial_sum import Json, Partial
from runtime.data.random_state import randomness_kept
from runtime.loop.training.calls import empty_leaf
from runtime.loop.training.training import Training
from runtime.recovery.state.encoding import NamedTensor, decode, dtype_name, encode, from_blob, to_blob
from runtime.session import OpKind

T = TypeVar("T")

DIGIT = 2**24
"""float32 has all integers up to here: three bytes are one number of the vector."""


def gather(training: Training, label: str, parts: int, compute: Callable[[int], T]) -> list[T]:
    """`compute(part)` of each part 0..parts-1, in order, on every worker; each part is computed by one of them.

    The values are what job.state takes: numbers, strings, lists, tuples, dictionaries, tensors (given back on the CPU).
    A value must depend on its part only. Raises NotCarried for others, UsageError before the first pass of a step,
    where newcomers would have to be told them.
    """
    if training.at.early or training.at.elsewhere:
        raise UsageError(f"{label} came before the first pass of a step; move it behind the step")
    done: dict[int, bytes] = {}

    def content(part: int) -> bytes:
        if part not in done:
            done[part] = _to_bytes(compute(part), label)
        return done[part]

    def size(part: int) -> Partial:
        leaf = empty_leaf(part)
        leaf.scalars = {str(part): ("sum", float(_digits(content(part))), 0.0)}
        return leaf

    def sizes_of(result: Partial) -> Json:
        return [int(result.scalars[str(part)][1]) for part in range(parts)]

    with randomness_kept():
        sizes = cast(list[int], training.calls.collective(OpKind.EVALUATE, label, parts, size, sizes_of))
        ends = np.cumsum(sizes)

        def filled(part: int) -> Partial:
            vector = torch.zeros(int(ends[-1]))
            vector[int(ends[part]) - sizes[part] : int(ends[part])] = _vector(content(part))
            leaf = empty_leaf(part)
            leaf.flats = {"float32": vector}
            return leaf

        whole = training.calls.vectors(f"{label}: values", parts, filled, {"float32": int(ends[-1])})["float32"]
    return [
        cast(T, _from_bytes(_content(whole[end - count : end])))
        for end, count in zip(ends.tolist(), sizes, strict=True)
    ]


def _digits(content: bytes) -> int:
    return -(-len(content) // 3)


def _vector(content: bytes) -> torch.Tensor:
    """The bytes, three to a number."""
    rows = np.frombuffer(content + bytes(-len(content) % 3), dtype=np.uint8).reshape(-1, 3).astype(np.int32)
    return torch.from_numpy((rows[:, 0] << 16 | rows[:, 1] << 8 | rows[:, 2]).astype(np.float32))


def _content(vector: torch.Tensor) -> bytes:
    """The bytes of `_vector`, and up to two more."""
    digits = vector.numpy().astype(np.int32)
    return np.stack([digits >> 16, digits >> 8 & 255, digits & 255], axis=1).astype(np.uint8).tobytes()


def _to_bytes(value: object, label: str) -> bytes:
    """The length of a JSON header, the header, the tensors."""
    tensors: list[NamedTensor] = []
    plain = encode(value, label, tensors)
    blobs = [to_blob(tensor).numpy().tobytes() for _, tensor in tensors]
    about = [
        [dtype_name(tensor), list(tensor.shape), len(blob)] for (_, tensor), blob in zip(tensors, blobs, strict=True)
    ]
    header = json.dumps([plain, about]).encode()
    return b"".join((len(header).to_bytes(8, "little"), header, *blobs))


def _from_bytes(content: bytes) -> Any:
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
