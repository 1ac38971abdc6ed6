"""What one reduction adds, in which order, and where; it does not depend on what carries the bytes.

Every group is cut into slices, which are sent in pieces (topology.py says who sums which). Terms are the partial sums
that the members bring; a list of folds says how they are added. All members derive the same from the same headers.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor

from elastic.protocol.reduction_tree import Node, covers_exactly, is_node, split
from runtime.allreduce.fixed_point.int8_blocks import BLOCK_BYTES
from runtime.allreduce.reduction.entries import Term, with_numbers
from runtime.allreduce.reduction.partial_sum import Partial, add_into, fold_meta

Fold: TypeAlias = tuple[int, int]
"""Positions of (left, right); the sum gets the next position after all terms and earlier folds."""

ALIGN = 64
"""Slices begin at multiples of this many elements, so that the adds are vectorised from the start."""
_NAMES = ("int8", "float16", "bfloat16", "float32", "float64", "int16", "int32", "int64")
DTYPES = {name: getattr(torch, name) for name in _NAMES}
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
    """The number of the piece in its slice."""
    cut: int = 0
    """The number of the cut that it belongs to."""


Cut: TypeAlias = tuple[tuple[str, int, int], ...]
"""A part of all tensors: (group, its first element, the one behind its last)."""


def whole(flats: Mapping[str, Tensor]) -> tuple[Cut, ...]:
    """One cut with all of these tensors."""
    return (tuple((group, 0, len(flat)) for group, flat in sorted(flats.items())),)


@lru_cache(maxsize=64)
def pieces(cuts: tuple[Cut, ...], slices: int, piece_bytes: int) -> tuple[tuple[ScheduledPiece, ...], tuple[int, ...]]:
    """(the pieces, of at most piece_bytes, cut by cut: in each the first of every slice, the second of every slice, and
    so on; the number of pieces of each slice). Each cut is sliced for itself, and blocks of int8 stay whole."""
    found = []
    counts = [0] * slices
    for number, cut in enumerate(cuts):
        for group, first, behind in cut:
            itemsize = DTYPES[group].itemsize
            share = -(-(behind - first) // slices)
            share += -share % (BLOCK_BYTES if group == "int8" else ALIGN)
            step = piece_bytes // itemsize
            if group == "int8":
                step = max(step - step % BLOCK_BYTES, BLOCK_BYTES)
            for index in range(slices):
                end = min(behind, first + (index + 1) * share)
                for lo in range(first + index * share, end, step):
                    hi = min(lo + step, end)
                    size = (hi - lo) * itemsize
                    found.append(ScheduledPiece(group, lo, hi, size, index, counts[index], number))
                    counts[index] += 1
    return tuple(sorted(found, key=lambda piece: (piece.cut, piece.number, piece.slice))), tuple(counts)


@lru_cache(maxsize=16)
def along_tree(roots: tuple[Node, ...], units: int, nodes: tuple[int, ...]) -> tuple[Fold, ...]:
    """The folds along the canonical tree, which does not ask for the terms' nodes. Raises ValueError unless the terms
    are roots that hold every leaf once."""
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
    return tuple(folds)


@lru_cache(maxsize=16)
def by_rank(leaves: tuple[tuple[int, ...], ...], units: int, nodes: tuple[int, ...]) -> tuple[Fold, ...]:
    """The folds in rank order within each node, and then in the order of nodes. leaves: of each term. nodes: of the
    terms' members. Raises ValueError unless the terms hold every leaf once."""
    every = sorted(leaf for of_term in leaves for leaf in of_term)
    if every != list(range(units)):
        raise ValueError(f"leaves {every} are not 0..{units - 1}")
    return in_turn(nodes)


@lru_cache(maxsize=16)
def in_turn(nodes: tuple[int, ...]) -> tuple[Fold, ...]:
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
    return tuple(folds)


def fold_terms(terms: Sequence[Term], units: int, nodes: Sequence[int], native: bool) -> tuple[Fold, ...]:
    """The folds of an operation; native: in the order of ranks, not along the tree. nodes: of the terms' members.
    Raises ValueError unless the terms hold every leaf once."""
    if native:
        return by_rank(tuple(term.leaves for term in terms), units, tuple(nodes))
    return along_tree(tuple(term.meta.node for term in terms), units, tuple(nodes))


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


def add_metas(terms: Sequence[Term], numbers: Sequence[Sequence[float]], folds: Sequence[Fold]) -> Partial:
    """The sum of the terms without their tensors. numbers: of each term."""
    scalars = terms[0].meta.scalars
    same = all(term.meta.scalars == scalars and list(term.meta.scalars) == list(scalars) for term in terms)
    if not same or any(term.meta.note is not None for term in terms):
        metas = [with_numbers(term, row) for term, row in zip(terms, numbers, strict=True)]
        for left, right in folds:
            metas.append(Partial(0, 0, {}, *fold_meta(metas[left], metas[right])))
        return metas[-1]
    rows = list(numbers)  # the same additions without an object for each: a step of many members has one for each
    for left, right in folds:
        rows.append(list(map(operator.add, rows[left], rows[right])))
    total = with_numbers(terms[0], rows[-1])
    for term in terms:
        total.has_grad |= term.meta.has_grad
        total.nonfinite |= term.meta.nonfinite
    return total
