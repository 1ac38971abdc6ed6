"""Each invariant holds of a good history, is violated by a bad one, and is unknown where nothing can be said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from chaos_tests.checkers import INVARIANTS, CheckerVerdict, Invariant, Truth, judge
from chaos_tests.checkers.history import Event, History, Run, every_kind_came
from tests.unit.histories import (
    RESULT,
    A,
    B,
    C,
    D,
    S,
    changed,
    event,
    good,
    record,
    steps,
    with_events,
    with_result,
    with_step,
    with_steps,
    without,
)

BAD: dict[str, tuple[str, Callable[[History], History]]] = {
    "a checkpoint that is called complete is torn": (
        "I14",
        lambda h: changed(h, "checkpoint_read", problem="its file part-0 is damaged"),
    ),
    "the durable point is gone at the end": (
        "I14",
        lambda h: with_events(h, event(8, "pointer_moved", entry="step-000000000009.0.g3-c105d2d3")),
    ),
    "a worker goes on from what was never completed": (
        "I14",
        lambda h: with_events(h, event(8, "state_restored", A, 3, entry="step-000000000001.0.g1-c105d2d3")),
    ),
    "a number is written twice": (
        "I1",
        lambda h: with_events(h, event(2.2, "etcd_put", "harness", revision=21, number=2, members=[A])),
    ),
    "a lower number is written later": (
        "I1",
        lambda h: with_events(h, event(6, "etcd_put", "harness", revision=99, number=0, members=[A])),
    ),
    "etcd has other members than were told": ("I1", lambda h: changed(h, "etcd_put", members=[A, B])),
    "a generation is told that was never written": (
        "I1",
        lambda h: with_events(h, event(6, "committed", generation=4, kind="loss", members=[A])),
    ),
    "a worker enters another list": ("I2", lambda h: changed(h, "entered", 2, B, members=[B, A], rank=0)),
    "a worker enters another kind": ("I2", lambda h: changed(h, "entered", 2, B, kind="planned")),
    "two workers have rank 0": ("I3", lambda h: changed(h, "entered", 2, B, rank=0)),
    "survivors change places": (
        "I3",
        lambda h: with_events(without(h, "entered"), *record(1, 1, "form", [A, B]), *record(2, 2, "loss", [B, A])),
    ),
    "a newcomer comes before a survivor": ("I3", lambda h: with_events(h, *record(7, 4, "planned", [C, A, B, D]))),
    "a worker works in a generation without it": (
        "I4",
        lambda h: with_events(h, event(2.4, "op_complete", C, 2, op=2)),
    ),
    "a worker works in a generation that never was": ("I4", lambda h: with_events(h, event(2.4, "ring_up", A, 7))),
    "a fenced worker goes on": (
        "I4",
        lambda h: with_events(h, event(5.5, "fenced", B, 3), event(5.6, "op_complete", B, 3, op=9)),
    ),
    "an operation is completed after it was reported missing": (
        "I4",
        lambda h: with_events(h, event(2.09, "op_complete", B, 1, op=2)),
    ),
    "a step is of an older generation than the one before": ("I4", lambda h: with_step(h, 2, generation=1)),
    "a step names a world that its generation has not": ("I4", lambda h: with_step(h, 1, world_size=3)),
    "a step is of a generation that never was": ("I4", lambda h: with_step(h, 2, generation=9)),
    "a thawed worker does not find itself fenced": (
        "I4",
        lambda h: with_events(
            without(h, "worker_exited", worker=B),
            event(2.2, "fault_injected", "harness", worker=B, number=2, fault="freeze-long", lethal=False),
            event(2.3, "expelled", worker=B, because="no beat"),
            event(2.4, "fault_ended", "harness", number=2),
        ),
    ),
    "a thawed worker has to be killed": (
        "I4",
        lambda h: changed(
            with_events(
                h,
                event(2.2, "fault_injected", "harness", worker=B, number=2, fault="freeze-long", lethal=False),
                event(2.3, "expelled", worker=B, because="no beat"),
                event(2.4, "fault_ended", "harness", number=2),
            ),
            "worker_exited",
            worker=B,
            because="killed by SIGKILL",
        ),
    ),
    "a step is missing": ("I5", lambda h: with_steps(h, (h.faulty.steps[0], h.faulty.steps[2]))),
    "two nodes tell a step differently": (
        "I5",
        lambda h: with_events(h, event(10, "ledgers_differ", "harness", because="step 0 differs in scalars")),
    ),
    "two nodes have another result of a step": (
        "I6",
        lambda h: with_events(h, event(10, "ledgers_differ", "harness", because="step 0 differs in scalars")),
    ),
    "a step is there twice": ("I5", lambda h: with_steps(h, (*h.faulty.steps, h.faulty.steps[2]))),
    "the last step is missing": ("I5", lambda h: with_steps(h, h.faulty.steps[:2])),
    "two members end with other states": ("I6", lambda h: changed(h, "finished", worker=B, digest="e" * 64)),
    "the job ended by a disagreement": ("I6", lambda h: with_result(h, exit_code=5, because="they differ\nhow")),
    "the first step after a loss has another loss": ("I7", lambda h: with_step(h, 1, scalars={"loss": 0.6})),
    "the first step after a join is in another epoch": ("I7", lambda h: with_step(h, 2, epoch=1)),
    "a sample is used twice": ("I8", lambda h: with_step(h, 1, samples=[[2], [0]])),
    "a sample is never used": ("I8", lambda h: with_step(h, 1, samples=[[2], []])),
    "a step has more samples": ("I9", lambda h: with_step(h, 1, samples=[[2], [3, 4]])),
    "the learning rate follows the world": ("I9", lambda h: with_step(h, 1, lr=[0.2])),
    "more updates are lost without waiting than workers": ("I8", lambda h: phases(h, 5.0)),
    "an acknowledged update is lost with one worker": (
        "I8",
        lambda h: phases(with_events(h, event(6, "pieces_fell_back", A, 3, pieces=[1])), 0.0),
    ),
    "the digest differs": ("I10", lambda h: with_result(h, digest="e" * 64)),
    "a scalar differs in its last bit": ("I10", lambda h: with_step(h, 2, scalars={"loss": 0.33333333333333337})),
    "a death is noted late": (
        "I11",
        lambda h: with_events(without(h, "member_lost"), event(8, "member_lost", worker=C, because="late")),
    ),
    "a death is never noted": ("I11", lambda h: with_result(without(h, "member_lost", "finished"), exit_code=0)),
    "a worker is declared lost to whom nothing happened": (
        "I11",
        lambda h: with_events(h, event(6, "member_lost", worker=B, because="no beat")),
    ),
    "a worker that is asked to leave is lost": ("I11", lambda h: with_events(h, *drained("drain-node"))),
    "a worker whose machine goes is lost": ("I11", lambda h: with_events(h, *drained("notice-node"))),
    "no step is applied while a disk is slow": (
        "I12",
        lambda h: with_events(
            h,
            event(3, "fault_injected", "harness", number=2, fault="disk-slow", target="disk of a.0.0", lethal=False),
            event(60, "steps_seen", "harness", applied=4),
            event(60, "fault_ended", "harness", number=2),
        ),
    ),
    "no step is applied for long after a fault in the first one": ("I12", lambda h: without_step(h, first=True)),
    "the job stands still behind its last step": ("I12", lambda h: with_events(without_step(h, first=False), LATE)),
    "the job fails": ("I12", lambda h: with_result(h, exit_code=4, because="every copy is lost")),
    "the job never ends": ("I12", lambda h: replace(h, faulty=replace(h.faulty, result=None))),
    "no step is applied for long": ("I12", lambda h: with_events(h, event(60, "steps_seen", "harness", applied=4))),
    "a survivor is restarted": (
        "I13",
        lambda h: with_events(h, event(2.4, "worker_exited", "agent", worker=B, because="exited with 1")),
    ),
    "a survivor has another process": ("I13", lambda h: changed(h, "ring_up", 3, A, pid=4711)),
    "a process is left": ("I15", lambda h: changed(h, "left_behind", left=["process 12 is left: sleep"])),
    "no fault was injected": ("I16", lambda h: without(h, "fault_injected")),
    "a fault was not seen": ("I16", lambda h: without(h, "fault_seen")),
    "a fault has not ended": ("I16", lambda h: without(h, "fault_ended")),
    "a fault is told twice": (
        "I16",
        lambda h: with_events(h, event(3, "fault_skipped", "harness", number=1, fault="kill", because="no")),
    ),
}


def without_step(history: History, *, first: bool) -> History:
    """For 40 s: from the strike on, which comes before the first step then, or from the last step on."""
    since_ns = int((2.2 if first else 8.0) * S)
    later = [
        replace(one, line={**one.line, "t_mono_ns": one.t_ns + 40 * S * (one.t_ns > since_ns)})
        for one in history.faulty.events
        if one.t_ns > since_ns or not first or one.name != "steps_seen"
    ]
    return replace(history, faulty=replace(history.faulty, events=tuple(later)))


LATE: Event = event(9, "fault_injected", "harness", worker=B, number=2, fault="kill", lethal=True)
"""A fault behind the last step."""


def test_what_a_script_does_behind_its_last_step_is_its_own_matter() -> None:
    assert verdict("I12", without_step(good(), first=False)).answer is Truth.TRUE


def drained(kind: str) -> tuple[Event, ...]:
    """B is asked to leave long after all else, and its process is ended, which the others note as a loss."""
    return (
        event(30, "fault_injected", "harness", worker=B, number=2, fault=kind, lethal=False),
        event(34, "worker_exited", "agent", worker=B, because="killed by SIGKILL"),
        event(34, "member_lost", worker=B, because="killed by SIGKILL"),
        event(40, "fault_ended", "harness", number=2),
    )


EMPTY = History(Run((), (), None), Run((), (), None))

UNKNOWN: dict[str, tuple[str, Callable[[History], History]]] = {
    "etcd was not watched": ("I1", lambda h: without(h, "etcd_put")),
    "the watch of etcd was lost": ("I1", lambda h: with_events(h, event(2, "etcd_gap", "harness", because="cut"))),
    "the generation never changed": ("I7", lambda h: with_steps(h, steps((1, 3), (1, 3)))),
    "the quiet run has no steps": ("I7", lambda h: replace(h, quiet=Run((), (), RESULT))),
    "samples of a run without a quiet one": ("I8", lambda h: replace(h, quiet=Run((), (), RESULT))),
    "batches of a run without a quiet one": ("I9", lambda h: replace(h, quiet=Run((), (), RESULT))),
    "the generation should have changed": (
        "I7",
        lambda h: with_steps(changed(h, "fault_injected", lethal=False), steps((1, 3), (1, 3))),
    ),
    "the generation should have changed for a kill": (
        "I7",
        lambda h: with_events(spared(h), event(6, "fault_injected", "harness", number=2, fault="kill", lethal=True)),
    ),
    "who was to be killed was not there": (
        "I11",
        lambda h: with_events(spared(h), event(6, "fault_skipped", "harness", number=2, fault="kill", because="no")),
    ),
    "the only kill was skipped": (
        "I13",
        lambda h: with_events(spared(h), event(6, "fault_skipped", "harness", number=2, fault="kill", because="no")),
    ),
    "no checkpoint was completed": ("I14", lambda h: without(h, "checkpoint_read", "pointer_moved")),
    "the job ended before its time for another reason": (
        "I6",
        lambda h: with_result(without(h, "finished"), exit_code=2, because="no room on the disk"),
    ),
    "the quiet run has no digest": ("I10", lambda h: replace(h, quiet=replace(h.quiet, result=None))),
    "no worker was hit": ("I13", lambda h: without(h, "fault_injected", "worker_exited")),
    "nobody looked what was left": ("I15", lambda h: without(h, "left_behind")),
}


def spared(history: History) -> History:
    """etcd forgets its history, and that is all: one generation, and nobody is lost."""
    names = ("finished", "left_behind", "checkpoint_complete", "checkpoint_read", "pointer_moved", "steps_seen")
    kept = tuple(one for one in history.faulty.events if one.name in names)
    quiet = replace(history, faulty=replace(history.faulty, events=kept))
    asked = event(2, "fault_injected", "harness", number=1, fault="compact-etcd", target="etcd", lethal=False)
    formed = record(1.0, 1, "form", [A, B, D])
    return with_steps(with_events(quiet, asked, *formed), steps((1, 3), (1, 3), (1, 3)))


def phases(history: History, lost: float) -> History:
    """Its steps are phases of training without waiting, in the last of which so many updates were lost."""

    def made(run: Run, lost: float) -> Run:
        counts = [0.0] * (len(run.steps) - 1) + [lost]
        told = [{"data": {"unwaiting": True}, "scalars": {"elastic.lost_updates": count}} for count in counts]
        lines = [replace(one, line={**one.line, **new}) for one, new in zip(run.steps, told, strict=True)]
        return replace(run, steps=tuple(lines))

    return replace(history, faulty=made(history.faulty, lost), quiet=made(history.quiet, 0.0))


def drawn(history: History) -> History:
    """The script draws its own samples, in both runs."""

    def without_samples(run: Run) -> Run:
        return replace(run, steps=tuple(replace(one, line={**one.line, "samples": []}) for one in run.steps))

    return replace(history, faulty=without_samples(history.faulty), quiet=without_samples(history.quiet))


NOT_APPLICABLE: dict[str, tuple[str, Callable[[History], History]]] = {
    "the bits of rounds with a quorum": ("I10", lambda h: with_step(h, 2, scalars={"elastic.replicas": 2.0})),
    "where generations of rounds with a quorum begin": (
        "I7",
        lambda h: with_step(h, 1, scalars={"elastic.replicas": 2.0}),
    ),
    "the bits of training without waiting": ("I10", lambda h: phases(h, 0.0)),
    "batches without waiting": ("I9", lambda h: phases(h, 0.0)),
    "samples that the script draws itself": ("I8", drawn),
    "the batch of a script that draws its own samples": ("I9", drawn),
    "checkpoints of a job that takes none": (
        "I14",
        lambda h: replace(without(h, "checkpoint_read", "pointer_moved"), keeps=False),
    ),
    "another generation, where no fault makes one": ("I7", spared),
    "a loss, where no fault makes one": ("I11", spared),
    "survivors, where nobody was hit": ("I13", spared),
}


def invariant(number: str) -> Invariant:
    return next(one for one in INVARIANTS if one.number == number)


def verdict(number: str, history: History) -> CheckerVerdict:
    (finding,) = judge(history, (invariant(number),))
    return finding.verdict


@pytest.mark.parametrize("number", [one.number for one in INVARIANTS])
def test_a_good_history_holds(number: str) -> None:
    assert verdict(number, good()).answer is Truth.TRUE, verdict(number, good()).because


@pytest.mark.parametrize("number", [one.number for one in INVARIANTS])
def test_an_empty_history_is_never_good(number: str) -> None:
    assert verdict(number, EMPTY).answer in (Truth.UNKNOWN, Truth.FALSE)


def test_who_leaves_in_order_is_enough_to_decide_that_nobody_is_lost() -> None:
    asked = [one for one in drained("drain-node") if one.name != "member_lost"]
    left = with_events(without(good(), "fault_injected", "member_lost"), *asked)
    assert verdict("I11", left).answer is Truth.TRUE


def test_a_loss_is_no_violation_of_a_drain_while_something_else_happens() -> None:
    other = event(33, "fault_injected", "harness", number=3, fault="kill-leader", target="replica r0", lethal=False)
    over = event(36, "fault_ended", "harness", number=3)
    assert verdict("I11", with_events(good(), *drained("drain-node"), other, over)).answer is Truth.TRUE


def test_pieces_fall_back_with_one_death_where_who_had_left_is_taken_back() -> None:
    def fallen(worker: str, *lists: list[str]) -> History:
        records = [event(5 + at / 10, "committed", generation=4 + at, members=ids) for at, ids in enumerate(lists)]
        pieces = event(6, "pieces_fell_back", worker, 3 + len(lists), pieces=[1])
        return phases(with_events(good(), *records, pieces), 0.0)

    assert len({one.worker for one in good().faulty.of("member_lost", "worker_lost", "expelled")}) == 1
    left, taken_back = [B], [A]  # A leaves as planned, B dies before the others have begun without A
    assert verdict("I8", fallen(A, [A, B], left, taken_back)).answer is Truth.TRUE
    assert verdict("I8", fallen(A, [A, B], [A])).answer is Truth.FALSE, "A has never left"
    assert verdict("I8", fallen(B, [A, B], left, [A, B])).answer is Truth.FALSE, "B goes back, and has never left"
    given_up = fallen(A, [A, B, C], [B, C], [A, B])
    assert verdict("I8", given_up).answer is Truth.FALSE, "A was to leave, but C died before"
    assert verdict("I8", fallen(C, [A, C], [A], [A, C])).answer is Truth.FALSE, "C was left out of a plan only"


@pytest.mark.parametrize("what", BAD)
def test_a_violation_is_found_by_its_invariant(what: str) -> None:
    number, spoil = BAD[what]
    found = verdict(number, spoil(good()))
    assert found.answer is Truth.FALSE, found.because


def test_every_invariant_has_a_violation() -> None:
    assert {number for number, _ in BAD.values()} == {one.number for one in INVARIANTS}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_cannot_be_said_is_unknown(what: str) -> None:
    number, spoil = UNKNOWN[what]
    assert verdict(number, spoil(good())).answer is Truth.UNKNOWN


@pytest.mark.parametrize("what", NOT_APPLICABLE)
def test_what_cannot_be_asked_of_a_job_is_not_applicable(what: str) -> None:
    number, made = NOT_APPLICABLE[what]
    assert verdict(number, made(good())).answer is Truth.NOT_APPLICABLE


@pytest.mark.parametrize(
    ("number", "spoil"),
    [
        ("I8", lambda h: with_step(h, 1, samples=[[2], [3]])),
        ("I9", lambda h: with_step(h, 1, lr=[0.2])),
        ("I9", lambda h: with_step(h, 1, samples=[[2], [3]])),
        ("I11", lambda h: with_events(h, event(6, "member_lost", worker=B, because="no beat"))),
        ("I13", lambda h: with_events(h, event(2.4, "worker_exited", "agent", worker=B, because="exited with 1"))),
        ("I14", lambda h: with_events(h, event(8, "state_restored", A, 3, entry=ENTRY))),
    ],
)
def test_what_can_be_seen_to_be_wrong_is_false_also_where_the_rest_is_not_applicable(
    number: str, spoil: Callable[[History], History]
) -> None:
    bare = replace(without(spared(drawn(good())), "checkpoint_complete", "checkpoint_read"), keeps=False)
    if number in ("I8", "I9"):
        bare = drawn(good())
    assert verdict(number, bare).answer is Truth.NOT_APPLICABLE
    assert verdict(number, spoil(bare)).answer is Truth.FALSE


def test_phases_are_as_many_as_they_may_be_and_lose_no_more_updates_than_workers() -> None:
    found = phases(good(), 1.0)
    assert verdict("I5", with_steps(found, found.faulty.steps[:2])).answer is Truth.TRUE
    assert verdict("I8", found).answer is Truth.TRUE


def test_a_counterexample_names_its_lines() -> None:
    found = verdict("I7", with_step(good(), 1, scalars={"loss": 0.6}))
    assert found.at == ("steps.jsonl:1", "quiet/steps.jsonl:1")
    assert "scalars" in found.because


def test_a_checker_that_fails_says_unknown() -> None:
    def check(history: History) -> CheckerVerdict:
        raise KeyError("rank")

    (finding,) = judge(good(), (Invariant("I0", "broken", check),))
    assert finding.verdict.answer is Truth.UNKNOWN
    assert "rank" in finding.verdict.because


def test_a_worker_that_was_thawed_and_found_itself_fenced_is_fine() -> None:
    frozen = event(5.1, "fault_injected", "harness", worker=B, number=2, fault="freeze-long", lethal=False)
    history = with_events(
        good(),
        frozen,
        event(5.15, "fault_seen", "harness", number=2),
        event(6.0, "expelled", worker=B, because="no beat"),
        event(6.1, "fault_ended", "harness", number=2),
        event(6.2, "worker_exited", "agent", worker=B, because="found itself fenced"),
    )
    assert verdict("I4", history).answer is Truth.TRUE
    assert verdict("I11", history).answer is Truth.TRUE
    assert verdict("I13", history).answer is Truth.TRUE


def test_an_operation_that_a_fenced_worker_had_reported_may_be_written_down_behind_it() -> None:
    """The two lines come from two threads of the worker."""

    def fenced(op: int) -> Truth:
        told = event(5.4, "reported", B, 3, reduced=10)
        late = event(5.6, "op_complete", B, 3, op=op)
        return verdict("I4", with_events(good(), told, event(5.5, "fenced", B, 3), late)).answer

    assert [fenced(op) for op in (8, 9, 10)] == [Truth.FALSE, Truth.TRUE, Truth.FALSE]


def test_a_generation_that_was_committed_and_could_not_be_announced_may_be_adopted() -> None:
    adopted = changed(without(good(), "committed"), "etcd_put", members=[A, B, C])
    assert verdict("I4", adopted).answer is Truth.UNKNOWN, "nothing at all was committed"
    told = with_events(adopted, *(one for one in good().faulty.of("committed") if one.generation < 3))
    assert verdict("I4", told).answer is Truth.TRUE


def test_a_process_that_is_held_in_a_place_without_a_machine_is_no_false_alarm() -> None:
    held = (
        event(2.0, "fault_held", "harness", worker="n.2.9", number=1),
        event(4.9, "member_lost", worker="n.2.9", because="no beat"),
    )
    assert verdict("I11", with_events(good(), held[1])).answer is Truth.FALSE
    assert verdict("I11", with_events(good(), *held)).answer is Truth.TRUE


def test_a_node_whose_agent_stands_still_may_be_given_up_but_not_its_workers_expelled() -> None:
    frozen = (
        event(5.1, "fault_injected", "harness", target="elastic.agent", number=2, fault="freeze-agent", lethal=False),
        event(6.0, "fault_ended", "harness", number=2),
    )
    given_up = event(6.1, "member_lost", worker=B, because="node n is silent")
    assert verdict("I11", with_events(good(), *frozen, given_up)).answer is Truth.TRUE
    expelled = event(6.2, "expelled", worker=B, because="node n is silent")
    assert verdict("I11", with_events(good(), *frozen, given_up, expelled)).answer is Truth.FALSE


def test_a_script_that_hangs_is_noted_within_the_time_of_its_kind_and_explains_the_stall() -> None:
    def stalled(noted_s: float) -> History:
        return with_events(
            good(),
            event(6.1, "fault_injected", "harness", worker=B, number=2, fault="hang", lethal=True, noted_s=noted_s),
            event(56, "member_lost", worker=B, because="stuck"),
            event(58, "fault_ended", "harness", number=2),
            event(60, "steps_seen", "harness", applied=4),
            event(200, "finished", worker=A, digest="d" * 64),
        )

    late = without(stalled(20.0), "finished")
    assert verdict("I11", late).answer is Truth.FALSE
    assert verdict("I11", without(stalled(60.0), "finished")).answer is Truth.TRUE
    assert verdict("I12", stalled(60.0)).answer is Truth.TRUE


def noted_late(at_s: float) -> History:
    """C, killed at 2 s, is noted then only."""
    late = event(at_s, "member_lost", worker=C, because="killed")
    return with_events(without(good(), "member_lost", "finished"), late)


def test_each_worker_of_a_fault_in_two_parts_is_lost_since_its_own_strike() -> None:
    """D takes part when the second part comes, 7 s after the first: nothing has been noted late, and nothing early."""

    def lost(at_s: float) -> History:
        second = event(9, "fault_injected", "harness", worker=D, number=1, fault="kill-in-copy", lethal=True)
        return with_events(without(good(), "finished"), second, event(at_s, "member_lost", worker=D, because="killed"))

    assert verdict("I11", lost(9.01)).answer is Truth.TRUE
    late = verdict("I11", lost(14.5))
    assert (late.answer, "after 5.5 s" in late.because) == (Truth.FALSE, True)
    early = verdict("I11", lost(8.5))
    assert (early.answer, early.because.startswith(D)) == (Truth.FALSE, True)


def lasting(number: int, kind: str, target: str, from_s: float, to_s: float) -> tuple[Event, ...]:
    about: dict[str, Any] = {"number": number, "fault": kind, "lethal": False, "target": target}
    return (event(from_s, "fault_injected", "harness", **about), event(to_s, "fault_ended", "harness", number=number))


def test_time_in_which_the_leader_stood_still_does_not_count_for_what_it_has_to_notice() -> None:
    late = noted_late(14)
    assert verdict("I11", late).answer is Truth.FALSE
    frozen = lasting(2, "freeze-rendezvous", "elastic.rendezvous", 2.1, 8)
    assert verdict("I11", with_events(late, *frozen)).answer is Truth.TRUE
    short = lasting(2, "freeze-rendezvous", "elastic.rendezvous", 2.1, 3)
    assert verdict("I11", with_events(late, *short)).answer is Truth.FALSE


@pytest.mark.parametrize("kind", ["compact-etcd", "defragment-etcd", "revoke-leases"])
def test_what_etcd_is_asked_for_excuses_nothing(kind: str) -> None:
    asked = lasting(2, kind, "etcd", 2.1, 6)
    assert verdict("I11", with_events(noted_late(6.9), *asked)).answer is Truth.TRUE
    assert verdict("I11", with_events(noted_late(7.5), *asked)).answer is Truth.FALSE


def test_an_outage_of_etcd_excuses_its_own_time_and_a_restart() -> None:
    outage = lasting(2, "freeze-etcd", "etcd", 2.1, 12.1)
    assert verdict("I11", with_events(noted_late(19), *outage)).answer is Truth.TRUE
    assert verdict("I11", with_events(noted_late(21), *outage)).answer is Truth.FALSE
    asked = lasting(3, "compact-etcd", "etcd", 13, 20)
    assert verdict("I11", with_events(noted_late(21), *outage, *asked)).answer is Truth.FALSE
    back = event(12.2, "attending", "agent")
    assert verdict("I11", with_events(noted_late(17), *outage, back)).answer is Truth.TRUE
    assert verdict("I11", with_events(noted_late(19), *outage, back)).answer is Truth.FALSE


def test_a_rendezvous_that_was_killed_excuses_the_time_until_there_is_another() -> None:
    killed = lasting(2, "kill-rendezvous", "elastic.rendezvous", 2.1, 2.1)
    assert verdict("I11", with_events(noted_late(9.9), *killed)).answer is Truth.TRUE
    assert verdict("I11", with_events(noted_late(10.3), *killed)).answer is Truth.FALSE
    assert verdict("I11", with_events(noted_late(9.9), *killed, event(4, "attending", "agent"))).answer is Truth.FALSE


def test_outages_one_after_the_other_do_not_excuse_a_loss_for_ever() -> None:
    outages = [one for n in range(10) for one in lasting(2 + n, "freeze-etcd", "etcd", 2.1 + 4 * n, 6 + 4 * n)]
    assert verdict("I11", with_events(noted_late(21.9), *outages)).answer is Truth.TRUE
    assert verdict("I11", with_events(noted_late(22.3), *outages)).answer is Truth.FALSE


def test_time_in_which_a_fault_lasts_is_no_stall() -> None:
    long = (
        event(6.5, "fault_injected", "harness", target="etcd", number=2, fault="freeze-etcd", lethal=False),
        event(58, "fault_ended", "harness", number=2),
        event(60, "steps_seen", "harness", applied=4),
    )
    assert verdict("I12", with_events(good(), *long)).answer is Truth.TRUE


def test_a_checkpoint_that_was_too_large_to_be_read_is_not_called_whole() -> None:
    assert "2 times" in verdict("I14", good()).because
    one = changed(good(), "checkpoint_read", read=False)
    assert verdict("I14", one).answer is Truth.TRUE
    assert "1 times one that was called complete was read" in verdict("I14", one).because
    assert "1 times one was too large" in verdict("I14", one).because
    read = good().faulty.of("checkpoint_read")
    none = with_events(
        without(good(), "checkpoint_read"), *(Event({**one.line, "read": False}, one.at) for one in read)
    )
    assert verdict("I14", none).answer is Truth.UNKNOWN


def test_who_is_cut_off_from_the_others_may_be_given_up_but_not_who_is_cut_off_from_deciders_alone() -> None:
    def given_up(kind: str) -> History:
        return with_events(
            good(),
            event(5.1, "fault_injected", "harness", worker=B, number=2, fault=kind, lethal=False),
            event(6.0, "fault_ended", "harness", number=2),
            event(6.1, "member_lost", worker=B, because="node n is silent"),
        )

    assert verdict("I11", given_up("cut-pair")).answer is Truth.TRUE
    assert verdict("I11", given_up("cut-control")).answer is Truth.FALSE


def survived(kind: str = "freeze-long", ends_s: float = 6.1) -> tuple[Event, ...]:
    """By B, from 5.1 s on."""
    return (
        event(5.1, "fault_injected", "harness", worker=B, number=2, fault=kind, lethal=False),
        event(ends_s, "fault_ended", "harness", number=2),
    )


@pytest.mark.parametrize(
    ("at_s", "fault", "fine"),
    [
        (6.0, survived(), True),
        (50.0, survived(), False),
        (6.0, survived("freeze-short", 5.4), False),
        (6.0, survived("slow", 13.1), False),
    ],
)
def test_a_fault_that_a_member_has_survived_explains_what_follows_soon_and_only_if_it_may_be_taken_for_dead(
    at_s: float, fault: tuple[Event, ...], fine: bool
) -> None:
    history = with_events(without(good(), "finished", "worker_exited"), *fault)
    expected = Truth.TRUE if fine else Truth.FALSE
    ended = event(at_s, "worker_exited", "agent", worker=B, because="killed by SIGSEGV")
    assert verdict("I13", with_events(history, ended)).answer is expected
    assert verdict("I11", with_events(history, event(at_s, "expelled", worker=B))).answer is expected


def test_who_was_lost_to_a_fault_may_end_whenever_its_agent_gets_to_it() -> None:
    history = with_events(without(good(), "finished", "worker_exited"), *survived())
    late = event(90.0, "worker_exited", "agent", worker=B, because="found itself fenced")
    assert verdict("I13", with_events(history, event(6.0, "expelled", worker=B), late)).answer is Truth.TRUE


def test_a_loss_of_before_is_no_sign_that_a_later_strike_was_noted() -> None:
    before = (
        event(2.2, "fault_injected", "harness", target="elastic.agent", number=2, fault="freeze-agent", lethal=False),
        event(2.4, "worker_lost", worker=B, because="node n is silent"),
        event(2.5, "fault_ended", "harness", number=2),
    )
    again = event(2.6, "committed", generation=2, kind="planned", members=[A, B])
    killed = event(3.5, "fault_injected", "harness", worker=B, number=3, fault="kill", lethal=True)
    history = with_events(without(good(), "finished", worker=B), *before, killed)
    assert verdict("I11", history).answer is Truth.TRUE, "who is lost is not lost once more"
    found = verdict("I11", with_events(history, again))
    assert found.answer is Truth.FALSE and "kill was noted" in found.because


def test_who_is_cut_off_from_everybody_has_to_be_expelled_in_time() -> None:
    cut = (
        event(5.1, "fault_injected", "harness", worker=B, number=2, fault="cut-node", lethal=False),
        event(17.1, "fault_ended", "harness", number=2),
    )
    alive = with_events(without(good(), "finished"), *cut)
    assert verdict("I11", alive).answer is Truth.FALSE
    assert verdict("I11", with_events(alive, event(9.0, "member_lost", worker=B))).answer is Truth.TRUE


ENTRY = "step-000000000002.0.g2-c105d2d3"


def test_a_checkpoint_that_the_harness_has_damaged_is_found_damaged_and_not_gone_on_from() -> None:
    damaged = changed(good(), "checkpoint_read", problem="")
    read = event(9.8, "checkpoint_read", "harness", place="disk", entry=ENTRY, at="the end", problem="is damaged")
    spoiled = event(6.0, "fault_injected", "harness", worker=B, number=2, fault="corrupt-checkpoint", spoiled=ENTRY)
    assert verdict("I14", with_events(damaged, read)).answer is Truth.FALSE
    assert verdict("I14", with_events(damaged, spoiled, read)).answer is Truth.TRUE
    torn = event(5.0, "checkpoint_read", "harness", place="disk", entry=ENTRY, at="completion", problem="is damaged")
    assert verdict("I14", with_events(damaged, spoiled, torn)).answer is Truth.FALSE, "before it was damaged"
    gone_on = event(7.0, "state_restored", D, 4, entry=ENTRY, step=2)
    assert verdict("I14", with_events(damaged, gone_on)).answer is Truth.TRUE
    assert verdict("I14", with_events(damaged, spoiled, gone_on)).answer is Truth.FALSE


def test_a_script_that_has_loaded_what_the_quiet_run_left_is_named() -> None:
    later = tuple(replace(step, line={**step.line, "epoch": 4}) for step in good().faulty.steps[:2])
    found = verdict("I5", with_steps(good(), later))
    assert found.answer is Truth.FALSE and "began in epoch 4, and in the quiet run in epoch 0" in found.because


def half(history: History, number: int = 2) -> History:
    """With a fault in two parts, of which the first was done to C at 2 s, as fault 1, or as another one."""
    told = event(3.0, "fault_incomplete", "harness", number=number, because="nobody came to copy-is-sent")
    if number == 1:
        return with_events(changed(history, "fault_injected", fault="kill-in-copy"), told)
    strike = event(2.005, "fault_injected", "harness", worker=C, number=number, fault="kill-in-copy", lethal=True)
    ends = [event(3.1, name, "harness", number=number, because="") for name in ("fault_seen", "fault_ended")]
    return with_events(history, strike, told, *ends)


def test_a_fault_whose_second_part_never_came_is_not_counted() -> None:
    found = verdict("I16", half(good()))
    assert found.answer is Truth.TRUE
    assert found.because == "1 faults of 1 kinds, each of them seen; 0 skipped; 1 incomplete: 2 kill-in-copy"
    assert every_kind_came(good().faulty) and not every_kind_came(half(good()).faulty)
    none = verdict("I16", half(good(), 1))
    assert none.answer is Truth.FALSE
    assert none.because == "no fault was injected: 1 skipped, the first because nobody came to copy-is-sent"


def test_what_the_first_part_of_an_incomplete_fault_did_explains_the_loss() -> None:
    for number in ("I11", "I13"):
        assert verdict(number, half(good(), 1)).answer is Truth.TRUE
