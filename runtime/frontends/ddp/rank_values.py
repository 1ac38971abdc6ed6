"""What a collective of logical ranks gives, from what each worker brings. Pure.

A worker brings tensors, each with the ranks that have this value. Inside the training loop each turn brings that of its
rank alone; elsewhere a worker has one for all its ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RankValue:
    """ranks: ascending."""

    ranks: tuple[int, ...]
    value: torch.Tensor


def lost(values: Sequence[RankValue], ranks: int) -> list[int]:
    """The ranks whose worker was lost in this very call, with what it was to bring."""
    return sorted(set(range(ranks)) - {rank for entry in values for rank in entry.ranks})


def stood_in(values: Sequence[RankValue], ranks: int) -> list[RankValue]:
    """The same where the workers have one value for all their ranks: lost ranks have gone to other workers, so they
    have the value of one of these."""
    gone = lost(values, ranks)
    return [*values, RankValue(tuple(gone), _once(values)[0].value)] if gone else list(values)


def by_rank(values: Sequence[RankValue], ranks: int) -> list[torch.Tensor]:
    """One tensor for each logical rank. Raises ValueError if some were lost."""
    if gone := lost(values, ranks):
        raise ValueError(f"ranks {gone} were lost with their worker")
    found = {rank: entry.value for entry in reversed(_once(values)) for rank in entry.ranks}
    return [found[rank] for rank in range(ranks)]


def reduce(values: Sequence[RankValue], op: str, ranks: int) -> torch.Tensor:
    """The sum, mean, maximum, minimum or product ("sum", "avg", "max", "min", "product") over all logical ranks, in
    rank order, of floats in float64. If some ranks were lost, a sum is that of the others, scaled to all ranks."""
    ordered = _once(values)
    first = ordered[0].value
    wide = torch.float64 if first.is_floating_point() else torch.int64
    by_rank = sorted(
        ((rank, entry.value.to(wide)) for entry in ordered for rank in entry.ranks), key=lambda pair: pair[0]
    )
    result = by_rank[0][1].clone()
    for _, value in by_rank[1:]:
        result = _FOLDS[op](result, value)
    present = len(by_rank)
    if op == "avg":
        result = result.double() / present
    elif op == "sum" and present != ranks:
        result = result * ranks / present if first.is_floating_point() else result * ranks // present
    return result.to(first.dtype)


_FOLDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


def _once(values: Sequence[RankValue]) -> list[RankValue]:
    """In rank order; a rank for which two workers stand, as it went from one to the other meanwhile, counts once."""
    seen: set[int] = set()
    found: list[RankValue] = []
    for entry in sorted(values, key=lambda entry: entry.ranks):
        ranks = tuple(rank for rank in entry.ranks if rank not in seen)
        seen.update(ranks)
        if ranks:
            found.append(RankValue(ranks, entry.value))
    return found
