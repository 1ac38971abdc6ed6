"""The reductions of Horovod, and how the rows of a tensor are dealt to ranks. Pure.

Adasum is that of Maleki et al., "Scaling Distributed Training with Adaptive Summation" (MLSys 2021): two gradients
a and b become a (1 - a·b / 2|a|²) + b (1 - a·b / 2|b|²), which is their sum where they are orthogonal, and their mean
where they are equal; more than two are combined pairwise, as a binary tree over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import reduce

import torch

from runtime.frontends.horovod.interrupts import BadArgument


class ReduceOp(IntEnum):
    """The numbers are Horovod's."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


def chosen_op(average: bool | None, op: int | None) -> ReduceOp:
    """The reduction that the arguments average= (before Horovod 0.19) and op= name; the mean if neither does. Raises
    BadArgument if both do, or for another number."""
    if average is not None and op is not None:
        raise BadArgument("allreduce(average=, op=): give one of them; op=hvd.Average is average=True")
    if op is None:
        return ReduceOp.SUM if average is False else ReduceOp.AVERAGE
    try:
        return ReduceOp(op)
    except ValueError:
        names = ", ".join(f"hvd.{one.name.capitalize()}" for one in ReduceOp)
        raise BadArgument(f"op={op!r} is no reduction; it is one of {names}") from None


_FOLDS: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVERAGE: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}


def reduce_rows(rows: Sequence[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """Reduce one tensor of each rank to one tensor. rows: in rank order, all of one shape and dtype; 16-bit floats are
    added in float32. The mean of integers is rounded towards zero. Raises BadArgument for Adasum of integers, or of a
    number of ranks that is no power of two, as Horovod does."""
    dtype = rows[0].dtype
    if op is ReduceOp.ADASUM:
        return adasum(rows)
    narrow = dtype in (torch.float16, torch.bfloat16)
    found = reduce(_FOLDS[op], [row.float() for row in rows] if narrow else rows).clone()
    return mean_of(found, len(rows)).to(dtype) if op is ReduceOp.AVERAGE else found.to(dtype)


def mean_of(total: torch.Tensor, ranks: int) -> torch.Tensor:
    """total / ranks in the dtype of the total."""
    if total.is_floating_point() or total.is_complex():
        return total / ranks
    return torch.div(total, ranks, rounding_mode="trunc")


def adasum(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """See the module; computed in float64. A gradient of zeros changes nothing."""
    count, dtype = len(rows), rows[0].dtype
    if count & (count - 1):
        raise BadArgument(f"hvd.Adasum needs 1, 2, 4, 8, ... ranks, and there are {count}: use hvd.Average")
    if not dtype.is_floating_point:
        raise BadArgument(f"hvd.Adasum of {dtype}: it reduces floats; use hvd.Sum")
    level = [row.double() for row in rows]
    while len(level) > 1:
        level = [_adaptive(level[i], level[i + 1]) for i in range(0, len(level), 2)]
    return level[0].to(dtype)


def _adaptive(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    dot, of_a, of_b = ((x * y).sum() for x, y in ((a, b), (a, a), (b, b)))
    nothing = torch.zeros_like(dot)
    share_a = torch.where(of_a > 0, dot / (2 * of_a), nothing)
    share_b = torch.where(of_b > 0, dot / (2 * of_b), nothing)
    return a * (1 - share_a) + b * (1 - share_b)


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """The tensor times a factor, in its dtype; integers by way of float64, rounded towards zero."""
    if factor == 1.0:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor * factor
    return (tensor.double() * factor).to(tensor.dtype)


def pieces(rows: int, ranks: int) -> list[int]:
    """How many of so many rows each rank gets from a reducescatter: equally many, the first ranks one more."""
    return [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]


def split_sizes(splits: Sequence[int] | None, rows: int, ranks: int) -> list[int]:
    """How many rows an alltoall sends to each rank. Raises BadArgument for sizes that do not fit."""
    if splits is None:
        if rows % ranks:
            raise BadArgument(f"alltoall of {rows} rows without splits=: {ranks} ranks cannot get equally many")
        return [rows // ranks] * ranks
    sizes = [int(size) for size in splits]
    if len(sizes) != ranks or min(sizes) < 0 or sum(sizes) != rows:
        raise BadArgument(f"alltoall(splits={sizes}) of {rows} rows: give {ranks} sizes, one for each rank, of {rows}")
    return sizes


def fused(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors as few vectors, one of each dtype and device, in the order in which these come first."""
    parts: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        parts.setdefault((tensor.dtype, tensor.device), []).append(tensor.reshape(-1))
    return [torch.cat(part) for part in parts.values()]


def put_back(vectors: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copy the vectors of `fused(tensors)` into the tensors."""
    kinds = list(dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors))
    begin = dict.fromkeys(kinds, 0)
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        part = vectors[kinds.index(kind)][begin[kind] : begin[kind] + tensor.numel()]
        begin[kind] += tensor.numel()
        tensor.copy_(part.view(tensor.shape))
