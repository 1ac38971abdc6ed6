"""The canonical reduction tree: which leaves are added to which, independent of who computes them.

Leaves are the shards 0..V-1 of one pass. A node is a half-open range ``(lo, hi)`` of leaves. A node of more than one
leaf is split at the largest power of two below its size, so ``(0, 8)`` is ``(0, 4) + (4, 8)`` and ``(0, 6)`` is ``(0,
4) + (4, 6)``. Float addition is not associative; a sum along this tree has the same bits whichever worker owns a leaf.

A *root* is a node that a worker has folded and whose sibling it does not hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

Node = tuple[int, int]


def split(node: Node) -> tuple[Node, Node]:
    """The two children of a node of at least two leaves."""
    lo, hi = node
    size = hi - lo
    if size < 2:
        raise ValueError(f"leaf {node} has no children")
    half = 1 << ((size - 1).bit_length() - 1)
    return (lo, lo + half), (lo + half, hi)


@lru_cache(maxsize=64)
def _parents(units: int) -> dict[Node, Node]:
    """Child -> parent for every node of the tree over ``units`` leaves."""
    parents: dict[Node, Node] = {}
    todo: list[Node] = [(0, units)]
    while todo:
        node = todo.pop()
        if node[1] - node[0] < 2:
            continue
        for child in split(node):
            parents[child] = node
            todo.append(child)
    return parents


def is_node(node: Node, units: int) -> bool:
    """Whether ``node`` is a node of the tree over ``units`` leaves."""
    return units >= 1 and (node == (0, units) or node in _parents(units))


def parent(node: Node, units: int) -> Node | None:
    """The parent of the node; None for the root of the whole tree."""
    return _parents(units).get(node)


def leaves(nodes: Iterable[Node]) -> tuple[int, ...]:
    """All leaves under the nodes, sorted; a leaf under two nodes appears twice."""
    return tuple(sorted(leaf for lo, hi in nodes for leaf in range(lo, hi)))


def next_fold(nodes: Iterable[Node], units: int) -> tuple[Node, Node, Node] | None:
    """A pair of held siblings as (left, right, parent), or None when the nodes are all roots."""
    held, parents = set(nodes), _parents(units)
    for left in sorted(held):
        above = parents.get(left)
        if above is not None and left[0] == above[0] and (right := (left[1], above[1])) in held:
            return left, right, above
    return None


def covers_exactly(nodes: Sequence[Node], units: int) -> bool:
    """Whether the nodes hold each of the leaves 0..units-1 exactly once."""
    return leaves(nodes) == tuple(range(units))
