"""Which units each member of a generation owns: equally many, or by the speed of members, as few subtrees.

Ownership decides about time and bytes only: the bits of a unit and the tree of the reduction do not depend on it. A
member sends a partial sum for each maximal subtree that it owns. So subtrees are dealt whole, the largest first, to
nodes and within a node to its members, and are split only where a whole one would make the slowest member too slow.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from statistics import median_low

from elastic.protocol.reduction_tree import Node, leaves, split

_SLACK_PERCENT = 15
_SLACK_WITHIN_PERCENT = 5
_LIMITS = 16
"""How many limits are tried between the optimum and the slack."""


def slack_percent(hosts: int) -> int:
    """How much longer than it must the slowest member may take for units that are sent as fewer partial sums. Within a
    machine bytes cost less than units that others wait for."""
    return _SLACK_PERCENT if hosts > 1 else _SLACK_WITHIN_PERCENT


@lru_cache(maxsize=64)
def owned(units: int, paces: tuple[int, ...], hosts: tuple[str, ...], slack: int) -> tuple[tuple[Node, ...], ...]:
    """The subtrees that each rank owns, in ascending order; together they hold each unit once.

    hosts: of each rank; members with one host are on one node. paces: microseconds that each rank takes for a unit; 0:
    not known. Empty: all take equally long. The slowest rank takes at most slack percent longer than it must. Within
    that, the fewest subtrees are dealt: first counted is the node with most, then the member with most. Each rank owns
    at least one unit, or nobody would learn that it has become faster; with fewer units than ranks, at most one, and
    rank 0 has one: newcomers copy its state while it computes, and what it wishes for travels with its sums.
    """
    if not hosts or units < 1:
        return ((),) * len(hosts)
    world_size = len(hosts)
    each = costs(paces) if any(paces) and units >= world_size else (1,) * world_size
    least = slowest(_fastest(units, each), each)
    most = least * (100 + slack) // 100
    tried: set[tuple[int, ...]] = set()
    best: tuple[tuple[int, int], list[list[Node]]] | None = None
    for step in range(_LIMITS):
        limit = least + (most - least) * step // (_LIMITS - 1)
        room = tuple(min(units, limit // cost) for cost in each)
        if room not in tried:
            tried.add(room)
            between, dealt = _deal(units, each, room, hosts, slack)
            terms = between, max(map(len, dealt))
            if best is None or terms < best[0]:
                best = terms, dealt
    assert best is not None
    return tuple(tuple(sorted(nodes)) for nodes in best[1])


def sizes(owned: Sequence[Sequence[Node]]) -> tuple[int, ...]:
    """How many units each rank owns."""
    return tuple(len(leaves(nodes)) for nodes in owned)


def costs(paces: Sequence[int]) -> tuple[int, ...]:
    """The paces, with unknown ones replaced by the lower median of the known; 1 if none is known."""
    known = [pace for pace in paces if pace > 0]
    typical = median_low(known) if known else 1
    return tuple(pace or typical for pace in paces)


def slowest(sizes: Sequence[int], paces: Sequence[int]) -> int:
    """Microseconds until the last rank has computed its units."""
    return max(size * pace for size, pace in zip(sizes, paces, strict=True))


def _deal(
    units: int, each: Sequence[int], room: Sequence[int], hosts: Sequence[str], slack: int
) -> tuple[int, list[list[Node]]]:
    """(The most subtrees of a node, the subtrees of each rank). room: the most units of each rank."""
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    rooms = [sum(room[rank] for rank in members) for members in ranks.values()]
    # Where all could take more than there is, no node is to be filled while another one is left with nothing.
    shares = [-(-units * of * (100 + slack) // (100 * sum(rooms))) for of in rooms]
    of_nodes = _pack([(0, units)], list(map(min, rooms, shares)))
    dealt: list[list[Node]] = [[] for _ in hosts]
    for members, nodes in zip(ranks.values(), of_nodes, strict=True):
        for rank, own in zip(members, _pack(nodes, [room[rank] for rank in members]), strict=True):
            dealt[rank] = own
        _at_least_one(members, dealt, each, room)
    _at_least_one(range(len(hosts)), dealt, each, room)
    if not dealt[0]:
        last = max(rank for rank, own in enumerate(dealt) if own)
        dealt[0], dealt[last] = dealt[last], []
    return max(map(len, of_nodes)), dealt


def _pack(nodes: Sequence[Node], room: Sequence[int]) -> list[list[Node]]:
    """Deal the nodes, split as far as they have to be, to receivers with this room, which suffices for all: the largest
    node to the receiver with most room left (longest processing time first)."""
    dealt: list[list[Node]] = [[] for _ in room]
    left = [(-units, receiver) for receiver, units in enumerate(room)]
    heapq.heapify(left)
    todo = [(lo - hi, lo, hi) for lo, hi in nodes]
    heapq.heapify(todo)
    while todo:
        _, lo, hi = heapq.heappop(todo)
        units, receiver = left[0]
        if hi - lo <= -units:
            heapq.heapreplace(left, (units + hi - lo, receiver))
            dealt[receiver].append((lo, hi))
        else:
            for child in split((lo, hi)):
                heapq.heappush(todo, (child[0] - child[1], *child))
    return dealt


def _at_least_one(ranks: Sequence[int], dealt: list[list[Node]], each: Sequence[int], room: Sequence[int]) -> None:
    """Give units to each of these ranks that has none, in order, as long as a rank has two units or more. The donor is,
    among the ranks with two units or more, the rank that would be done last."""
    for empty in ranks:
        if dealt[empty]:
            continue
        counts = sizes(dealt)
        donors = [rank for rank in ranks if counts[rank] > 1]
        if not donors:
            break
        donor = dealt[max(donors, key=lambda rank: counts[rank] * each[rank])]
        smallest = min(donor, key=lambda node: node[1] - node[0])
        donor.remove(smallest)
        while smallest[1] - smallest[0] > (max(room[empty], 1) if donor else 1):
            left, smallest = split(smallest)
            donor.append(left)
        dealt[empty].append(smallest)


def _fastest(units: int, each: Sequence[int]) -> list[int]:
    """Sizes, at least one each if there are so many, with which the slowest rank is done earliest: a unit goes to the
    rank that would be done with it first. For units of equal cost that is the optimum (list scheduling on uniform
    machines)."""
    owned = [1] * min(units, len(each)) + [0] * (len(each) - units)
    queue = [(2 * cost, rank) for rank, cost in enumerate(each)]
    heapq.heapify(queue)
    for _ in range(units - len(each)):
        done, rank = queue[0]
        owned[rank] += 1
        heapq.heapreplace(queue, (done + each[rank], rank))
    return owned
