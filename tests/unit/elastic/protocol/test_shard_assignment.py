"""Units by speed: each unit once, the slowest done as early as can be, and few partial sums."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.protocol.messages import Generation, Kind, Member, Plan
from elastic.protocol.recovery_plan import default_sizes, default_units_of, paces_of
from elastic.protocol.reduction_tree import covers_exactly, is_node, leaves
from elastic.protocol.shard_assignment import costs, owned, sizes, slack_percent, slowest
from tests.trees import fold_nodes

PACES = st.lists(st.integers(1, 10**7), min_size=1, max_size=12).map(tuple)


def record(paces: tuple[int, ...], names: str = "abcdefghijkl") -> Generation:
    members = tuple(Member(name, "n", "host", 1, rank) for rank, name in enumerate(names[: len(paces)]))
    return Generation(1, Kind.PLANNED, 1, members, Plan(paces=paces), "of the test")


def apart(count: int) -> tuple[str, ...]:
    """The hosts of that many members, each on its own."""
    return tuple(f"h{number}" for number in range(count))


def dealt(units: int, *paces: int, slack: int = 0) -> tuple[int, ...]:
    return sizes(owned(units, paces, ("h",) * len(paces), slack))


@given(data=st.data(), units=st.integers(1, 100), slack=st.integers(0, 30))
def test_each_unit_is_owned_once_as_whole_subtrees(data: st.DataObject, units: int, slack: int) -> None:
    hosts = tuple(data.draw(st.lists(st.sampled_from("xyz"), min_size=1, max_size=12), "hosts"))
    paces = data.draw(st.just(()) | st.lists(st.integers(0, 1000), min_size=len(hosts), max_size=len(hosts)))
    found = owned(units, tuple(paces), hosts, slack)
    nodes = [node for own in found for node in own]
    assert len(found) == len(hosts) and covers_exactly(nodes, units) and all(is_node(node, units) for node in nodes)
    assert all(list(own) == sorted(own) for own in found)
    if units >= len(hosts):
        assert all(found), "each computes something, or nobody would learn that it is fast again"
    else:
        assert max(sizes(found)) == 1


@given(paces=PACES, units=st.integers(1, 64))
def test_a_member_owns_the_units_of_its_subtrees(paces: tuple[int, ...], units: int) -> None:
    generation = record(paces)
    blocks = [default_units_of(worker, generation, units) for worker in generation.ids]
    assert sorted(unit for block in blocks for unit in block) == list(range(units))
    assert default_sizes(generation, units) == tuple(map(len, blocks))


@given(
    paces=st.lists(st.integers(1, 30), min_size=1, max_size=4).map(tuple),
    units=st.integers(4, 12),
    slack=st.sampled_from([0, 5, 15]),
)
def test_the_slowest_is_done_as_early_as_can_be_but_for_the_slack(
    paces: tuple[int, ...], units: int, slack: int
) -> None:
    every = (cut for cut in product(range(1, units + 1), repeat=len(paces)) if sum(cut) == units)
    best = min(slowest(cut, paces) for cut in every)
    assert slowest(dealt(units, *paces, slack=slack), paces) <= best * (100 + slack) / 100


@given(units=st.integers(1, 64), world=st.integers(1, 70))
def test_without_paces_nobody_owns_more_than_must_be(units: int, world: int) -> None:
    assert max(sizes(owned(units, (), apart(world), 0))) == -(-units // world)


def test_a_worker_at_half_the_speed_gets_half_as_many() -> None:
    assert dealt(12, 10, 20) == (8, 4)
    assert dealt(8, 10, 10, 20) == (2, 4, 2), "as early as 3, 3, 2, and three partial sums instead of five"
    assert dealt(8, 30, 10) == (2, 6)


def test_the_largest_subtree_goes_to_the_member_with_most_room() -> None:
    """Also where that one comes last in rank order."""
    assert owned(8, (30, 10), apart(2), 0) == (((4, 6),), ((0, 4), (6, 8)))


def test_fewer_partial_sums_are_worth_a_little_time() -> None:
    assert owned(1024, (100, 101), apart(2), 5) == (((0, 512),), ((512, 1024),))
    assert max(map(len, owned(1024, (100, 101), apart(2), 0))) > 4, "the least possible: 515 and 509"


@pytest.mark.parametrize("units", [64, 512])
@pytest.mark.parametrize(("world", "most"), [(2, 1), (3, 2), (4, 1), (5, 3), (6, 2), (7, 2), (8, 1), (12, 2), (24, 2)])
def test_no_member_sends_many_partial_sums_in_any_world(units: int, world: int, most: int) -> None:
    """A member that sends r of them sends (r + 1) / 2 times what it would in a ring."""
    assert max(map(len, owned(units, (), apart(world), slack_percent(world)))) <= most


@pytest.mark.parametrize(("nodes", "of_each"), [(2, 4), (4, 2), (3, 4), (6, 8)])
def test_what_a_node_owns_adds_up_within_it_as_far_as_can_be(nodes: int, of_each: int) -> None:
    """Also where its members are not neighbours in rank order."""
    hosts = tuple(f"h{rank % nodes}" for rank in range(nodes * of_each))
    found = owned(64, (), hosts, slack_percent(nodes))
    of_node = [
        [node for own, host in zip(found, hosts, strict=True) if host == h for node in own] for h in apart(nodes)
    ]
    most = max(len(fold_nodes([(unit, unit + 1) for unit in leaves(own)], 64)) for own in of_node)
    assert most == (1 if nodes in (2, 4) else 2)


def test_a_pace_that_is_not_known_counts_as_the_median() -> None:
    assert dealt(8, 10, 0) == (4, 4)
    assert dealt(12, 10, 40, 0) == dealt(12, 10, 40, 10), "of two the faster: most machines are not slow"
    assert dealt(12, 10, 0, 10, 30) == dealt(12, 10, 10, 10, 30)


def test_too_few_units_are_dealt_one_by_one_and_nobody_owns_those_of_nobody() -> None:
    assert dealt(2, 10, 20, 30) == (1, 1, 0)
    assert owned(0, (), ("x", "y"), 5) == ((), ())  # before a worker has said how many there are
    assert owned(7, (), (), 5) == ()  # of the last generation of a job in which nobody stays


@pytest.mark.parametrize("slack", [0, 5, 15])
@pytest.mark.parametrize(
    ("units", "hosts"), [(1, "abb"), (1, "abbbbbbb"), (2, "abb"), (4, "abbbb"), (4, "aabbbb"), (3, "abbccc")]
)
def test_rank_0_always_has_a_unit(units: int, hosts: str, slack: int) -> None:
    """Newcomers copy its state while it computes, its wishes travel with its sums, and it runs what `job.once` is told.
    The others share machines, where the units would be fewer sums."""
    found = owned(units, (), tuple(hosts), slack)
    assert found[0] and max(sizes(found)) == 1
    assert covers_exactly([node for own in found for node in own], units)


def test_the_successor_of_a_record_keeps_the_paces_of_those_who_stay() -> None:
    before = record((10, 20, 30))
    assert paces_of(("a", "c", "new"), before) == (10, 30, 0)
    assert paces_of(("new", "newer"), before) == ()
    assert paces_of(("a", "b"), record(())) == paces_of(("a",), None) == ()


def test_an_unknown_pace_is_taken_for_the_median_of_the_others() -> None:
    assert costs((0, 0)) == (1, 1) and costs((1, 5, 0)) == (1, 5, 1) and costs((7, 0, 3, 9)) == (7, 7, 3, 9)
