"""Who sums what: every slice once, on every node, with as few bytes between nodes as can be."""

from __future__ import annotations

from collections import Counter
from typing import TypeAlias

from hypothesis import given
from hypothesis import strategies as st

from runtime.allreduce.reduction.schedule import Fold
from runtime.allreduce.reduction.topology import Topology, divide, topology

HOSTS = st.lists(st.sampled_from("xyzw"), min_size=1, max_size=12).map(tuple)
Sum: TypeAlias = "int | tuple[Sum, Sum]"
"""A term, or what was added to what."""


def sent_between(of: Topology) -> Counter[int]:
    """Slices that each node sends to others, with one term a node: its sums to owners, and its owners' to all nodes."""
    found: Counter[int] = Counter()
    for cut in of.slices:
        owner = of.node_of[cut.owner]
        found[owner] += len(of.ranks) - 1
        for node in range(len(of.ranks)):
            found[node] += node != owner
    return found


@given(HOSTS)
def test_each_slice_has_an_aggregator_on_every_node_and_its_sum_comes_to_everybody_once(hosts: tuple[str, ...]) -> None:
    of = topology(hosts)
    for cut in of.slices:
        assert [of.node_of[rank] for rank in cut.aggregators] == list(range(len(of.ranks)))
        assert cut.owner in cut.aggregators
        got = Counter(to for rank in range(len(hosts)) for to in of.recipients(cut, rank))
        assert got == Counter(rank for rank in range(len(hosts)) if rank != cut.owner)
        for rank in range(len(hosts)):
            if rank != cut.owner:
                assert rank in of.recipients(cut, of.source(cut, rank))


@given(HOSTS)
def test_all_nodes_send_equally_much_whatever_their_size(hosts: tuple[str, ...]) -> None:
    of = topology(hosts)
    n = len(of.ranks)
    assert set(sent_between(of).values()) <= {2 * (n - 1) * len(of.slices) // n}


def test_members_of_a_node_share_its_work_also_where_they_are_no_neighbours_in_rank() -> None:
    of = topology(("x", "y", "x", "y"))
    assert of.ranks == ((0, 2), (1, 3)) and of.most == 2
    assert Counter(cut.owner for cut in of.slices) == {0: 1, 1: 1, 2: 1, 3: 1}
    assert [cut.aggregators for cut in of.slices] == [(0, 1), (2, 3), (0, 1), (2, 3)]


def test_one_node_and_members_that_are_alone_have_a_slice_each() -> None:
    for hosts in (("x",) * 4, ("x", "y", "z", "w")):
        assert [cut.owner for cut in topology(hosts).slices] == [0, 1, 2, 3]


@given(st.data())
def test_divided_folds_make_the_same_sum(data: st.DataObject) -> None:
    """In any order of folds, of terms on any nodes: what leaves the nodes, folded by any owner, is the whole sum. And a
    node that adds leaves none of its own folds to others."""
    count = data.draw(st.integers(1, 4), "nodes")
    nodes = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=10), "nodes of terms")
    adds = data.draw(st.lists(st.booleans(), min_size=count, max_size=count), "adds")
    folds: list[Fold] = []
    left = list(range(len(nodes)))
    while len(left) > 1:
        pair = [left.pop(data.draw(st.integers(0, len(left) - 1))) for _ in range(2)]
        folds.append((pair[0], pair[1]))
        left.append(len(nodes) + len(folds) - 1)
    whole = run(list(range(len(nodes))), folds)[-1]
    division = divide(folds, nodes, adds)
    homes = [{node} for node in nodes]
    for one, other in folds:
        homes.append(homes[one] | homes[other])
    for node, part in enumerate(division.nodes):
        assert len(part.folds) == homes[len(nodes) :].count({node}) * adds[node]
    leaving = []
    for node, part in enumerate(division.nodes):
        assert all(nodes[term] == node for term in part.terms)
        values = run(list(part.terms), part.folds)
        leaving.append([values[position] for position in part.leave])
    for node, part in enumerate(division.nodes):
        inputs: list[Sum] = [*part.terms]
        for other, values in enumerate(leaving):
            inputs += values if other != node else []
        assert run(inputs, division.at_owner(node))[-1] == whole


def run(inputs: list[Sum], folds: tuple[Fold, ...] | list[Fold]) -> list[Sum]:
    values: list[Sum] = [*inputs]
    for left, right in folds:
        values.append((values[left], values[right]))
    return values
