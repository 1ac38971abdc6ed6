"""How many units each member of a generation owns: equal blocks, or blocks by the speed of members.

Ownership decides about time only: the bits of a unit and the tree of the reduction do not depend on it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from statistics import median_low

from elastic.protocol.reduction_tree import Node, split

SLACK_PERCENT = 5
"""The slowest member may take this much longer than the optimum, for blocks that are sent as fewer partial sums."""


def even_sizes(units: int, world_size: int) -> tuple[int, ...]:
    """Sizes that differ by at most one, larger blocks first; 0 for surplus ranks, () for no ranks."""
    size, larger = divmod(units, max(1, world_size))
    return tuple(size + (rank < larger) for rank in range(world_size))


@lru_cache(maxsize=64)
def sizes(units: int, paces: tuple[int, ...]) -> tuple[int, ...]:
    """Units of each rank, in rank order, as contiguous blocks.

    paces: microseconds that each rank takes for a unit; 0: not known. The time of the slowest rank is at most
    SLACK_PERCENT above the least possible. Within that slack, blocks end where the tree is cut highest, because such
    blocks are few partial sums. Each rank owns at least one unit, or nobody would learn that it has become faster. With
    fewer units than ranks, or without any known pace, sizes are even.
    """
    world_size = len(paces)
    if not any(paces) or units < world_size:
        return even_sizes(units, world_size)
    each = costs(paces)
    least = _fastest(units, each)
    limit = slowest(least, each) * (100 + SLACK_PERCENT) // 100
    most = [max(size, limit // cost) for size, cost in zip(least, each, strict=True)]
    after = [*accumulate(reversed(most))][::-1]  # how many units the ranks from this one on can take together
    ends: list[int] = []
    begin = 0
    for rank in range(world_size - 1):
        low = max(begin + 1, units - after[rank + 1])
        high = min(begin + most[rank], units - (world_size - 1 - rank))
        begin = _highest_cut(low, high, units)
        ends.append(begin)
    return tuple(end - start for start, end in zip([0, *ends], [*ends, units], strict=True))


def costs(paces: Sequence[int]) -> tuple[int, ...]:
    """The paces, with unknown ones replaced by the lower median of the known; 1 if none is known."""
    known = [pace for pace in paces if pace > 0]
    typical = median_low(known) if known else 1
    return tuple(pace or typical for pace in paces)


def slowest(owned: Sequence[int], paces: Sequence[int]) -> int:
    """Microseconds until the last rank has computed its units."""
    return max(size * pace for size, pace in zip(owned, paces, strict=True))


def most_terms(owned: Sequence[int]) -> int:
    """The number of partial sums of the member that has most, when each member has folded its block."""
    units = sum(owned)
    ends = [*accumulate(owned)]
    return max(_roots((0, units), end - size, end) for size, end in zip(owned, ends, strict=True))


def _roots(node: Node, start: int, end: int) -> int:
    """How many maximal subtrees of the node cover exactly its leaves within start..end-1."""
    low, high = max(node[0], start), min(node[1], end)
    if low >= high or (low, high) == node:
        return int(low < high)
    return sum(_roots(child, start, end) for child in split(node))


def _fastest(units: int, each: Sequence[int]) -> list[int]:
    """Sizes, at least one each, with which the slowest rank is done earliest: each unit goes to the rank that would be
    done with it first. For units of equal cost that is the optimum (list scheduling on uniform machines)."""
    owned = [1] * len(each)
    queue = [(2 * cost, rank) for rank, cost in enumerate(each)]
    heapq.heapify(queue)
    for _ in range(units - len(each)):
        done, rank = queue[0]
        owned[rank] += 1
        heapq.heapreplace(queue, (done + each[rank], rank))
    return owned


def _highest_cut(low: int, high: int, units: int) -> int:
    """The boundary in low..high that cuts the fewest nodes of the tree."""
    node = (0, units)
    while True:
        left, right = split(node)
        cut = left[1]
        if low <= cut <= high:
            return cut
        node = left if high < cut else right
