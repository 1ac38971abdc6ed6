"""What a collective of logical ranks gives, from what each worker brings. Pure.

A worker brings one tensor and the ranks for which it stands. Inside the training loop each turn brings the tensor of
its rank alone. Elsewhere a worker stands for all its ranks with one tensor: either each of them would have had this
value (a loss, the result of an evaluation on all samples), or the value is what their evaluation has added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch


class Standing(StrEnum):
    """For what the tensor of a worker stands."""

    EACH = "each"
    """Each of its ranks has this value."""
    TOGETHER = "together"
    """Its ranks have it together: it was added up over their batches."""


@dataclass(frozen=True, slots=True)
class RankValue:
    """ranks: ascending, without those of other workers."""

    ranks: tuple[int, ...]
    standing: Standing
    value: torch.Tensor


def by_rank(values: Sequence[RankValue], ranks: int) -> list[torch.Tensor]:
    """One tensor for each logical rank.

    Raises ValueError if some rank has none of its own: its worker was lost in this call, or its worker has only what
    several ranks have together.
    """
    found: dict[int, torch.Tensor] = {}
    for entry in values:
        if entry.standing is Standing.TOGETHER and len(entry.ranks) != 1:
            raise ValueError(f"ranks {list(entry.ranks)} have a value together, and none of their own")
        for rank in entry.ranks:
            found[rank] = entry.value
    if missing := sorted(set(range(ranks)) - found.keys()):
        raise ValueError(f"ranks {missing} have no value: their worker was lost in this call")
    return [found[rank] for rank in range(ranks)]


def lost(values: Sequence[RankValue], ranks: int) -> list[int]:
    """The ranks for which nobody stands any more: their worker was lost in this very call."""
    return sorted(set(range(ranks)) - {rank for entry in values for rank in entry.ranks})


def reduce(values: Sequence[RankValue], op: str, ranks: int) -> torch.Tensor:
    """The sum, mean, maximum, minimum or product ("sum", "avg", "max", "min", "product") over all logical ranks, added
    in rank order, floats in float64.

    If some ranks were lost in this call, a sum is that of the others, scaled to all ranks. Raises ValueError for a
    product of what ranks have together.
    """
    ordered = _once(values)
    present = sum(len(entry.ranks) for entry in ordered)
    kind = ordered[0].value.dtype
    if op in ("max", "min"):
        stacked = torch.stack([entry.value for entry in ordered])
        return stacked.amax(0) if op == "max" else stacked.amin(0)
    wide = torch.float64 if kind.is_floating_point else torch.int64
    parts = [entry.value.to(wide) * _times(entry) for entry in ordered] if op != "product" else _powers(ordered, wide)
    total = parts[0].clone()
    for part in parts[1:]:
        total = total * part if op == "product" else total + part
    if op == "avg":
        return (total / present).to(kind)
    if present != ranks and op == "sum":
        total = total * ranks / present if kind.is_floating_point else total * ranks // present
    return total.to(kind)


def _once(values: Sequence[RankValue]) -> list[RankValue]:
    """In rank order; a rank for which two workers stand, as it went from one to the other meanwhile, counts once."""
    seen: set[int] = set()
    found: list[RankValue] = []
    for entry in sorted(values, key=lambda entry: entry.ranks):
        ranks = tuple(rank for rank in entry.ranks if rank not in seen)
        seen.update(ranks)
        if ranks and (entry.standing is Standing.EACH or ranks == entry.ranks):
            found.append(RankValue(ranks, entry.standing, entry.value))
    return found


def _times(entry: RankValue) -> int:
    return len(entry.ranks) if entry.standing is Standing.EACH else 1


def _powers(ordered: Sequence[RankValue], wide: torch.dtype) -> list[torch.Tensor]:
    if any(entry.standing is Standing.TOGETHER and len(entry.ranks) != 1 for entry in ordered):
        raise ValueError("a product over ranks needs the value of each")
    return [entry.value.to(wide) ** len(entry.ranks) for entry in ordered]
