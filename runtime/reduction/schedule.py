"""What one reduction adds, in which order, and where; it does not depend on what carries the bytes.

Every group is cut into slices, which are sent in pieces (topology.py says who sums which). Terms are the partial sums
that the members bring; a list of folds says how they are added. All members derive the same from the same headers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor

from elastic.protocol.reduction_tree import Node, covers_exactly, is_node, split
from runtime.reduction.partial_sum import Json, Partial, Scalars, add_into, fold_meta

Fold: TypeAlias = tuple[int, int]
"""Positions of (left, right); the sum gets the next position after all terms and earlier folds."""

ALIGN = 64
"""Slices begin at multiples of this many elements, so that the adds are vectorised from the start."""
DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "int16", "int32", "int64")}
"""The dtypes of the groups, by name."""


@dataclass(frozen=True, slots=True)
class ScheduledPiece:
    """A part of a slice of one group: elements lo..hi-1."""

    group: str
    lo: int
    hi: int
    size: int
    """The size of the piece in bytes."""
    slice: int
    number: int
    """Of the piece in its slice."""
    cut: int = 0
    """The number of the cut that it belongs to."""


@dataclass(frozen=True, slots=True)
class Term:
    """A header's description of one partial sum."""

    meta: Partial
    """The partial sum without tensors."""
    leaves: tuple[int, ...]


Cut: TypeAlias = tuple[tuple[str, int, int], ...]
"""A part of all tensors: (group, its first element, the one behind its last)."""


def whole(flats: Mapping[str, Tensor]) -> tuple[Cut, ...]:
    """One cut with all of these tensors."""
    return (tuple((group, 0, len(flat)) for group, flat in sorted(flats.items())),)


@lru_cache(maxsize=64)
def pieces(cuts: tuple[Cut, ...], slices: int, piece_bytes: int) -> tuple[tuple[ScheduledPiece, ...], tuple[int, ...]]:
    """(the pieces, of at most piece_bytes, cut by cut: in each the first of every slice, the second of every slice, and
    so on; the number of pieces of each slice). Each cut is sliced for itself."""
    found = []
    counts = [0] * slices
    for number, cut in enumerate(cuts):
        for group, first, behind in cut:
            itemsize = DTYPES[group].itemsize
            share = -(-(behind - first) // slices)
            share += -share % ALIGN
            step = piece_bytes // itemsize
            for index in range(slices):
                end = min(behind, first + (index + 1) * share)
                for lo in range(first + index * share, end, step):
                    hi = min(lo + step, end)
                    size = (hi - lo) * itemsize
                    found.append(ScheduledPiece(group, lo, hi, size, index, counts[index], number))
                    counts[index] += 1
    return tuple(sorted(found, key=lambda piece: (piece.cut, piece.number, piece.slice))), tuple(counts)


def along_tree(terms: Sequence[Term], units: int, nodes: Sequence[int]) -> list[Fold]:
    """The folds along the canonical tree, which does not ask for the terms' nodes. Raises ValueError unless the terms
    are roots that hold every leaf once."""
    roots = [term.meta.node for term in terms]
    if not all(is_node(root, units) for root in roots) or not covers_exactly(roots, units):
        raise ValueError(f"roots {sorted(roots)} do not make up the tree over 0..{units - 1}")
    held = {root: position for position, root in enumerate(roots)}
    folds: list[Fold] = []

    def position(node: Node) -> int:
        if node in held:
            return held[node]
        left, right = split(node)
        folds.append((position(left), position(right)))
        return len(roots) + len(folds) - 1

    position((0, units))
    return folds


def by_rank(terms: Sequence[Term], units: int, nodes: Sequence[int]) -> list[Fold]:
    """The folds in rank order within each node, and then in the order of nodes. nodes: of the terms' members. Raises
    ValueError unless the terms hold every leaf once."""
    leaves = sorted(leaf for term in terms for leaf in term.leaves)
    if leaves != list(range(units)):
        raise ValueError(f"leaves {leaves} are not 0..{units - 1}")
    return in_turn(nodes)


def in_turn(nodes: Sequence[int]) -> list[Fold]:
    """The folds, one after the other, of tensors that lie on these nodes: within each node, then over the nodes."""
    folds: list[Fold] = []

    def chain(values: Sequence[int]) -> int:
        total, *others = values
        for value in others:
            folds.append((total, value))
            total = len(nodes) + len(folds) - 1
        return total

    of_nodes = {node: [number for number, other in enumerate(nodes) if other == node] for node in nodes}
    chain([chain(values) for values in of_nodes.values()])
    return folds


def tensors_of(terms: int, merged: bool) -> int:
    """How many tensors of each group a member with so many terms brings."""
    return min(terms, 1) if merged else terms


def add(values: Sequence[Tensor], free: Sequence[bool], folds: Sequence[Fold], targets: Mapping[int, Tensor]) -> None:
    """Add the values as the folds say. targets: position of a value or fold -> the tensor that gets it.

    free: for each value, whether it may be overwritten, because it is scratch and not a root.
    """
    values, free = list(values), list(free)
    for position in targets.keys() & range(len(values)):
        targets[position].copy_(values[position])
    for position, (left, right) in enumerate(folds, len(values)):
        into = targets.get(position)
        if into is None:
            into = values[right] if free[right] else values[left] if free[left] else torch.empty_like(values[left])
        values.append(add_into(values[left], values[right], into))
        free.append(position not in targets)


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
    lo, hi = map(_int, as_list(meta["node"]))
    raw = meta["scalars"]
    if not isinstance(raw, dict):
        raise TypeError("scalars are no object")
    scalars: Scalars = {}
    for name, value in raw.items():
        kind, total, weight = as_list(value)
        scalars[name] = (str(kind), _float(total), _float(weight))
    leaves = tuple(as_counts(meta["leaves"])) if "leaves" in meta else ()
    has_grad, nonfinite = (int(str(meta.get(name, "0")), 16) for name in ("has_grad", "nonfinite"))
    if has_grad < 0 or nonfinite < 0:
        raise ValueError("has_grad or nonfinite is no set of bits")
    return Term(Partial(lo, hi, {}, has_grad, _float(meta["weight"]), scalars, meta["note"], nonfinite), leaves)


def as_list(value: Json) -> list[Json]:
    """The value if it is a list; else raises TypeError."""
    if not isinstance(value, list):
        raise TypeError(f"{str(value)[:40]} is no list")
    return value


def as_counts(value: Json) -> list[int]:
    """The value if it is a list of integers; else raises TypeError."""
    return list(map(_int, as_list(value)))


def _int(value: Json) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{str(value)[:40]} is no integer")
    return value


def _float(value: Json) -> float:
    if not isinstance(value, int | float):
        raise TypeError(f"{str(value)[:40]} is no number")
    return float(value)
