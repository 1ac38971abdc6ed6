"""The canonical tree: one shape per number of leaves, whoever holds which leaf."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic.protocol.reduction_tree import Node, covers_exactly, is_node, leaves, next_fold, parent, split
from tests.trees import fold_nodes

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
UNITS = st.integers(1, 64)


@st.composite
def units_and_leaves(draw: st.DrawFn) -> tuple[int, list[int]]:
    units = draw(UNITS)
    held = draw(st.lists(st.integers(0, units - 1), unique=True))
    return units, held


@pytest.mark.parametrize(
    ("node", "left", "right"),
    [
        ((0, 8), (0, 4), (4, 8)),
        ((0, 6), (0, 4), (4, 6)),
        ((0, 5), (0, 4), (4, 5)),
        ((4, 7), (4, 6), (6, 7)),
        ((0, 2), (0, 1), (1, 2)),
    ],
)
def test_a_node_is_split_at_the_largest_power_of_two_below_its_size(node: Node, left: Node, right: Node) -> None:
    assert split(node) == (left, right)


def test_a_leaf_has_no_children() -> None:
    with pytest.raises(ValueError, match="no children"):
        split((3, 4))


@patient
@given(UNITS)
def test_every_node_but_the_whole_is_a_child_of_its_parent(units: int) -> None:
    todo: list[Node] = [(0, units)]
    assert parent((0, units), units) is None
    while todo:
        node = todo.pop()
        assert is_node(node, units)
        if node[1] - node[0] > 1:
            for child in split(node):
                assert parent(child, units) == node
                todo.append(child)


def test_a_range_off_the_tree_is_no_node() -> None:
    assert not is_node((1, 3), 8)
    assert not is_node((4, 8), 7)
    assert not is_node((0, 16), 8)
    assert not is_node((0, 0), 0)


@patient
@given(units_and_leaves())
def test_roots_hold_the_same_leaves_and_no_two_of_them_are_siblings(case: tuple[int, list[int]]) -> None:
    units, held = case
    roots = fold_nodes([(leaf, leaf + 1) for leaf in held], units)
    assert leaves(roots) == tuple(sorted(held))
    assert next_fold(roots, units) is None


@patient
@given(units_and_leaves())
def test_folding_in_between_changes_no_root(case: tuple[int, list[int]]) -> None:
    units, held = case
    stepwise: tuple[Node, ...] = ()
    for leaf in held:
        stepwise = fold_nodes((*stepwise, (leaf, leaf + 1)), units)
    assert stepwise == fold_nodes([(leaf, leaf + 1) for leaf in held], units)


@patient
@given(st.integers(0, 6), st.integers(0, 6))
def test_an_aligned_power_of_two_share_is_one_root(share_bits: int, more_bits: int) -> None:
    """Such ownership moves the same bytes as a ring allreduce."""
    share, workers = 1 << share_bits, 1 << min(more_bits, 6 - share_bits) if share_bits < 6 else 1
    for worker in range(workers):
        own = range(worker * share, (worker + 1) * share)
        assert fold_nodes([(leaf, leaf + 1) for leaf in own], share * workers) == ((own[0], own[-1] + 1),)


@patient
@given(UNITS)
def test_all_leaves_fold_into_the_whole(units: int) -> None:
    assert fold_nodes([(leaf, leaf + 1) for leaf in range(units)], units) == ((0, units),)


@pytest.mark.parametrize(
    ("nodes", "exactly"),
    [
        ([(0, 4), (4, 6)], True),
        ([(4, 6), (0, 4)], True),
        ([(0, 4)], False),
        ([(0, 4), (3, 6)], False),
        ([(0, 4), (4, 6), (5, 6)], False),
        ([(0, 4), (4, 7)], False),
        ([], False),
    ],
)
def test_a_cover_has_every_leaf_exactly_once(nodes: list[Node], exactly: bool) -> None:
    assert covers_exactly(nodes, 6) is exactly
