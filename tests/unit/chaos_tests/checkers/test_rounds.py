"""The invariants of a job in rounds hold of a good history, and each is violated by a bad one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from chaos_tests.checkers import ROUNDS_INVARIANTS, Truth, judge
from chaos_tests.checkers.history import History, Run
from tests.unit.histories import RESULT, A, B, C, D, changed, event, record, with_events, with_result, without


def good() -> History:
    """Three workers; the script of C is killed at 2 s, its replacement D joins at 5 s, and all end at 9 s."""
    members = {1: [A, B, C], 2: [A, B], 3: [A, B, D]}
    events = [
        *record(1.0, 1, "form", members[1]),
        event(2.0, "fault_injected", "harness", worker=C, number=1, fault="kill-script", lethal=True, script=7),
        event(2.1, "script_ended", C, 1, status=-9, script=7),
        event(2.2, "script_killed", C, 1, signal=9),
        event(2.21, "worker_dying", "agent", worker=C, because="killed by SIGKILL"),
        event(2.22, "fault_seen", "harness", number=1, because="killed by SIGKILL"),
        event(2.22, "fault_ended", "harness", number=1),
        event(2.23, "member_lost", worker=C, because="killed by SIGKILL"),
        *record(2.3, 2, "loss", members[2]),
        *(event(2.4, "script_ended", worker, 1, status=-15, script=7) for worker in (A, B)),
        event(2.5, "worker_exited", "agent", worker=C, because="killed by SIGKILL"),
        *record(5.0, 3, "planned", members[3]),
        *(event(5.1, "script_ended", worker, 2, status=0, script=8) for worker in (A, B)),
        *(event(8.0, "script_ended", worker, 3, status=0, script=9) for worker in (A, B, D)),
        *(event(9.0, "finished", worker=worker, digest="") for worker in (A, B, D)),
        *(event(9.5, "worker_exited", "agent", worker=worker, because="exited with 0") for worker in (A, B, D)),
        event(2.55, "kept_found", A, 2, step=4, kept_in="0.1"),
        event(5.25, "kept_found", A, 3, step=7, kept_in="0.2"),
        event(10.0, "left_behind", "harness", left=[]),
    ]
    for number, at_s in ((1, 1.5), (2, 2.6), (3, 5.3)):
        events += [
            event(
                at_s + rank / 100,
                "script_started",
                worker,
                number,
                rank=rank,
                world=len(members[number]),
                script=6 + number,
            )
            for rank, worker in enumerate(members[number])
        ]
    run = Run(tuple(sorted(events, key=lambda one: one.t_ns)), (), RESULT)
    return History(run, Run((), (), RESULT), keeps=False, rounds=True)


BAD: dict[str, tuple[str, Callable[[History], History]]] = {
    "a script has another rank than its worker": ("I17", lambda h: changed(h, "script_started", 2, A, rank=1)),
    "a script has another world": ("I17", lambda h: changed(h, "script_started", 3, B, world=2)),
    "a script is started twice in a round": (
        "I17",
        lambda h: with_events(h, event(6, "script_started", A, 3, rank=0, world=3, script=11)),
    ),
    "a script belongs to no generation": (
        "I17",
        lambda h: with_events(h, event(6, "script_started", A, 4, rank=0, world=3, script=11)),
    ),
    "a script of the round before still runs": ("I18", lambda h: without(h, "script_ended", worker=B)),
    "a child outlives its script": (
        "I18",
        lambda h: with_events(h, event(8, "script_outlived", "harness", worker=C, script=12, because="sleep 3600")),
    ),
    "the job did not end": ("I19", lambda h: replace(h, faulty=replace(h.faulty, result=None))),
    "the job failed": ("I19", lambda h: with_result(h, exit_code=1, because="the script raised")),
    "the next round comes late": ("I19", lambda h: replace(h, limits=replace(h.limits, step_s=0.1))),
    "a round begins further back than the one before": ("I20", lambda h: changed(h, "kept_found", 3, A, step=3)),
    "a round begins anew": ("I20", lambda h: changed(h, "kept_found", 3, A, event="kept_incomplete")),
    "a worker has to go to whom nothing was done": (
        "I13",
        lambda h: with_events(h, event(6, "worker_exited", "agent", worker=A, because="killed by SIGKILL")),
    ),
    "a script was killed, and nobody noticed": ("I11", lambda h: without(h, "member_lost")),
}


def shared(homes: tuple[str, ...]) -> History:
    """A round of a script with four ranks, and the worker that starts each of them."""
    events = [*record(1.0, 1, "form", [A, B, C])]
    events += [
        event(1.5, "script_started", worker, 1, rank=rank, world=4, script=rank) for rank, worker in enumerate(homes)
    ]
    run = Run(tuple(events), (), RESULT)
    return History(run, run, keeps=False, rounds=True, ranks=4)


def answers(history: History) -> dict[str, tuple[Truth, str]]:
    return {one.invariant.number: (one.verdict.answer, one.verdict.because) for one in judge(history)}


def test_a_good_history_holds() -> None:
    found = answers(good())
    assert list(found) == [one.number for one in ROUNDS_INVARIANTS]
    assert {answer for answer, _ in found.values()} == {Truth.TRUE}, found


def killed_as_its_round_ends() -> History:
    """The script of C is killed just when the round ends because D has come."""
    members = {1: [A, B, C], 2: [A, B, C, D]}
    events = [
        *record(1.0, 1, "form", members[1]),
        *(event(1.5, "script_started", worker, 1, rank=n, world=3, script=7) for n, worker in enumerate(members[1])),
        *record(2.0, 2, "planned", members[2]),
        event(2.01, "fault_injected", "harness", worker=C, number=1, fault="kill-script", lethal=True, script=7),
        *(event(2.02, "script_ended", worker, 1, status=-9, script=7) for worker in members[1]),
        event(9.0, "finished", worker=A, digest=""),
    ]
    run = Run(tuple(events), (), RESULT)
    return History(run, run, keeps=False, rounds=True)


def test_a_script_that_is_killed_as_its_round_ends_is_noted_by_its_end() -> None:
    assert answers(killed_as_its_round_ends())["I11"][0] is Truth.TRUE
    for spoiled in (
        without(killed_as_its_round_ends(), "script_ended"),
        changed(killed_as_its_round_ends(), "committed", 2, members=[A, B, D]),
        changed(killed_as_its_round_ends(), "committed", 2, kind="loss"),
    ):
        assert answers(spoiled)["I11"][0] is Truth.FALSE


@pytest.mark.parametrize("name", BAD)
def test_a_bad_history_is_found(name: str) -> None:
    number, spoil = BAD[name]
    found = answers(spoil(good()))
    assert found[number][0] is Truth.FALSE, found


@pytest.mark.parametrize(
    ("homes", "answer"), [((A, A, B, C), Truth.TRUE), ((A, A, B, B), Truth.FALSE), ((A, B, C, D), Truth.FALSE)]
)
def test_workers_share_the_ranks_of_a_script(homes: tuple[str, ...], answer: Truth) -> None:
    assert answers(shared(homes))["I17"][0] is answer


def test_a_fault_that_takes_memory_excuses_a_round_that_begins_anew() -> None:
    bad = changed(good(), "kept_found", 3, A, event="kept_incomplete")
    taken = event(3.0, "fault_injected", "harness", number=2, fault="lose-node-and-partner", target="x")
    assert answers(with_events(bad, taken))["I20"][0] is Truth.TRUE


def test_nothing_is_said_of_a_job_that_never_began_a_round() -> None:
    found = answers(without(good(), "script_started"))
    assert (found["I17"][0], found["I19"][0]) == (Truth.UNKNOWN, Truth.UNKNOWN)
