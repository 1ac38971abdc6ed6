"""Who gets slots, and what the others wait for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from elastic.config import JobSpec
from elastic.fleet.documents import FleetJob, NodeShare, Placement, Result, Size, Submission, Wish
from elastic.fleet.queue.scheduler import OfferedNode, schedule


def job(number: int, workers: int = 2, least: int = 1, placed: dict[str, int] | None = None, **fields: Any) -> FleetJob:
    of_spec = {name: fields.pop(name) for name in ("labels", "priority", "owner") if name in fields}
    spec = JobSpec(name=f"j-{number}", command=("train",), workers=workers, min_workers=least, **of_spec)
    placement = None if placed is None else Placement(tuple(NodeShare(node, slots) for node, slots in placed.items()))
    return FleetJob(Submission(spec, number, "series", "id"), placement, **fields)


def nodes(**slots: int) -> list[OfferedNode]:
    return [OfferedNode(name, count) for name, count in slots.items()]


def placed(jobs: list[FleetJob], there: list[OfferedNode], gone: set[str] = frozenset()) -> dict[str, dict[str, int]]:  # type: ignore[assignment]
    return {name: placement.slots for name, placement in schedule(jobs, there, gone).placements.items()}


def waiting(jobs: list[FleetJob], there: list[OfferedNode]) -> dict[str, str]:
    return dict(schedule(jobs, there, set()).waiting)


def test_a_job_starts_when_its_minimum_fits_with_what_there_is() -> None:
    assert placed([job(1, workers=4, least=3)], nodes(a=2, b=1)) == {"j-1": {"a": 2, "b": 1}}


def test_a_job_gets_all_of_its_minimum_or_nothing() -> None:
    jobs = [job(0, placed={"a": 1}), job(1, workers=3, least=3)]
    assert placed(jobs, nodes(a=2, b=1)) == {"j-0": {"a": 1, "b": 1}}
    jobs = [job(0, workers=1, placed={"a": 1}), job(1, workers=3, least=3)]
    assert placed(jobs, nodes(a=2, b=1)) == {"j-0": {"a": 1}}
    assert waiting(jobs, nodes(a=2, b=1)) == {"j-1": "needs 3 free slots at once, and 2 of the 3 on 2 nodes are free"}


def test_without_nodes_the_sentence_says_so() -> None:
    assert waiting([job(1)], []) == {"j-1": "needs 1 free slot at once, and there are no nodes"}


BUSY = job(0, workers=2, placed={"a": 2})


def test_a_small_job_begins_on_slots_that_the_one_before_it_cannot_use_yet() -> None:
    jobs = [BUSY, job(1, workers=4, least=4), job(2, workers=2)]
    assert placed(jobs, nodes(a=2, b=2)) == {"j-0": {"a": 2}, "j-2": {"b": 1}}, "with its minimum"
    assert waiting(jobs, nodes(a=2, b=2)) == {"j-1": "needs 4 free slots at once, and 1 of the 4 on 2 nodes are free"}
    over = [replace(BUSY, result=Result(0, "done")), jobs[1], job(2, workers=2, placed={"b": 1})]
    plan = schedule(over, nodes(a=2, b=2), set())
    assert plan.preempted == {"j-2": "j-1"} and plan.placements.keys() == {"j-2"}
    assert plan.waiting == {
        "j-1": "needs 4 free slots at once, and 3 of the 4 on 2 nodes are free; j-2 will leave for it"
    }
    left = [*over[:2], job(2, workers=2)]
    assert placed(left, nodes(a=2, b=2)) == {"j-1": {"a": 2, "b": 2}}


def test_a_job_larger_than_the_fleet_holds_up_nobody_and_says_so_with_numbers() -> None:
    jobs = [job(1, workers=8, least=4), job(2, workers=1, least=1)]
    plan = schedule(jobs, nodes(a=2, b=1), set())
    assert {name: placement.slots for name, placement in plan.placements.items()} == {"j-2": {"a": 1}}
    assert plan.larger == {"j-1"}
    assert plan.waiting == {
        "j-1": "larger than the fleet, which has 3 slots on 2 nodes: needs 4 at once, and holds up nobody"
    }
    assert schedule([job(1, workers=8, least=3)], nodes(a=2, b=1), set()).larger == set(), "it begins with less"


def test_whether_a_job_is_larger_than_the_fleet_counts_the_nodes_that_may_have_it() -> None:
    gpu = frozenset({"gpu=h100"})
    there = [
        OfferedNode("a", 4),
        OfferedNode("b", 2, gpu),
        OfferedNode("c", 2, gpu, leaves=True),
        OfferedNode("d", 1, gpu, goes=True),
    ]
    asked = job(1, least=4, workers=4, labels=("gpu=h100",))
    assert waiting([asked], there)["j-1"] == (
        "larger than the fleet, which has 2 slots on 1 node with gpu=h100, and 3 where no jobs are taken now: "
        "needs 4 at once, and holds up nobody"
    )
    assert waiting([job(1, labels=("gpu=h100",)), job(2)], there[:1])["j-1"].startswith(
        "larger than the fleet, which has 0 slots on 0 nodes with gpu=h100: needs 1 at once"
    )


def test_a_job_that_was_larger_than_the_fleet_takes_its_place_in_the_queue_when_nodes_come() -> None:
    small = job(2, workers=4, least=1, placed={"a": 2})
    jobs = [job(1, workers=4, least=4), small, job(3, workers=1)]
    plan = schedule(jobs, nodes(a=2, b=2), set())
    assert {name: placement.slots for name, placement in plan.placements.items()} == {"j-2": {"a": 2}}
    assert plan.preempted == {"j-2": "j-1"}
    assert plan.waiting == {
        "j-1": "needs 4 free slots at once, and 2 of the 4 on 2 nodes are free; j-2 will leave for it",
        "j-3": "needs 1 free slot at once, and 2 of the 4 on 2 nodes are free",
    }, "what is free is kept for the first one"
    over = [jobs[0], replace(small, result=Result(0, "done")), jobs[2]]
    assert placed(over, nodes(a=2, b=2)) == {"j-1": {"a": 2, "b": 2}}


def test_a_job_that_runs_does_not_grow_on_what_one_before_it_waits_for_beyond_its_minimum() -> None:
    first, size = job(1, workers=6, least=6), Size(5)
    plan = schedule([first, job(2, workers=2, placed={"a": 2}, size=size)], nodes(a=2, b=2, c=2), set())
    assert plan.placements["j-2"].slots == {"a": 2}
    assert plan.lacking == {"j-2": "is to have 5 workers, and has 2: free slots go to j-1, which comes before it"}
    lost = job(2, workers=4, least=3, placed={"a": 2, "d": 2})
    jobs = [job(0, workers=1, placed={"c": 1}), first, lost]
    assert placed(jobs, nodes(a=2, b=2, c=2), {"d"})["j-2"] == {"a": 2, "b": 1}, "without, it could not go on"


def test_a_node_that_is_away_for_a_moment_is_still_part_of_the_fleet() -> None:
    jobs = [job(1, workers=4, least=4), job(2, workers=1)]
    there = [OfferedNode("a", 2), OfferedNode("b", 2, away=True)]
    assert placed(jobs, there) == {}, "the small one does not begin in that moment"
    assert waiting(jobs, there)["j-1"] == (
        "needs 4 free slots at once, and 2 of the 2 on 1 node are free; those that come soon are kept for it"
    )
    assert placed([job(3, placed={"b": 1})], there) == {"j-3": {"b": 1, "a": 1}}


def test_while_nodes_may_still_come_nothing_is_larger_than_the_fleet() -> None:
    jobs = [job(1, workers=4, least=4), job(2, workers=1)]
    plan = schedule(jobs, nodes(a=2), set(), awaited=True)
    assert not plan.placements and not plan.larger
    assert plan.waiting["j-2"].endswith("; behind j-1 until all nodes have had time to come")
    urgent = [job(1, placed={"a": 2}), job(2, priority=1)]
    assert schedule(urgent, nodes(a=2), set(), awaited=True).preempted == {}, "a free node may be on its way"


def test_jobs_share_a_node_side_by_side() -> None:
    jobs = [job(1, workers=2, placed={"a": 2}), job(2, workers=3)]
    assert placed(jobs, nodes(a=4, b=1)) == {"j-1": {"a": 2}, "j-2": {"a": 2, "b": 1}}


def test_a_job_takes_as_few_nodes_as_possible() -> None:
    assert placed([job(1, workers=3)], nodes(a=1, b=4, c=2)) == {"j-1": {"b": 3}}


def test_a_job_that_runs_with_less_grows_on_nodes_where_it_has_nothing() -> None:
    assert placed([job(1, workers=4, placed={"a": 1})], nodes(a=3, b=2)) == {"j-1": {"a": 1, "b": 2}}


def test_only_nodes_with_all_labels_count() -> None:
    there = [
        OfferedNode("a", 4),
        OfferedNode("b", 1, frozenset({"gpu=h100", "rack=1"})),
        OfferedNode("c", 2, frozenset({"rack=1"})),
    ]
    asked = job(1, workers=2, labels=("gpu=h100", "rack=1"))
    assert placed([asked], there) == {"j-1": {"b": 1}}
    busy = job(0, workers=1, placed={"b": 1})
    assert waiting([busy, job(1, labels=("gpu=h100",))], there) == {
        "j-1": "needs 1 free slot at once, and 0 of the 1 on 1 node with gpu=h100 are free"
    }


def test_a_node_that_leaves_gives_its_slots_up_and_others_take_over() -> None:
    there = [OfferedNode("a", 2), OfferedNode("b", 2, leaves=True), OfferedNode("c", 2)]
    assert placed([job(1, workers=4, placed={"a": 2, "b": 2})], there) == {"j-1": {"a": 2, "c": 2}}


def test_an_absent_node_keeps_its_jobs_until_it_is_gone() -> None:
    jobs = [job(1, workers=2, placed={"a": 1, "b": 1})]
    assert placed(jobs, nodes(a=1, c=1)) == {"j-1": {"a": 1, "b": 1}}
    assert placed(jobs, nodes(a=1, c=1), {"b"}) == {"j-1": {"a": 1, "c": 1}}


def test_a_job_whose_nodes_are_all_gone_keeps_them() -> None:
    assert placed([job(1, workers=1, placed={"a": 1})], nodes(c=1), {"a"}) == {"j-1": {"a": 1}}


def test_a_stopped_job_keeps_its_place_until_it_is_over_and_gets_no_more() -> None:
    stopping = job(1, workers=4, placed={"a": 1}, stop=Wish("enough"))
    assert placed([stopping, job(2, workers=2)], nodes(a=2, b=1)) == {"j-1": {"a": 1}, "j-2": {"a": 1, "b": 1}}
    over = replace(stopping, result=Result(6, "drained"))
    assert placed([over, job(2, workers=3)], nodes(a=2, b=1)) == {"j-2": {"a": 2, "b": 1}}


def test_a_stopped_job_that_waits_holds_up_nobody() -> None:
    jobs = [job(1, workers=9, least=9, stop=Wish("enough")), job(2, workers=1)]
    assert placed(jobs, nodes(a=1)) == {"j-2": {"a": 1}}


def test_a_node_that_has_a_notice_gets_nothing_and_keeps_what_it_has() -> None:
    there = [OfferedNode("a", 2, goes=True), OfferedNode("b", 1)]
    jobs = [job(1, workers=3, placed={"a": 1}), job(2, workers=1)]
    assert placed(jobs, there) == {"j-1": {"a": 1}, "j-2": {"b": 1}}
    assert schedule([job(1)], there[:1], set()).placements == {}


def test_a_job_that_is_to_be_smaller_gives_up_its_smallest_and_newest_nodes() -> None:
    there = nodes(a=4, b=2, c=2)
    assert placed([job(1, workers=8, placed={"a": 4, "b": 2, "c": 2}, size=Size(6))], there) == {
        "j-1": {"a": 4, "b": 2}
    }
    assert placed([job(1, workers=8, placed={"a": 4, "b": 2, "c": 2}, size=Size(4))], there) == {"j-1": {"a": 4}}
    jobs = [job(1, workers=8, placed={"a": 4, "b": 2, "c": 2}, size=Size(6)), job(2, workers=2, least=2)]
    assert placed(jobs, there)["j-2"] == {"c": 2}, "what it gives up is free for others"


def test_a_part_of_a_node_is_given_up_where_another_node_stays_as_it_is() -> None:
    assert placed([job(1, workers=8, placed={"a": 4, "b": 4}, size=Size(7))], nodes(a=4, b=4)) == {
        "j-1": {"a": 4, "b": 3}
    }
    alone = [job(1, workers=8, placed={"a": 4, "b": 4}, size=Size(3))]
    assert placed(alone, nodes(a=4, b=4)) == {"j-1": {"a": 4}}
    told = schedule(alone, nodes(a=4, b=4), set()).lacking["j-1"]
    assert told.startswith("is to have 3 workers, and keeps 4 slots on a: it has no other node on which it goes on")


def test_a_job_that_is_to_be_larger_gets_slots_on_other_nodes_and_says_what_it_lacks() -> None:
    jobs = [job(1, workers=2, placed={"a": 2}, size=Size(5))]
    plan = schedule(jobs, nodes(a=4, b=2), set())
    assert plan.placements["j-1"].slots == {"a": 2, "b": 2}
    assert plan.lacking == {"j-1": "is to have 5 workers, and has 4: no other node has free slots for it"}
    assert schedule(jobs, nodes(a=4, b=3), set()).lacking == {}


def test_a_job_that_waits_begins_in_its_new_size() -> None:
    assert placed([job(1, workers=4, least=1, size=Size(2))], nodes(a=4)) == {"j-1": {"a": 2}}


NODES = st.dictionaries(st.sampled_from("abcde"), st.integers(1, 4), max_size=5)


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), max_size=6),
    st.lists(st.tuples(NODES, st.sets(st.sampled_from("abcde")), st.integers(0, 6)), min_size=1, max_size=4),
)
def test_no_slot_is_given_twice_and_no_job_starts_below_its_minimum(
    asked: list[tuple[int, int]], times: list[tuple[dict[str, int], set[str], int]]
) -> None:
    jobs = [job(number, workers=max(pair), least=min(pair)) for number, pair in enumerate(asked)]
    for there, leaving, size in times:
        jobs = [replace(one, size=Size(max(size, one.spec.min_workers)) if size else None) for one in jobs]
        slots = [OfferedNode(name, 4, leaves=name in leaving) for name in there]  # a node's slots stay the same
        plan = schedule(jobs, slots, set())
        for one in jobs:
            placement = plan.placements.get(one.name)
            if placement is not None and one.waits:
                assert one.spec.min_workers <= placement.total <= one.workers
            if one.runs:
                assert placement is not None, "a job that runs is never forgotten"
        fits = sum(node.slots for node in slots if node.takes)
        large = {one.name for one in jobs if one.spec.min_workers > fits}
        assert plan.larger == (large & plan.waiting.keys() if there else set())
        taken: dict[str, int] = {}
        for placement in plan.placements.values():
            for share in placement.shares:
                taken[share.node] = taken.get(share.node, 0) + share.slots
        assert all(count <= 4 for count in taken.values())
        assert not plan.placements.keys() & plan.waiting.keys()
        jobs = [replace(one, placement=plan.placements.get(one.name, one.placement)) for one in jobs]
        jobs = [replace(one, stop=Wish("preempted", True)) if one.name in plan.preempted else one for one in jobs]
        again = schedule(jobs, slots, set())
        assert not again.preempted
        notes = [{job: said.partition(";")[0] for job, said in one.waiting.items()} for one in (plan, again)]
        assert notes[0] == notes[1]
        assert again.placements == plan.placements, "what is settled stays"
