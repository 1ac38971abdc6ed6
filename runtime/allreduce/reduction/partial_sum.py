"""A partial sum of one operation, which a worker folds, sends, keeps as a result and serves to a laggard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from elastic.protocol.reduction_tree import Node, parent, split
from runtime.allreduce.fixed_point import int8_blocks
from runtime.allreduce.reduction.leaves.unpacked_leaf import Loose

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Scalars: TypeAlias = dict[str, tuple[str, float, float]]
"""Name -> (kind, total, weight); kind is "mean" (total / weight is the value) or "sum" (total is the value)."""


@dataclass(slots=True)
class Partial:
    """The sum over one node of the canonical tree (see reduction_tree.py); the sum over all leaves is a result.

    flats: group name, that of its dtype -> 1-D tensor of that dtype; all workers hold the same groups and lengths for
    one operation. They are floats, or integers and their tops (fixed_leaves.py). Empty for operations that reduce
    scalars only. Never divided by the weight. loose: the groups of a leaf that are not in flats yet, see `settle`;
    empty in every sum. has_grad: bit i is set when parameter i had a gradient in at least one leaf. weight: sum of the
    leaves' weights. note: a JSON value of the leftmost leaf that has one (integer buffers, the value of `once`).
    nonfinite: as has_grad, for what has an infinity or a NaN in a leaf of integers, which cannot say it.
    """

    lo: int
    hi: int
    flats: dict[str, torch.Tensor] = field(default_factory=dict)
    has_grad: int = 0
    weight: float = 0.0
    scalars: Scalars = field(default_factory=dict)
    note: Json = None
    nonfinite: int = 0
    loose: dict[str, Loose] = field(default_factory=dict)

    @property
    def node(self) -> Node:
        return (self.lo, self.hi)

    def settle(self) -> None:
        """Put all loose groups into flats, if the leaf is not folded; on the thread that computes, if one does."""
        while self.loose:
            group, values = self.loose.popitem()
            self.flats[group] = values.flat()

    def meta(self) -> dict[str, Json]:
        """Everything but the tensors, for a header. Floats survive JSON exactly (shortest repr)."""
        meta: dict[str, Json] = {
            "node": [self.lo, self.hi],
            "has_grad": format(self.has_grad, "x"),
            "weight": self.weight,
            "scalars": {name: list(value) for name, value in self.scalars.items()},
            "note": self.note,
        }
        if self.nonfinite:
            meta["nonfinite"] = format(self.nonfinite, "x")
        return meta


def add_into(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``left + right``; of int16, which are tops of blocks, the larger ones; of int8, which are int8_blocks.py's, the
    blocks of the sums."""
    if out.dtype is torch.int8:
        return int8_blocks.add(left, right, out)
    return torch.maximum(left, right, out=out) if out.dtype is torch.int16 else torch.add(left, right, out=out)


def nothing_of(dtype: torch.dtype) -> int:
    """What adds nothing to a value in `add_into`."""
    return torch.iinfo(dtype).min if dtype is torch.int16 else 0


@dataclass(frozen=True, slots=True)
class Siblings:
    """With which held sums a leaf becomes which node. chain: (sum, whether it is the left one), from the leaf up."""

    node: Node
    chain: tuple[tuple[Partial, bool], ...]


def siblings(leaf: Node, held: Mapping[Node, Partial], units: int) -> Siblings:
    """How a leaf of the canonical tree over so many units is added to what is held."""
    node, chain = leaf, []
    while (above := parent(node, units)) is not None:
        left, right = split(above)
        sibling = held.get(left if node == right else right)
        if sibling is None:
            break
        chain.append((sibling, node == right))
        node = above
    return Siblings(node, tuple(chain))


def fold(left: Partial, right: Partial, into: Partial | None = None) -> Partial:
    """Add two siblings in tree order, ``left + right``; the sum is written into the tensors of ``into``.

    into: left or right (the default); the other one stays intact, so a fold that must be undone loses only the leaves
    of ``into``. Loose groups are summed into a new tensor.
    """
    if left.hi != right.lo:
        raise ValueError(f"{left.node} and {right.node} are not siblings")
    flats = (into or right).flats
    for group in left.flats.keys() & right.flats.keys():
        add_into(left.flats[group], right.flats[group], flats[group])
    for group, first in left.loose.items():
        second = right.loose.get(group)
        flats[group] = first.plus(right.flats[group] if second is None else second)
    for group, values in right.loose.items():
        if group not in left.loose:
            flats[group] = values.added_to(left.flats[group])
    return Partial(left.lo, right.hi, flats, *fold_meta(left, right))


def fold_meta(left: Partial, right: Partial) -> tuple[int, float, Scalars, Json, int]:
    """(has_grad, weight, scalars, note, nonfinite) of the sum; the tensors are not used."""
    scalars = dict(left.scalars)
    for name, (kind, total, weight) in right.scalars.items():
        if name in scalars:
            _, left_total, left_weight = scalars[name]
            scalars[name] = (kind, left_total + total, left_weight + weight)
        else:
            scalars[name] = (kind, total, weight)
    note = left.note if left.note is not None else right.note
    nonfinite = left.nonfinite | right.nonfinite
    return left.has_grad | right.has_grad, left.weight + right.weight, scalars, note, nonfinite


def total(partials: Sequence[Partial]) -> Partial:
    """The sum of settled partials in the given order; new tensors if there are several. Its lo and hi mean nothing."""
    first, *others = partials
    if not others:
        return first
    flats = {group: flat.clone() for group, flat in first.flats.items()}
    result = first
    for other in others:
        for group, flat in flats.items():
            add_into(flat, other.flats[group], flat)
        result = Partial(first.lo, other.hi, flats, *fold_meta(result, other))
    return result


def parse_partial(meta: Json) -> Partial:
    """Parse what Partial.meta() has made. Raises ValueError, TypeError, KeyError or OverflowError for anything else."""
    if not isinstance(meta, dict):
        raise TypeError("a partial sum is no object")
    lo, hi = as_counts(meta["node"])
    raw = meta["scalars"]
    if not isinstance(raw, dict):
        raise TypeError("scalars are no object")
    scalars: Scalars = {}
    for name, value in raw.items():
        kind, total, weight = as_list(value)
        scalars[name] = (str(kind), _float(total), _float(weight))
    has_grad, nonfinite = (int(str(meta.get(name, "0")), 16) for name in ("has_grad", "nonfinite"))
    if "has_grad" not in meta or has_grad < 0 or nonfinite < 0:
        raise ValueError("has_grad or nonfinite is no set of bits")
    return Partial(lo, hi, {}, has_grad, _float(meta["weight"]), scalars, meta["note"], nonfinite)


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
