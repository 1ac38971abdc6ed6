"""Nodes of the reduction tree, folded at once; the product folds them one by one, as they come."""

from __future__ import annotations

from collections.abc import Iterable

from elastic.protocol.reduction_tree import Node, next_fold


def fold_nodes(nodes: Iterable[Node], units: int) -> tuple[Node, ...]:
    """The roots that remain once every pair of held siblings is folded."""
    held = set(nodes)
    while (fold := next_fold(held, units)) is not None:
        left, right, above = fold
        held -= {left, right}
        held.add(above)
    return tuple(sorted(held))
