"""What one reduction adds, in which order, and where; it does not depend on what carries the bytes.

Every member owns a slice of every group, and the slice is sent in pieces. Terms are the partial sums that the members
bring; a list of folds says how they are added. All members derive the same from the same headers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from elastic.protocol.reduction_tree import Node, covers_exactly, is_node, split
from runtime.reduction.partial_sum import Json, Partial, Scalars, fold_meta

Fold: TypeAlias = tuple[int, int]
"""Positions of (left, right); the sum gets the next position after all terms and earlier folds."""

ALIGN = 64
"""Slices begin at multiples of this many elements, so that the adds are vectorised from the start."""
DTYPES = {"float32": torch.float32, "float64": torch.float64}
"""The dtypes of the groups, by name."""


@dataclass(frozen=True, slots=True)
class ScheduledPiece:
    """A part of one member's slice of one group: elements lo..hi-1."""

    group: str
    lo: int
    hi: int
    size: int
    """The size of the piece in bytes."""


@dataclass(frozen=True, slots=True)
class Term:
    """A header's description of one partial sum."""

    meta: Partial
    """The partial sum without tensors."""
    leaves: tuple[int, ...]


def pieces(groups: dict[str, int], world_size: int, rank: int, piece_bytes: int) -> list[ScheduledPiece]:
    """The slice of this rank in pieces of at most piece_bytes. groups: name -> elements."""
    found = []
    for group, length in sorted(groups.items()):
        itemsize = DTYPES[group].itemsize
        share = -(-length // world_size)
        share += -share % ALIGN
        end = min(length, (rank + 1) * share)
        step = piece_bytes // itemsize
        for lo in range(rank * share, end, step):
            hi = min(lo + step, end)
            found.append(ScheduledPiece(group, lo, hi, (hi - lo) * itemsize))
    return found


def along_tree(terms: Sequence[Term], units: int) -> list[Fold]:
    """The folds along the canonical tree. Raises ValueError unless the terms are nodes that hold every leaf once."""
    nodes = [term.meta.node for term in terms]
    if not all(is_node(node, units) for node in nodes) or not covers_exactly(nodes, units):
        raise ValueError(f"roots {sorted(nodes)} do not make up the tree over 0..{units - 1}")
    held = {node: position for position, node in enumerate(nodes)}
    folds: list[Fold] = []

    def position(node: Node) -> int:
        if node in held:
            return held[node]
        left, right = split(node)
        folds.append((position(left), position(right)))
        return len(nodes) + len(folds) - 1

    position((0, units))
    return folds


def by_rank(terms: Sequence[Term], units: int) -> list[Fold]:
    """The folds in rank order. Raises ValueError unless the terms hold every leaf once."""
    leaves = sorted(leaf for term in terms for leaf in term.leaves)
    if leaves != list(range(units)):
        raise ValueError(f"leaves {leaves} are not 0..{units - 1}")
    return [(0 if n == 1 else len(terms) + n - 2, n) for n in range(1, len(terms))]


def add(values: Sequence[Tensor], free: Sequence[bool], folds: Sequence[Fold], target: Tensor) -> None:
    """Write the sum of the values into target, added as the folds say.

    free: for each value, whether it may be overwritten, because it is scratch and not a root.
    """
    values, free = list(values), list(free)
    for left, right in folds[:-1]:
        into = values[right] if free[right] else values[left] if free[left] else torch.empty_like(target)
        values.append(torch.add(values[left], values[right], out=into))
        free.append(True)
    if folds:
        left, right = folds[-1]
        torch.add(values[left], values[right], out=target)
    else:
        target.copy_(values[0])


def add_metas(terms: Sequence[Term], folds: Sequence[Fold]) -> Partial:
    """The sum of the terms without their tensors."""
    metas = [term.meta for term in terms]
    for left, right in folds:
        metas.append(Partial(0, 0, {}, *fold_meta(metas[left], metas[right])))
    return metas[-1]


def parse_term(meta: Json) -> Term:
    """Parse what Partial.meta() has made. Raises ValueError, TypeError, KeyError or OverflowError for anything else."""
    if not isinstance(meta, dict):
        raise TypeError("a term is no object")
    lo, hi = (_int(value) for value in as_list(meta["node"]))
    raw = meta["scalars"]
    if not isinstance(raw, dict):
        raise TypeError("scalars are no object")
    scalars: Scalars = {}
    for name, value in raw.items():
        kind, total, weight = as_list(value)
        scalars[name] = (str(kind), _float(total), _float(weight))
    leaves = tuple(_int(leaf) for leaf in as_list(meta.get("leaves", [])))
    has_grad = int(str(meta["has_grad"]), 16)
    if has_grad < 0:
        raise ValueError("has_grad is no set of bits")
    return Term(Partial(lo, hi, {}, has_grad, _float(meta["weight"]), scalars, meta["note"]), leaves)


def as_list(value: Json) -> list[Json]:
    """The value if it is a list; else raises TypeError."""
    if not isinstance(value, list):
        raise TypeError(f"{str(value)[:40]} is no list")
    return value


def _int(value: Json) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{str(value)[:40]} is no integer")
    return value


def _float(value: Json) -> float:
    if not isinstance(value, int | float):
        raise TypeError(f"{str(value)[:40]} is no number")
    return float(value)
