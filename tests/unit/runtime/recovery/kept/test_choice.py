"""The step that the next round goes on from."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.protocol.worker_id import node_of
from runtime.recovery.kept.choice import (
    HeldSegment,
    KeptStep,
    KnownStep,
    RoundNumber,
    awaited,
    bytes_at,
    lost_parts,
    mirrors_of,
    newest_whole,
    plan_part,
    thin_parts,
)

FIRST, SECOND, AGAIN = RoundNumber(0, 1), RoundNumber(0, 2), RoundNumber(1, 1)


def of_step(
    step: int, number: RoundNumber, parts: int, *, without: tuple[int, ...] = (), group: int = 0
) -> list[HeldSegment]:
    return [HeldSegment(step, number, group, part, parts) for part in range(parts) if part not in without]


@pytest.mark.parametrize(
    ("held", "wanted"),
    [
        ([], None),
        (of_step(4, FIRST, 3), KeptStep(4, FIRST, 0)),
        (of_step(4, FIRST, 3) + of_step(5, FIRST, 3, without=(1,)), KeptStep(4, FIRST, 0)),
        (of_step(5, FIRST, 3, without=(1,)) + of_step(5, SECOND, 2, without=(0,)), None),
        (of_step(5, FIRST, 3) + of_step(5, SECOND, 2), KeptStep(5, SECOND, 0)),
        (of_step(5, FIRST, 3) + of_step(5, SECOND, 2, without=(0,)), KeptStep(5, FIRST, 0)),
        (of_step(5, SECOND, 2) + of_step(5, AGAIN, 2), KeptStep(5, AGAIN, 0)),
        (of_step(6, FIRST, 3) + of_step(5, SECOND, 2), KeptStep(6, FIRST, 0)),
        (of_step(6, FIRST, 2, without=(0,), group=0) + of_step(6, FIRST, 2, without=(1,), group=1), None),
        (of_step(6, FIRST, 2, without=(0,), group=0) + of_step(6, FIRST, 2, group=1), KeptStep(6, FIRST, 1)),
    ],
)
def test_the_newest_step_of_which_all_parts_are_there(held: list[HeldSegment], wanted: KeptStep | None) -> None:
    assert newest_whole(held) == wanted


@given(st.permutations(of_step(7, SECOND, 3) + of_step(6, FIRST, 2) + of_step(8, SECOND, 3, without=(2,))))
def test_all_choose_alike_in_whatever_order_they_hear(held: list[HeldSegment]) -> None:
    assert newest_whole(held) == KeptStep(7, SECOND, 0)


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from([FIRST, SECOND]), st.integers(0, 2)), max_size=12))
def test_nothing_is_chosen_of_which_a_part_is_missing(entries: list[tuple[int, RoundNumber, int]]) -> None:
    held = [HeldSegment(step, number, 0, part, 3) for step, number, part in entries]
    found = newest_whole(held)
    whole = {(h.step, h.round) for h in held if {(h.step, h.round, part) for part in range(3)} <= set(entries)}
    assert (found is None) == (not whole)
    assert found is None or (found.step, found.round) == max(whole)


A, B, C = ("a.0.0", "a.1.2"), ("b.0.0",), ("c.0.1", "c.1.0")


def homes(step: int, parts: int, *nodes: tuple[str, ...]) -> dict[str, list[HeldSegment]]:
    """Worker -> parts; part i is on the i-th of these machines, whose workers take turns."""
    found: dict[str, list[HeldSegment]] = {worker: [] for worker in (*A, *B, *C)}
    for part, node in enumerate(nodes):
        found[node[part % len(node)]].append(HeldSegment(step, FIRST, 0, part, parts))
    return found


def test_a_part_that_one_machine_alone_has_goes_to_the_next_one() -> None:
    held = homes(4, 3, A, B, C)
    source = KeptStep(4, FIRST, 0)
    found = thin_parts(held, source, (*A, *B, *C))
    assert [(thin.held.part, thin.at, thin.to) for thin in found] == [
        (0, "a.0.0", ("b.0.0",)),
        (1, "b.0.0", ("c.1.0",)),
        (2, "c.0.1", ("a.0.0",)),
    ]
    held["b.0.0"].append(HeldSegment(4, FIRST, 0, 0, 3))
    assert [thin.held.part for thin in thin_parts(held, source, (*A, *B, *C))] == [1, 2]
    held["a.1.2"].append(HeldSegment(4, FIRST, 0, 0, 3))
    assert [thin.held.part for thin in thin_parts(held, source, (*A, *B, *C))] == [1, 2], "two workers of one machine"
    assert thin_parts({worker: held[worker] for worker in A}, source, A) == [], "there is no other machine"


def test_a_state_without_shards_is_thin_if_one_machine_has_it() -> None:
    held = {"a.0.0": [HeldSegment(4, FIRST, 0, 0, 1)], "b.0.0": [HeldSegment(3, FIRST, 1, 0, 1)], "c.0.1": []}
    source = KeptStep(4, FIRST, 0)
    (thin,) = thin_parts(held, source, tuple(held))
    assert (thin.held, thin.at, thin.to) == (HeldSegment(4, FIRST, 0, 0, 1), "a.0.0", ("b.0.0",))
    held["c.0.1"] = [HeldSegment(4, FIRST, 2, 0, 1)]
    assert thin_parts(held, source, tuple(held)) == []


D = ("d.0.0",)


def test_with_two_copies_a_part_is_on_three_machines_before_scripts_start() -> None:
    held = {worker: [replace(one, copies=2) for one in found] for worker, found in homes(4, 3, A, B, C).items()}
    held["b.0.0"].append(HeldSegment(4, FIRST, 0, 0, 3, copies=2))
    source, every = KeptStep(4, FIRST, 0), (*A, *B, *C, *D)
    found = thin_parts({**held, "d.0.0": []}, source, every)
    assert [(thin.held.part, thin.to, thin.machines) for thin in found] == [
        (0, ("c.0.1",), 2),
        (1, ("c.1.0", "d.0.0"), 1),
        (2, ("d.0.0", "a.0.0"), 1),
    ]
    for thin in found:
        for worker in thin.to:
            held.setdefault(worker, []).append(thin.held)
    assert thin_parts(held, source, every) == []
    two = thin_parts({worker: held[worker] for worker in (*A, *B)}, source, (*A, *B))
    assert [(thin.held.part, thin.to) for thin in two] == [(1, ("a.1.2",)), (2, ("b.0.0",))], "there is no third one"


def test_with_two_copies_a_state_without_shards_is_on_three_machines() -> None:
    held = {"a.0.0": [HeldSegment(4, FIRST, 0, 0, 1, 2)], "b.0.0": [HeldSegment(4, FIRST, 1, 0, 1, 2)], "c.0.1": []}
    (thin,) = thin_parts(held, KeptStep(4, FIRST, 1), tuple(held))
    assert (thin.at, thin.to, thin.machines) == ("b.0.0", ("c.0.1",), 2)


def meshes(replicas: int) -> st.SearchStrategy[tuple[list[int], list[int]]]:
    """What each rank has, in a mesh of replicas and shards or the other way around, and the machine of each rank."""
    shards, inner, slots = st.integers(1, 4), st.booleans(), st.integers(1, 3)
    return st.tuples(shards, inner, slots).map(
        lambda drawn: (
            [rank // replicas if drawn[1] else rank % drawn[0] for rank in range(replicas * drawn[0])],
            [rank // drawn[2] for rank in range(replicas * drawn[0])],
        )
    )


@given(st.lists(st.sampled_from([*A, *B, *C]), min_size=1, max_size=5, unique=True))
def test_mirrors_are_on_other_machines_each_on_another_one(members: list[str]) -> None:
    nodes = {node_of(member) for member in members}
    for member in members:
        found = mirrors_of(member, members)
        assert len(found) == len(nodes) - 1 and set(found) <= set(members)
        assert len({node_of(one) for one in (member, *found)}) == 1 + len(found)


@given(st.integers(1, 3).flatmap(meshes), st.integers(1, 2))
def test_any_machines_may_be_lost_that_leave_one_of_as_many_as_have_a_part(
    mesh: tuple[list[int], list[int]], copies: int
) -> None:
    """Each machine has one process that writes each part of which it has a replica, and a part is sent only to machines
    that have it not, by one process, and only as often as copies are wanting."""
    has, nodes = mesh
    plans = [plan_part(rank, has, nodes, copies) for rank in range(len(has))]
    assert {plan.parts for plan in plans} == {len(set(has))}
    for part in range(len(set(has))):
        alike = [rank for rank, plan in enumerate(plans) if plan.part == part]
        assert len({has[rank] for rank in alike}) == 1
        homes = [nodes[rank] for rank in alike if plans[rank].writes]
        assert sorted(homes) == sorted({nodes[rank] for rank in alike})
        assert {plans[rank].machines for rank in alike} == {len(homes)}
        sent = [target for rank in alike for target in plans[rank].targets]
        assert all(plans[rank].writes for rank in alike if plans[rank].targets)
        assert len({rank for rank in alike if plans[rank].targets}) <= 1
        there = [*homes, *sent]
        assert len(there) == len(set(there)) == max(len(homes), min(1 + copies, 1 + max(nodes)))


def test_without_replicas_a_part_goes_to_the_next_machines() -> None:
    nodes = [0, 0, 1, 2, 2]
    plans = [plan_part(rank, list(range(5)), nodes, 1) for rank in range(5)]
    assert [(plan.part, plan.parts, plan.writes, plan.targets) for plan in plans] == [
        (rank, 5, True, ((nodes[rank] + 1) % 3,)) for rank in range(5)
    ]


def test_replicas_on_other_machines_are_mirrors_without_a_byte_that_is_sent() -> None:
    """Two of them, of two shards, on two machines or four."""
    shards = ["first", "second", "first", "second"]
    for nodes in ([0, 0, 1, 1], [0, 1, 2, 3]):
        plans = [plan_part(rank, shards, nodes, 1) for rank in range(4)]
        assert [(plan.part, plan.writes, plan.targets) for plan in plans] == [
            (0, True, ()), (1, True, ()), (0, True, ()), (1, True, ())
        ]  # fmt: skip
    plans = [plan_part(rank, shards, [0, 1, 2, 3], 2) for rank in range(4)]
    assert [plan.targets for plan in plans] == [(1,), (2,), (), ()]


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize(
    ("known", "held", "source", "wanted"),
    [
        (3, (3, 4, 5), 3, 0),  # the fourth one was on its way from the node that is away
        (3, (3, 4), 2, 3),
        (2, (3, 4, 5), 2, 3),  # what is there says more than the last reports
        (3, (), 0, 3),
        (None, (4,), 0, 0),
        (None, (3, 4), 0, 3),
    ],
)
def test_a_round_waits_for_a_node_only_if_more_lacks_than_what_was_on_its_way_to_its_mirrors(
    every: int, known: int | None, held: tuple[int, ...], source: int, wanted: int
) -> None:
    """Numbers of steps that were kept, of each so many."""
    away = ("c",) if known is not None else ()
    found = awaited(
        KnownStep(SECOND, every * known, ("a", "c")) if known is not None else None,
        [HeldSegment(every * step, SECOND, 0, 0, 2) for step in held],
        KeptStep(every * source, SECOND, 0) if source else None,
        ["a.0.0"],
    )
    assert found == (KnownStep(SECOND, every * wanted, away) if wanted else None)


def test_what_an_earlier_round_had_is_not_waited_for_once_a_later_one_has_kept_a_step() -> None:
    held = [HeldSegment(step, FIRST, 0, 0, 2) for step in (48, 49, 50)] + of_step(41, SECOND, 2)
    assert awaited(None, held, KeptStep(41, SECOND, 0), ["a.0.0"]) is None
    assert awaited(None, held, KeptStep(40, FIRST, 0), ["a.0.0"]) == KnownStep(FIRST, 49, ())


def test_no_machine_is_awaited_for_a_first_step_of_a_round_that_may_be_void() -> None:
    """Part 2 was on the machine that is lost. It may have changed its weights while step 18 was copied, step 21 was on
    its way to the mirror, and part 0 had kept step 24. When a part has kept step 27, the lost machine has step 18 or 21
    whole, or its mirror has."""
    before = [HeldSegment(17, FIRST, 0, part, 3) for part in range(3)]
    steps = [HeldSegment(step, SECOND, 0, part, 3) for step, part in ((18, 0), (18, 1), (21, 0), (21, 1), (24, 0))]
    source, known, here = newest_whole([*before, *steps]), KnownStep(SECOND, 17, ("a", "b", "c")), ["a.0.0", "b.0.0"]
    assert source is not None and source.step == 17
    assert awaited(known, [*before, *steps], source, here) is None
    later = [HeldSegment(24, SECOND, 0, 1, 3), HeldSegment(27, SECOND, 0, 0, 3)]
    assert awaited(known, [*before, *steps, *later], source, here) == KnownStep(SECOND, 18, ("c",))


def test_a_machine_is_awaited_once_the_first_step_of_a_round_is_written_over() -> None:
    """Parts 1 and 2 were on machines that are gone. Step 3 lacks only if both had it, so one of them may come back."""
    known, here = KnownStep(SECOND, 0, ("a", "b", "c")), ["a.0.0"]
    for steps, wanted in (((1, 2, 3), None), ((2, 3), None), ((2, 3, 4), 2), ((3, 4, 5), 3)):
        held = [HeldSegment(step, SECOND, 0, 0, 3) for step in steps]
        assert awaited(known, held, None, here) == (KnownStep(SECOND, wanted, ("b", "c")) if wanted else None)


def test_what_lacked_when_a_round_began_is_not_awaited_once_more() -> None:
    """Two machines were lost in the first round, and the second one began anew, with a worker of each machine. One of
    them is lost in it."""
    held = [HeldSegment(step, FIRST, 0, 1, 5) for step in (1, 3, 6, 9)] + of_step(1, SECOND, 4, without=(1, 2))
    before, begun = KnownStep(FIRST, 1, ("a", "b", "c")), KnownStep(SECOND, 0, ("a", "b", "c"))
    assert awaited(before, held, None, ["b.0.0", "c.0.0"]) == KnownStep(FIRST, 1, ("a",))
    assert awaited(begun, held, None, ["a.0.1", "c.0.0"]) is None
    assert max(before, begun) == begun


def test_a_machine_remembers_which_steps_are_not_awaited_when_all_workers_are_lost() -> None:
    """The first round had lost a machine, and the second one began anew. Nobody knows which machines there were."""
    held = [HeldSegment(step, FIRST, 0, part, 2) for step, part in ((1, 0), (10, 1))]
    assert awaited(None, held, None, ["b.0.1"]) == KnownStep(FIRST, 1, ())
    assert awaited(KnownStep(FIRST, 1, ()), held, None, ["b.0.1"]) == KnownStep(FIRST, 1, ())
    assert awaited(KnownStep(SECOND, 0, ()), held, None, ["b.0.1"]) is None
    later = [HeldSegment(step, SECOND, 0, 0, 2) for step in (3, 4)]
    assert awaited(KnownStep(SECOND, 0, ()), [*held, *later], None, ["b.0.1"]) == KnownStep(SECOND, 3, ())
    assert awaited(KnownStep(SECOND, 9, ()), of_step(9, SECOND, 2), KeptStep(9, SECOND, 0), ["b.0.1"]) is None


def test_what_is_lost_is_named_by_step_and_parts() -> None:
    held = [HeldSegment(4, FIRST, 0, 0, 4), HeldSegment(4, FIRST, 0, 2, 4), HeldSegment(3, FIRST, 0, 1, 4)]
    assert lost_parts(held) == "step 4 of round 1 lacks 2 of 4 parts: 1, 3"


def test_what_is_said_survives_the_wire() -> None:
    for one in (HeldSegment(4, AGAIN, 1, 2, 3), KeptStep(4, AGAIN, 1), KnownStep(AGAIN, 4, ("a", "b"))):
        assert type(one).from_json(json.loads(json.dumps(one.to_json()))) == one
    assert HeldSegment.from_json(HeldSegment(4, AGAIN, 1, 2, 3, copies=2).to_json()).copies == 2


def test_the_directory_of_a_round_has_its_name() -> None:
    assert RoundNumber.parse(str(AGAIN)) == AGAIN
    assert [RoundNumber.parse(name) for name in ("off", "1", "1.x", ".1", "1.2.3")] == [None] * 5
    assert sorted([AGAIN, SECOND, FIRST, RoundNumber(0, 10)]) == [FIRST, SECOND, RoundNumber(0, 10), AGAIN]


def test_the_memory_of_what_is_sent_is_counted_where_it_lands() -> None:
    """Two replicas of two shards on four machines, two copies: the first process of each sends to one machine."""
    nodes, shards = [0, 1, 2, 3], ["first", "second"] * 2
    plans = [plan_part(rank, shards, nodes, 2) for rank in range(4)]
    bodies = [(100, [node, *plan.targets]) for node, plan in zip(nodes, plans, strict=True)]
    assert [bytes_at(node, bodies) for node in nodes] == [100, 200, 200, 100]
    assert bytes_at(4, bodies) == 0
