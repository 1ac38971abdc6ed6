"""Which processes of the script a worker has, and what they find in their environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.protocol.worker_id import node_of
from runtime.frontends.restart.places import environment, places, share

MEMBERS = ("a.0.0", "b.0.3", "a.1.0")


def ranks_of(members: tuple[str, ...], ranks: int) -> dict[str, list[int]]:
    return {worker: [place.rank for place in mine] for worker, mine in places(members, ranks).items()}


@pytest.mark.parametrize(
    ("members", "ranks", "wanted"),
    [
        (MEMBERS, 0, {"a.0.0": [0], "b.0.3": [1], "a.1.0": [2]}),
        (MEMBERS, 3, {"a.0.0": [0], "a.1.0": [1], "b.0.3": [2]}),
        (MEMBERS, 7, {"a.0.0": [0, 1, 2], "a.1.0": [3, 4], "b.0.3": [5, 6]}),
        (MEMBERS[:1], 4, {"a.0.0": [0, 1, 2, 3]}),
        (MEMBERS, 2, {"a.0.0": [0], "a.1.0": [1], "b.0.3": []}),
    ],
)
def test_the_workers_divide_the_ranks(members: tuple[str, ...], ranks: int, wanted: dict[str, list[int]]) -> None:
    assert ranks_of(members, ranks) == wanted


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=9), st.integers(0, 20))
def test_each_rank_is_in_one_place_and_those_of_a_node_are_in_a_row(nodes: list[str], ranks: int) -> None:
    members = tuple(f"{node}.{slot}.0" for slot, node in enumerate(nodes))
    found = places(members, ranks)
    world = ranks or len(members)
    every = sorted((place.rank, worker, place) for worker, mine in found.items() for place in mine)
    assert [rank for rank, _, _ in every] == list(range(world))
    counts = [len(mine) for mine in found.values()]
    assert max(counts) - min(counts) <= 1
    for node in set(nodes):
        here = [place for _, worker, place in every if node_of(worker) == node]
        assert [place.local_rank for place in here] == list(range(len(here)))
        assert {place.local_world for place in here} <= {len(here)} and len({place.node for place in here}) <= 1
        if ranks and here:
            assert [place.rank for place in here] == list(range(here[0].rank, here[0].rank + len(here)))


def test_the_environment_is_that_of_torchrun() -> None:
    members = ("a.0.0", "a.1.0", "b.0.3")
    found = [
        environment(place, ("10.0.0.1", 4000), "job", 2, Path("/e.json"))
        for worker in members
        for place in places(members, 0)[worker]
    ]
    assert [one["RANK"] for one in found] == ["0", "1", "2"]
    assert [one["LOCAL_RANK"] for one in found] == ["0", "1", "0"]
    assert [one["GROUP_RANK"] for one in found] == ["0", "0", "1"]
    assert [one["LOCAL_WORLD_SIZE"] for one in found] == ["2", "2", "1"]
    for one in found:
        assert (one["WORLD_SIZE"], one["GROUP_WORLD_SIZE"]) == ("3", "2")
        assert (one["MASTER_ADDR"], one["MASTER_PORT"]) == ("10.0.0.1", "4000")
        assert (one["TORCHELASTIC_RESTART_COUNT"], one["TORCHELASTIC_ERROR_FILE"]) == ("2", "/e.json")


def test_the_workers_of_a_node_share_its_work() -> None:
    assert [share(worker, MEMBERS) for worker in MEMBERS] == [(0, 2), (0, 1), (1, 2)]
