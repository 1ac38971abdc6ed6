"""Whether a number of shards is a good one for the worlds that a job may have, by the bytes that a pass sends.

Of n nodes in a ring, each sends 2 (n - 1) / n bytes for each byte of gradients. Here a node sends as much if what its
members have summed is one subtree, and half of that more for each further one (runtime/allreduce/reduction).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean

from elastic.protocol.reduction_tree import Node, leaves, split
from elastic.protocol.shard_assignment import owned, sizes, slack_percent

WORTH = 1.2
"""Another number is named if with it this many times fewer bytes are sent."""

UNEVEN = 0.05
"""It may make the slowest worker take so much longer, as a part of the time of a pass."""

_WORKERS = 256
"""Nothing is said of larger worlds: to deal shards to them takes seconds."""

_WORLDS, _NUMBERS = 8, 16
"""So many worlds are looked at, from the smallest to the largest, and so many other numbers, the nearest."""


@dataclass(frozen=True, slots=True)
class Worlds:
    """The numbers of workers that a job may have, and how many of them each node has."""

    fewest: int
    most: int
    per_node: int


def bytes_factor(shards: int, workers: int, per_node: int = 1) -> float:
    """What the node that sends most sends in a pass, over what it would in a ring of the nodes. Workers are of equal
    speed and fill one node after the other. 1.0 if there is one node."""
    return _dealt(shards, workers, per_node)[0]


def advice(shards: int, at_most: int, worlds: Worlds) -> str:
    """A sentence that names a better number of shards, at most at_most, near this one; "" if there is none."""
    each = worlds.per_node
    nodes = range(max(2, -(-worlds.fewest // each)), worlds.most // each + 1)  # of more than one, all full
    if not nodes or worlds.most > _WORKERS:
        return ""
    looked_at = sorted({each * nodes[at * (len(nodes) - 1) // (_WORLDS - 1)] for at in range(_WORLDS)})

    def sent(number: int) -> float:
        return fmean(_dealt(number, workers, each)[0] for workers in looked_at)

    def takes(number: int) -> float:
        return fmean(_dealt(number, workers, each)[1] for workers in looked_at)

    others = {number for number in _evenly_cut(shards, looked_at, each) if number <= at_most}
    near = sorted(others, key=lambda number: (abs(number - shards), -number))[:_NUMBERS]
    able = [number for number in near if takes(number) <= takes(shards) + UNEVEN]
    better = min(able, key=sent, default=shards)
    if sent(shards) < WORTH * sent(better):
        return ""
    worst = max(looked_at, key=lambda workers: bytes_factor(shards, workers, each))
    several = f", {sent(shards):.2f} times on average of the worlds of this job" if len(looked_at) > 1 else ""
    return (
        f"shards={shards}: with {worst} workers a node sends {bytes_factor(shards, worst, each):.1f} times the bytes "
        f"that it has to{several}; shards={better} would be {sent(better):.2f} times"
    )


def _evenly_cut(shards: int, worlds: Iterable[int], per_node: int) -> set[int]:
    """Numbers from half of this one to twice, with which in one of the worlds each worker, or each node, has one
    subtree."""
    whole = {*worlds, *(workers // per_node for workers in worlds)}
    return {each << power for each in whole for power in range(32) if shards <= 2 * (each << power) <= 4 * shards}


@lru_cache(maxsize=1024)
def _dealt(shards: int, workers: int, per_node: int) -> tuple[float, float]:
    """(As bytes_factor, the time of the slowest worker over that if shards could be divided)."""
    hosts = tuple(str(rank // per_node) for rank in range(workers))
    nodes = len(set(hosts))
    dealt = owned(shards, (), hosts, slack_percent(nodes))
    of_nodes: list[list[Node]] = [[] for _ in range(nodes)]
    for rank, own in enumerate(dealt):
        of_nodes[rank // per_node] += own
    most = max(_subtrees((0, shards), frozenset(leaves(own))) for own in of_nodes) if nodes > 1 else 1
    return (1 + most) / 2, max(sizes(dealt)) * workers / shards


def _subtrees(node: Node, held: frozenset[int]) -> int:
    """How many whole subtrees of this node these leaves make up."""
    within = [leaf in held for leaf in range(*node)]
    if all(within) or not any(within):
        return int(all(within))
    return sum(_subtrees(child, held) for child in split(node))
