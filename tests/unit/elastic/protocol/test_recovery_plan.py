"""Pure decisions: whatever is drawn, a plan holds every unit once and never makes a second history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from elastic.protocol.messages import Generation, Kind, Laggard, Member, Plan, Report, Share
from elastic.protocol.recovery_plan import (
    AllLost,
    Circumstances,
    KeptState,
    LossPlan,
    NotYet,
    decide_loss,
    default_units_of,
    newest_kept,
    rank_order,
    redo_shares,
    smallest_cover,
)
from elastic.protocol.reduction_tree import Node, is_node, leaves
from tests.trees import fold_nodes

WORKERS = ("a", "b", "c", "d", "e")


def member(worker: str) -> Member:
    return Member(worker, f"n{worker}", "host", 1, ord(worker[0]))


def generation(number: int, ids: Sequence[str], kind: Kind = Kind.LOSS, base: int | None = None) -> Generation:
    return Generation(number, kind, base or number, tuple(member(worker) for worker in ids), Plan(), "of the test")


def report(
    worker: str, reduced: int = 0, *, entered: int = 1, kept: int | None = None, copied: int = -1, began: str = ""
) -> Report:
    kept = reduced - 1 if kept is None else kept
    return Report(worker, 1, 9, entered, entered > 0, reduced, kept=kept, copied=copied, began=began)


# ---------------------------------------------------------------------------------------------- ownership


def test_survivors_keep_their_order_when_a_member_is_lost() -> None:
    members = [member(worker) for worker in "cabd"]
    assert [m.worker_id for m in rank_order(members)] == ["a", "b", "c", "d"]
    assert [m.worker_id for m in rank_order(m for m in members if m.worker_id != "b")] == ["a", "c", "d"]


@given(units=st.integers(1, 64), world=st.integers(1, 70))
def test_default_units_are_balanced_and_each_is_owned_once(units: int, world: int) -> None:
    record = generation(1, [f"w{rank}" for rank in range(world)])
    blocks = [default_units_of(worker, record, units) for worker in record.ids]
    assert sorted(unit for block in blocks for unit in block) == list(range(units))
    assert max(map(len, blocks)) == -(-units // world) and all(block == tuple(sorted(block)) for block in blocks)


def test_more_workers_than_units_leaves_some_idle() -> None:
    record = generation(1, "abc")
    assert [default_units_of(worker, record, 2) for worker in "abc"] == [(0,), (1,), ()]


@st.composite
def interrupted(draw: st.DrawFn) -> tuple[int, list[str], dict[str, tuple[Node, ...]], dict[str, int | None]]:
    """What members hold of an operation: roots that may overlap, as after two losses, and a running unit each."""
    units = draw(st.integers(1, 16))
    order = list(WORKERS[: draw(st.integers(1, 5))])
    roots = {}
    for worker in order:
        done = draw(st.sets(st.integers(0, units - 1)))
        roots[worker] = fold_nodes([(unit, unit + 1) for unit in done], units)
    running = {worker: draw(st.none() | st.integers(0, units - 1)) for worker in order}
    return units, order, roots, running


@given(interrupted())
def test_a_redo_holds_each_unit_exactly_once(
    drawn: tuple[int, list[str], dict[str, tuple[Node, ...]], dict[str, int | None]],
) -> None:
    units, order, roots, running = drawn
    shares = redo_shares(units, order, roots, running)
    held = [unit for share in shares for unit in (*leaves(share.keep), *share.units)]
    assert sorted(held) == list(range(units)), "each unit exactly once"
    assert [share.worker_id for share in shares] == order
    for share in shares:
        assert set(share.keep) <= set(roots[share.worker_id]), "nobody keeps what it does not hold"
        assert all(is_node(node, units) for node in share.keep)
    finished = {leaf for held in roots.values() for leaf in leaves(held)}
    recomputed = {unit for share in shares for unit in share.units}
    assert not finished & recomputed, "what is finished anywhere is not computed again"


@given(interrupted())
def test_a_running_unit_stays_where_it_runs(
    drawn: tuple[int, list[str], dict[str, tuple[Node, ...]], dict[str, int | None]],
) -> None:
    units, order, roots, running = drawn
    shares = redo_shares(units, order, roots, running)
    finished = {leaf for held in roots.values() for leaf in leaves(held)}
    for share in shares:
        unit = running[share.worker_id]
        first = next((w for w in order if running[w] == unit), None)
        if unit is not None and unit not in finished and first == share.worker_id:
            assert unit in share.units


def test_of_overlapping_roots_the_largest_is_used() -> None:
    shares = redo_shares(4, ["a", "b"], {"a": [(0, 1), (3, 4)], "b": [(0, 2)]}, {})
    assert [(share.worker_id, share.keep, share.units) for share in shares] == [
        ("a", ((3, 4),), (2,)),
        ("b", ((0, 2),), ()),
    ]


def test_what_a_dead_member_leaves_goes_to_who_is_done_with_it_first() -> None:
    shares = redo_shares(8, ["a", "b", "c"], {"c": [(0, 1)]}, {"b": 1}, (10, 40, 0))
    assert [(share.worker_id, share.units) for share in shares] == [("a", (2, 4, 6)), ("b", (1,)), ("c", (3, 5, 7))]


@pytest.mark.parametrize("paces", [(), (10, 10, 90)])
def test_a_member_that_has_nothing_gets_a_unit_first(paces: tuple[int, ...]) -> None:
    """In a round with a quorum a member that has trained a replica trains no second one for a member that died."""
    shares = redo_shares(3, ["a", "b", "c"], {"a": [(0, 1)]}, {"b": 1}, paces)
    assert [(share.keep, share.units) for share in shares] == [(((0, 1),), ()), ((), (1,)), ((), (2,))]
    shares = redo_shares(3, ["a", "b", "c"], {"a": [(0, 2)], "b": [(1, 2)]}, {}, paces)
    assert [share.units for share in shares] == [(), (), (2,)], "b has delivered: its replica is in the root of a"


def test_of_fewer_units_than_members_the_idle_get_what_is_left() -> None:
    shares = redo_shares(2, ["a", "c"], {"a": [(0, 1)]}, {})
    assert [(share.keep, share.units) for share in shares] == [(((0, 1),), ()), ((), (1,))]


@pytest.mark.parametrize("paces", [(), (40, 10, 10)])
def test_what_the_leader_ran_alone_when_it_died_is_run_by_the_next_leader(paces: tuple[int, ...]) -> None:
    """`job.once` and `job.agree` have one unit, and the value of the leader is wanted, not that of the fastest."""
    shares = redo_shares(1, ["b", "c", "d"], {}, {}, paces)
    assert [(share.worker_id, share.units) for share in shares] == [("b", (0,)), ("c", ()), ("d", ())]


# ------------------------------------------------------------------------------------------- losses


@st.composite
def losses(draw: st.DrawFn) -> tuple[list[Generation], dict[str, Report], set[str]]:
    """A chain of one loss generation and planned ones, and reports as members that obey the protocol give them."""
    ids = list(WORKERS[: draw(st.integers(1, 4))])
    chain = [generation(3, ids)]
    for number in range(4, 4 + draw(st.integers(0, 2))):
        changed = [worker for worker in ids if draw(st.booleans())] + [f"{chr(ord('a') + number)}{number}"]
        chain.append(generation(number, sorted(changed), Kind.PLANNED, base=3))
    op = draw(st.integers(1, 9))
    in_effect = draw(st.sampled_from(chain))
    reports, dead = {}, set()
    for worker in sorted({worker for record in chain for worker in record.ids}):
        fate = draw(st.sampled_from(["reports", "reports", "dead", "silent"]))
        if fate == "dead":
            dead.add(worker)
        elif fate == "reports":
            if worker in in_effect.ids:
                reports[worker] = report(worker, op - draw(st.integers(0, 1)), entered=in_effect.number)
            elif worker in chain[0].ids:
                reports[worker] = report(worker, op - 1, entered=3)
            else:
                reports[worker] = report(worker, entered=0, copied=draw(st.sampled_from([-1, op - 1, op])))
    return chain, reports, dead


@given(losses())
def test_a_decision_lists_only_holders_and_never_asks_them_to_go_back(
    drawn: tuple[list[Generation], dict[str, Report], set[str]],
) -> None:
    chain, reports, dead = drawn
    outcome = decide_loss(chain, reports, dead, {})
    if not isinstance(outcome, LossPlan):
        return
    listed = [m.worker_id for m in outcome.members]
    assert set(listed) <= set(reports) and listed
    stands = {w: reports[w].reduced if reports[w].entered else reports[w].copied for w in listed}
    assert outcome.plan.op == max(stands.values())
    assert {lag.worker_id for lag in outcome.plan.laggards} == {w for w in listed if stands[w] == outcome.plan.op - 1}
    holders = {w for w, r in reports.items() if r.entered}
    if holders:
        assert set(listed) <= holders, "a newcomer's copy never stands beside the state of a member"
        assert set(outcome.released) == holders - set(listed)


@given(losses())
def test_when_everybody_is_known_a_decision_is_made(
    drawn: tuple[list[Generation], dict[str, Report], set[str]],
) -> None:
    """Silence is the only reason to wait."""
    chain, reports, _ = drawn
    everybody = {worker for record in chain for worker in record.ids}
    assert not isinstance(decide_loss(chain, reports, everybody - set(reports), {}), NotYet)


@given(losses())
def test_silence_is_never_taken_for_death(drawn: tuple[list[Generation], dict[str, Report], set[str]]) -> None:
    """Whatever is decided with silent members is also right if they hold the state, or it is not decided."""
    chain, reports, dead = drawn
    everybody = {worker for record in chain for worker in record.ids}
    silent = everybody - set(reports) - dead
    outcome = decide_loss(chain, reports, dead, {})
    holders = [worker for worker, r in reports.items() if r.entered]
    if silent and not holders:
        assert isinstance(outcome, NotYet)
    newest = max((r.entered for r in reports.values()), default=0)
    unproven = [r for r in chain if r.number >= newest and not set(r.ids) & (set(reports) | dead)]
    assert isinstance(outcome, NotYet) or not unproven


def test_a_ring_of_silent_members_may_be_alive() -> None:
    outcome = decide_loss([generation(1, "ab"), generation(2, "b", Kind.PLANNED, 1)], {"a": report("a")}, [], {})
    assert outcome == NotYet("no member of generation 2 has answered or is known dead")


def test_whoever_entered_a_later_generation_proves_that_the_earlier_rings_stand() -> None:
    chain = [generation(1, "b"), generation(2, "ab", Kind.PLANNED, 1)]
    outcome = decide_loss(chain, {"a": report("a", 9, entered=2)}, [], {})
    assert isinstance(outcome, LossPlan) and [m.worker_id for m in outcome.members] == ["a"]


def test_a_silent_member_may_hold_what_a_newcomer_copied_long_ago() -> None:
    chain = [generation(1, "ab"), generation(2, "abc", Kind.PLANNED, 1)]
    reports = {"c": report("c", entered=0, copied=4)}
    assert isinstance(decide_loss(chain, reports, ["a"], {}), NotYet)
    outcome = decide_loss(chain, reports, ["a", "b"], {})
    assert isinstance(outcome, LossPlan) and outcome.plan.op == 4


def test_the_newest_copy_of_newcomers_counts_and_older_ones_are_left_out() -> None:
    newcomers = {worker: member(worker) for worker in "cde"}
    copies = {"c": 4, "d": 5, "e": -1}
    reports = {worker: report(worker, entered=0, copied=op) for worker, op in copies.items()}
    outcome = decide_loss([generation(1, "ab")], reports, ["a", "b"], newcomers)
    assert isinstance(outcome, LossPlan) and [m.worker_id for m in outcome.members] == ["d"]


def test_a_copy_of_a_worker_that_is_no_newcomer_any_more_does_not_count() -> None:
    """It was expelled, or has died, since it has reported."""
    reports = {worker: report(worker, entered=0, copied=op) for worker, op in (("c", 4), ("d", 5))}
    outcome = decide_loss([generation(1, "ab")], reports, ["a", "b"], {"c": member("c")})
    assert isinstance(outcome, LossPlan) and [m.worker_id for m in outcome.members] == ["c"]


def test_a_copy_from_before_the_job_formed_anew_does_not_count() -> None:
    """Its operation is counted from another beginning, and may be called as another one is now."""
    newcomers = {worker: member(worker) for worker in "cd"}
    chain = [replace(generation(5, "ab"), began="step-5")]
    before = report("c", entered=0, copied=7)
    now = report("d", entered=0, copied=4, began="step-5")
    outcome = decide_loss(chain, {"c": before, "d": now}, ["a", "b"], newcomers)
    assert isinstance(outcome, LossPlan) and [m.worker_id for m in outcome.members] == ["d"]
    assert isinstance(decide_loss(chain, {"c": before}, ["a", "b"], newcomers), AllLost)


ALL = frozenset("abc")
NOBODY_REACHES_C = {"a": ("c",), "b": ("c",)}
WILL_BE_ENDED = "nobody gets on: a, b, c will be ended"


@pytest.mark.parametrize(
    ("besides", "survivors", "dropped"),
    [
        (Circumstances(), "abc", ""),
        # The ring could not be built: of those that explain why, the fewest are left out.
        (Circumstances(accused=NOBODY_REACHES_C), "abc", ""),
        (Circumstances(unbuilt={frozenset("ab")}, accused=NOBODY_REACHES_C), "abc", ""),
        (Circumstances(unbuilt={ALL}), "abc", ""),
        (Circumstances(unbuilt={ALL}, accused=NOBODY_REACHES_C), "ab", "c"),
        (Circumstances(unbuilt={ALL}, accused={"a": ("d",)}), "abc", ""),
        (Circumstances(unbuilt={ALL}, accused={"d": ("a",)}), "abc", ""),
        # Who is stuck goes, unless nobody else has the state.
        (Circumstances(stuck={"b"}), "ac", ""),
        (Circumstances(stuck={"d"}), "abc", ""),
        (Circumstances(stuck=ALL), "abc", ""),
        (Circumstances(unbuilt={ALL}, accused=NOBODY_REACHES_C, stuck={"b"}), "a", "c"),
        (Circumstances(unbuilt={ALL}, accused=NOBODY_REACHES_C, stuck={"a", "b"}), "ab", "c"),
        # All that are left get nowhere, and are being ended.
        (Circumstances(hung={"a", "b"}), "abc", ""),
        (Circumstances(hung=ALL), WILL_BE_ENDED, ""),
        (Circumstances(hung=ALL, waited_out=True), "abc", ""),
        # Something newer than what newcomers have copied does not matter where members have the state.
        (Circumstances(kept="step-000000000099.0.g1-0123abcd"), "abc", ""),
        (Circumstances(unheard={"e"}), "abc", ""),
    ],
)
def test_who_of_the_members_survives(besides: Circumstances, survivors: str, dropped: str) -> None:
    reports = {worker: report(worker, 8) for worker in "abc"}
    outcome = decide_loss([generation(1, "abcd")], reports, ["d"], {}, besides)
    if isinstance(outcome, NotYet):
        assert outcome.because == survivors
    else:
        assert isinstance(outcome, LossPlan) and ("".join(outcome.ids), "".join(outcome.dropped)) == (
            survivors,
            dropped,
        )


@pytest.mark.parametrize(
    ("besides", "copied", "outcome"),
    [
        (Circumstances(), 5, "c"),
        (Circumstances(kept="step-000000000005.0.g1-0123abcd"), 5, "c"),
        (Circumstances(kept="step-000000000006.0.g1-0123abcd"), 5, "lost: newcomers have copied that of step 5, and "),
        (Circumstances(kept="step-000000000006.0.g1-0123abcd", unheard={"d"}), 5, "not yet: d may hold a copy"),
        (Circumstances(unheard={"d"}), 5, "c"),
        (Circumstances(unheard={"d"}), -1, "not yet: d may hold a copy"),
        (Circumstances(unheard={"d"}, waited_out=True), -1, "lost"),
        (Circumstances(), -1, "lost"),
    ],
)
def test_what_survives_the_members(besides: Circumstances, copied: int, outcome: str) -> None:
    """copied: the step of which newcomer c has a copy; -1: it has none."""
    newcomers = {worker: member(worker) for worker in "cd"}
    reports = {"c": replace(report("c", entered=0, copied=4 if copied >= 0 else -1), copied_step=copied)}
    match decide_loss([generation(1, "ab")], reports, ["a", "b"], newcomers, besides):
        case LossPlan() as plan:
            assert "".join(plan.ids) == outcome
        case AllLost(newer=newer):
            assert f"lost: {newer}".startswith(outcome) and bool(newer) == (outcome != "lost")
        case NotYet(because):
            assert because == f"no member is left, and {outcome.removeprefix('not yet: ')} of the state"


def test_without_any_copy_the_last_known_operation_is_named() -> None:
    record = replace(generation(1, "ab"), plan=Plan(op=7))
    assert decide_loss([record], {}, ["a", "b"], {}) == AllLost(7, "no living worker holds a copy of the state")


def test_a_drained_member_is_released_and_not_listed_again() -> None:
    chain = [generation(1, "ab"), generation(2, "a", Kind.PLANNED, 1)]
    outcome = decide_loss(chain, {"a": report("a", 9, entered=2), "b": report("b", 8, entered=1)}, [], {})
    assert isinstance(outcome, LossPlan) and outcome.released == ("b",) and outcome.plan.laggards == ()


def test_a_drained_member_is_the_job_when_nobody_else_is_left() -> None:
    chain = [generation(1, "ab"), generation(2, "a", Kind.PLANNED, 1)]
    outcome = decide_loss(chain, {"b": report("b", 8, entered=1)}, ["a"], {})
    assert isinstance(outcome, LossPlan) and [m.worker_id for m in outcome.members] == ["b"]


def test_a_laggard_copies_from_the_senior_who_still_has_the_result() -> None:
    reports = {"a": report("a", 8, kept=-1), "b": report("b", 8), "c": report("c", 7)}
    outcome = decide_loss([generation(1, "abc")], reports, [], {})
    assert isinstance(outcome, LossPlan) and outcome.plan.laggards == (Laggard("c", "b"),)


def test_a_laggard_computes_alone_when_nobody_alive_has_the_result() -> None:
    reports = {"a": report("a", 8, kept=-1), "c": report("c", 7)}
    outcome = decide_loss([generation(1, "ac")], reports, [], {})
    assert isinstance(outcome, LossPlan) and outcome.plan.laggards == (Laggard("c", ""),)


def test_members_two_operations_apart_are_a_bug() -> None:
    with pytest.raises(AssertionError, match="differ by more than one operation"):
        decide_loss([generation(1, "ab")], {"a": report("a", 8), "b": report("b", 6)}, [], {})


# ------------------------------------------------------------------------------------------- accusations


@given(
    st.dictionaries(st.sampled_from("abcdefghijkl"), st.sets(st.sampled_from("abcdefghijkl"), max_size=4), max_size=12)
)
def test_a_cover_touches_every_accused_link(accusations: dict[str, set[str]]) -> None:
    dropped = smallest_cover(accusations, list("abcdefghijkl"))
    links = [{a, b} for a, peers in accusations.items() for b in peers if a != b]
    assert all(link & set(dropped) for link in links)
    assert len(set(dropped)) == len(dropped) <= len({worker for link in links for worker in link})
    assert not links or len(dropped) < len({worker for link in links for worker in link}), "somebody stays"


def test_of_two_that_accuse_each_other_the_younger_is_dropped() -> None:
    assert smallest_cover({"a": ["b"], "b": ["a"]}, ["a", "b"]) == ("b",)


def test_one_that_nobody_reaches_is_dropped_alone() -> None:
    assert smallest_cover({"b": ["a"], "c": ["a"], "a": ["c"]}, ["a", "b", "c"]) == ("a",)


def test_who_accuses_nobody_is_not_dropped() -> None:
    assert smallest_cover({"a": []}, ["a", "b"]) == ()


def entry(step: int, generation: int = 1) -> str:
    return f"step-{step:012d}.0.g{generation}-0123abcd"


def test_a_job_goes_on_from_the_newest_that_a_machine_holds_and_with_those_who_hold_it() -> None:
    kept = newest_kept({"a": entry(10), "b": entry(20), "c": "", "d": entry(20)}, checkpoint="", began="")
    assert kept == KeptState(entry(20), ("b", "d"), memory=True)
    assert newest_kept({"a": entry(20, 2), "b": entry(20, 3)}, "", "") == KeptState(entry(20, 3), ("b",), memory=True)


def test_a_newer_checkpoint_is_everybodys_and_of_the_same_step_a_snapshot_is_nearer() -> None:
    snapshots = {"a": entry(10), "b": ""}
    assert newest_kept(snapshots, entry(11), "") == KeptState(entry(11), ("a", "b"), memory=False)
    assert newest_kept(snapshots, entry(10), "") == KeptState(entry(10), ("a",), memory=True)


@pytest.mark.parametrize(
    ("snapshots", "checkpoint", "began"),
    [
        ({"a": ""}, "", ""),
        ({"a": entry(0)}, "", ""),
        ({"a": entry(20, 2)}, entry(10), entry(20, 1)),
        ({"a": "what somebody else has written"}, "", ""),
    ],
    ids=["nothing", "the first step", "no further than before", "no name"],
)
def test_a_job_does_not_go_on_from(snapshots: dict[str, str], checkpoint: str, began: str) -> None:
    assert newest_kept(snapshots, checkpoint, began) is None


def test_a_plan_has_a_digest_of_its_tasks_if_it_has_any() -> None:
    shares, laggards = (Share("a", ((0, 4),), (5,)),), (Laggard("b", "a"),)
    digests = [Plan(shares=one, laggards=other).tasks_digest for one in ((), shares) for other in ((), laggards)]
    assert digests[0] == "" and "" not in digests[1:] and len(set(digests)) == 4
    assert Plan(laggards=laggards, all_tasks="of all nodes").tasks_digest == "of all nodes"
