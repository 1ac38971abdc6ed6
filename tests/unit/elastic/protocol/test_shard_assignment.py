"""Blocks of units by speed: each unit once, the slowest done as early as can be, and few partial sums."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from elastic.protocol.messages import Generation, Kind, Member, Plan
from elastic.protocol.recovery_plan import default_units_of, paces_of
from elastic.protocol.shard_assignment import SLACK_PERCENT, costs, even_sizes, most_terms, sizes, slowest
from tests.trees import fold_nodes

PACES = st.lists(st.integers(1, 10**7), min_size=1, max_size=12).map(tuple)


def record(paces: tuple[int, ...], names: str = "abcdefghijkl") -> Generation:
    members = tuple(Member(name, "n", "host", 1, rank) for rank, name in enumerate(names[: len(paces)]))
    return Generation(1, Kind.PLANNED, 1, members, Plan(paces=paces), "of the test")


def roots(owned: tuple[int, ...]) -> list[int]:
    """Partial sums that each member sends."""
    begins = [sum(owned[:rank]) for rank in range(len(owned))]
    leaves = ([(u, u + 1) for u in range(start, start + size)] for start, size in zip(begins, owned, strict=True))
    return [len(fold_nodes(own, sum(owned))) for own in leaves]


@given(paces=PACES, units=st.integers(1, 64))
def test_blocks_are_contiguous_and_hold_each_unit_once(paces: tuple[int, ...], units: int) -> None:
    generation = record(paces)
    blocks = [default_units_of(worker, generation, units) for worker in generation.ids]
    assert [unit for block in blocks for unit in block] == list(range(units))
    assert units < len(paces) or all(blocks), "each computes something, or nobody would learn that it is fast again"


@given(paces=st.lists(st.integers(1, 30), min_size=1, max_size=4).map(tuple), units=st.integers(4, 12))
def test_the_slowest_is_done_as_early_as_any_blocks_allow(paces: tuple[int, ...], units: int) -> None:
    """Against all ways to cut, but for the slack that fewer partial sums may cost."""
    every = (cut for cut in product(range(1, units + 1), repeat=len(paces)) if sum(cut) == units)
    best = min(slowest(cut, paces) for cut in every)
    assert slowest(sizes(units, paces), paces) <= best * (100 + SLACK_PERCENT) / 100


def test_a_worker_at_half_the_speed_gets_half_as_many() -> None:
    assert sizes(12, (10, 20)) == (8, 4)
    assert sizes(8, (10, 10, 20)) == (4, 2, 2), "as early as 3, 3, 2, and three partial sums instead of five"
    assert sizes(8, (30, 10)) == (2, 6)


def test_blocks_end_where_the_tree_is_cut_highest_if_that_costs_little() -> None:
    assert sizes(1024, (100, 101)) == (512, 512), "the least possible would be 515 and 509, in 11 partial sums"
    assert roots((512, 512)) == [1, 1] and sum(roots((515, 509))) > 10


@given(owned=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any).map(tuple))
def test_the_most_partial_sums_of_a_member_are_counted_without_folding(owned: tuple[int, ...]) -> None:
    assert most_terms(owned) == max(roots(owned))


def test_a_pace_that_is_not_known_counts_as_the_median() -> None:
    assert sizes(8, (10, 0)) == (4, 4)
    assert sizes(12, (10, 40, 0)) == sizes(12, (10, 40, 10)), "of two the faster: most machines are not slow"
    assert sizes(12, (10, 0, 10, 30)) == sizes(12, (10, 10, 10, 30))


def test_without_paces_or_with_too_few_units_blocks_are_even() -> None:
    assert sizes(7, (0, 0, 0)) == even_sizes(7, 3) == (3, 2, 2)
    assert even_sizes(7, 0) == ()  # of the last generation of a job in which nobody stays
    assert sizes(2, (10, 20, 30)) == even_sizes(2, 3) == (1, 1, 0)


def test_the_successor_of_a_record_keeps_the_paces_of_those_who_stay() -> None:
    before = record((10, 20, 30))
    assert paces_of(("a", "c", "new"), before) == (10, 30, 0)
    assert paces_of(("new", "newer"), before) == ()
    assert paces_of(("a", "b"), record(())) == paces_of(("a",), None) == ()


def test_an_unknown_pace_is_taken_for_the_median_of_the_others() -> None:
    assert costs((0, 0)) == (1, 1) and costs((1, 5, 0)) == (1, 5, 1) and costs((7, 0, 3, 9)) == (7, 7, 3, 9)
