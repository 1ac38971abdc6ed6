"""What all workers of a round decide from the same reports, and what a script finds in its environment."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.frontends.restart.rounds import (
    LACKING_S,
    AllDone,
    AwaitNodes,
    AwaitRoom,
    Blame,
    CopyThin,
    GoOn,
    Hang,
    HashKept,
    LookAtKept,
    RoundState,
    ScriptReport,
    ScriptState,
    StartScript,
    decide,
    is_settled,
    safe_step,
)
from runtime.frontends.restart.script_failure import Failure
from runtime.recovery.kept.choice import HeldSegment, KeptStep, KnownStep, RoundNumber, ThinPart
from runtime.recovery.kept.digest import combined
from runtime.recovery.kept.step_log import LoggedStep

MEMBERS = ("a.0.0", "a.1.0", "b.0.3")
STORE = ("10.0.0.1", 4000)
THIRD = RoundNumber(0, 3)
WAITING, RUNNING, DONE, FAILED = ScriptState.WAITING, ScriptState.RUNNING, ScriptState.DONE, ScriptState.FAILED
EARLY, LATE, KILLED, ABORTED = Failure(1, 10.0), Failure(1, 11.0), Failure(-9, 12.0), Failure(-6, 11.5)
CRASHED = Failure(-11, 11.5)
EXPIRED = Failure(-9, 12.0, message="the timer expired")


HANG_S = 30.0


def test_a_script_that_is_idle_is_said_to_be_so() -> None:
    said = [ScriptReport(4, 3, RUNNING, idle_s=idle_s).said(300.0) for idle_s in (0.0, 9.9, 40.4)]
    assert said == ["script running", "script running", "script running, idle for 40 s of 300 s"]
    assert ScriptReport(4, 3, DONE).said(300.0) == "script done"
    assert ScriptReport(4, 3, RUNNING).said(300.0, "step 7 kept") == "script running, step 7 kept"
    assert ScriptReport(4, 3, RUNNING).said(300.0, ranks=(2,)) == "script with rank 2 running"
    assert (
        ScriptReport(4, 3, RUNNING).said(300.0, "step 7 kept", (2, 3)) == "script with ranks 2, 3 running, step 7 kept"
    )


def reports(
    *states: ScriptState,
    store: bool = True,
    generation: int = 4,
    idle: tuple[float, ...] = (0.0, 0.0, 0.0),
    held: tuple[tuple[HeldSegment, ...] | None, ...] = ((), (), ()),
    copied: bool = False,
    lacking_s: float = 0.0,
    known: KnownStep | None = None,
    **failures: Failure,
) -> dict[str, ScriptReport]:
    """failures: of the members whose rank is in the name, r0 to r2. idle: seconds, of each rank. held: segments."""
    found = {}
    for rank, (worker, state) in enumerate(zip(MEMBERS, states, strict=False)):
        place = STORE if store and rank == 0 else None
        found[worker] = ScriptReport(generation, 3, state, place, failures.get(f"r{rank}"), idle[rank], held[rank])
        first = rank == 0  # what one of them knows
        found[worker] = replace(found[worker], copied=copied, known=known if first else None)
        found[worker] = replace(found[worker], lacking_s=lacking_s if first else 0.0)
    return found


DIGESTS: tuple[dict[str, str], ...] = ({"a": "01"}, {"b": "02"}, {})
"""Of three workers; there are two tensors."""


def kept(
    said: dict[str, ScriptReport], step: int, hashed: int = 0, digests: tuple[dict[str, str], ...] = ()
) -> dict[str, ScriptReport]:
    """The same with a newest step. hashed: so many workers have tried to digest it. digests: and what they have."""
    return {
        worker: replace(
            report,
            kept=step,
            hashed=number < hashed,
            digests=digests[number] if number < len(digests) else None,
        )
        for number, (worker, report) in enumerate(said.items())
    }


def part(step: int, number: int) -> HeldSegment:
    """One of three parts of that step, kept in the round before."""
    return HeldSegment(step, THIRD, 0, number, 3)


def start(source: KeptStep | None, held: tuple[tuple[HeldSegment, ...], ...], *thin: ThinPart) -> StartScript:
    return StartScript(STORE, source, dict(zip(MEMBERS, held, strict=True)), thin)


WHOLE = ((part(8, 0), part(7, 0)), (part(8, 1), part(7, 1)), (part(7, 2),))


SEVENTH = KeptStep(7, THIRD, 0)
THIN = (
    ThinPart(part(7, 0), "a.0.0", ("b.0.3",)),
    ThinPart(part(7, 1), "a.1.0", ("b.0.3",)),
    ThinPart(part(7, 2), "b.0.3", ("a.0.0",)),
)
TWICE = ((part(7, 0), part(7, 2)), (part(7, 1),), (part(7, 2), part(7, 1), part(7, 0)))
"""Each part is on both nodes."""


@pytest.mark.parametrize(
    ("said", "failing", "wanted"),
    [
        (reports(WAITING, WAITING, WAITING), False, start(None, ((), (), ()))),
        (reports(WAITING, WAITING, WAITING, store=False), False, GoOn()),
        (reports(WAITING, WAITING, WAITING, held=((), None, ())), False, LookAtKept()),
        (reports(WAITING, WAITING, WAITING, store=False, held=(None, None, None)), False, GoOn()),
        (reports(WAITING, RUNNING, WAITING, held=(None, None, None)), False, GoOn()),
        (reports(WAITING, WAITING, WAITING, held=WHOLE), False, CopyThin(THIN)),
        (reports(WAITING, WAITING, WAITING, held=WHOLE, copied=True), False, start(SEVENTH, WHOLE, *THIN)),
        (reports(WAITING, WAITING, WAITING, held=TWICE), False, start(SEVENTH, TWICE)),
        (
            reports(WAITING, WAITING, WAITING, held=((), *WHOLE[1:]), lacking_s=31.0),
            False,
            start(None, ((), *WHOLE[1:])),
        ),
        (reports(WAITING, WAITING, WAITING, held=((), *WHOLE[1:])), False, AwaitNodes(KnownStep(THIRD, 7, ()))),
        (
            reports(WAITING, WAITING, WAITING, held=WHOLE, known=KnownStep(THIRD, 10, ("a", "b", "c"))),
            False,
            AwaitNodes(KnownStep(THIRD, 10, ("c",))),
        ),
        (
            reports(WAITING, WAITING, WAITING, held=((), *WHOLE[1:]), known=KnownStep(THIRD, 6, ("a", "c"))),
            False,
            AwaitNodes(KnownStep(THIRD, 6, ("c",))),
        ),
        (
            reports(WAITING, WAITING, WAITING, held=TWICE, known=KnownStep(THIRD, 7, ("c",))),
            False,
            start(SEVENTH, TWICE),
        ),
        (
            reports(WAITING, WAITING, WAITING, held=TWICE, known=KnownStep(THIRD, 99, ("a",))),
            False,
            start(SEVENTH, TWICE),
        ),
        (reports(WAITING, WAITING), False, GoOn()),
        (reports(WAITING, WAITING, WAITING, generation=3), False, GoOn()),
        (reports(WAITING, RUNNING, WAITING), False, GoOn()),
        (reports(RUNNING, RUNNING, RUNNING), False, GoOn()),
        (reports(DONE, RUNNING, DONE), False, GoOn()),
        (reports(DONE, DONE, DONE), False, AllDone()),
        (
            kept(reports(DONE, DONE, DONE, held=WHOLE), 7),
            False,
            HashKept(SEVENTH, dict(zip(MEMBERS, WHOLE, strict=True))),
        ),
        (kept(reports(DONE, DONE, RUNNING, held=WHOLE), 7), False, GoOn()),
        (kept(reports(DONE, DONE, DONE), 7), False, HashKept(None, dict.fromkeys(MEMBERS, ()))),
        (kept(reports(DONE, DONE, DONE), 7, hashed=2), False, HashKept(None, dict.fromkeys(MEMBERS, ()))),
        (kept(reports(DONE, DONE, DONE), 7, hashed=3), False, AllDone()),
        (kept(reports(DONE, DONE, DONE), 7, hashed=3, digests=DIGESTS), False, AllDone(combined(DIGESTS))),
        (kept(reports(DONE, DONE, DONE), 7, hashed=3, digests=DIGESTS[:2]), False, AllDone()),
        (reports(RUNNING, FAILED, RUNNING, r1=LATE), False, GoOn(failing=True)),
        (reports(RUNNING, FAILED, RUNNING, r1=LATE), True, Blame("a.1.0", LATE)),
        (reports(FAILED, FAILED, FAILED, r0=LATE, r1=LATE, r2=EARLY), True, Blame("b.0.3", EARLY)),
        (reports(FAILED, FAILED, FAILED, r0=EARLY, r1=KILLED, r2=LATE), True, Blame("a.1.0", KILLED)),
        (reports(RUNNING, FAILED, RUNNING, r1=KILLED), False, Blame("a.1.0", KILLED)),
        (reports(FAILED, FAILED, RUNNING, r0=EARLY, r1=KILLED), False, Blame("a.1.0", KILLED)),
        (reports(FAILED, FAILED, RUNNING, r0=ABORTED, r1=KILLED), False, Blame("a.1.0", KILLED)),
        (reports(RUNNING, FAILED, RUNNING, r1=ABORTED), False, GoOn(failing=True)),
        (reports(FAILED, FAILED, RUNNING, r0=ABORTED, r1=EARLY), True, Blame("a.1.0", EARLY)),
        (reports(FAILED, FAILED, RUNNING, r0=ABORTED, r1=Failure(1, 11.45)), True, Blame("a.0.0", ABORTED)),
        (reports(FAILED, FAILED, RUNNING, r0=CRASHED, r1=EARLY), True, Blame("a.0.0", CRASHED)),
        (reports(RUNNING, FAILED, RUNNING, r1=EXPIRED), False, GoOn(failing=True)),
        (reports(DONE, FAILED, DONE, r1=EARLY), True, Blame("a.1.0", EARLY)),
        (reports(FAILED, FAILED, DONE, r0=EARLY, r1=EARLY), True, Blame("a.0.0", EARLY)),
        (reports(RUNNING, RUNNING, RUNNING, idle=(30.0, 29.9, 40.0)), False, GoOn()),
        (reports(RUNNING, RUNNING, RUNNING, idle=(31.0, 30.0, 40.0)), False, Hang("a.0.0", MEMBERS, 30.0)),
        (reports(DONE, RUNNING, RUNNING, idle=(0.0, 35.0, 33.0)), False, Hang("a.1.0", MEMBERS[1:], 33.0)),
        (reports(DONE, DONE, DONE, idle=(99.0, 99.0, 99.0)), False, AllDone()),
        (reports(WAITING, RUNNING, RUNNING, idle=(0.0, 99.0, 99.0)), False, GoOn()),
        (reports(RUNNING, RUNNING, idle=(99.0, 99.0, 0.0)), False, GoOn()),
        (reports(RUNNING, RUNNING, RUNNING, generation=3, idle=(99.0, 99.0, 99.0)), False, GoOn()),
        (reports(RUNNING, FAILED, RUNNING, r1=LATE, idle=(99.0, 0.0, 99.0)), False, GoOn(failing=True)),
    ],
)
def test_decisions(said: dict[str, ScriptReport], failing: bool, wanted: object) -> None:
    assert decide(said, MEMBERS, 4, failing=failing, hang_s=HANG_S) == wanted


@pytest.mark.parametrize(
    ("members", "kept", "generation", "wanted"),
    [
        (MEMBERS, (10, 10, 11), 4, True),
        (MEMBERS, (9, 10, 11), 4, True),
        (MEMBERS, (8, 10, 11), 4, False),
        (MEMBERS, (10, 10, 11), 5, False),
        (("a.0.0", "a.1.0", "a.2.0"), (9, 10, 9), 4, True),
        (("a.0.0", "a.1.0", "a.2.0"), (8, 9, 9), 4, False),
        (("a.0.0", "a.1.0", "a.2.0"), (8, -1, 8), 4, False),
        (MEMBERS[:2], (9, 9), 4, True),
    ],
)
def test_earlier_rounds_are_needed_until_each_part_is_kept_and_mirrored(
    members: tuple[str, ...], kept: tuple[int, ...], generation: int, wanted: bool
) -> None:
    """The round has begun with step 7."""
    said = {
        worker: ScriptReport(4, len(members), RUNNING, kept=step, before=max(-1, step - 1))
        for worker, step in zip(members, kept, strict=True)
    }
    assert is_settled(said, members, generation, 7) == wanted
    rare = {worker: replace(one, before=-1) for worker, one in said.items()}
    assert not is_settled(rare, members, generation, 7), "one step is kept, as with every=10"
    assert not is_settled(dict(list(said.items())[1:]), members, generation, 7)


@pytest.mark.parametrize(
    ("members", "steps", "generation", "wanted"),
    [
        (MEMBERS, (10, 10, 11), 4, 9),
        (MEMBERS[:2], (10, 11), 4, 10),
        (MEMBERS, (10, 10, 11), 5, -1),
        (MEMBERS, (10, 10), 4, -1),
        (MEMBERS[:2], (10, -1), 4, -1),
    ],
)
def test_no_round_goes_back_before_what_all_have_kept_and_mirrored(
    members: tuple[str, ...], steps: tuple[int, ...], generation: int, wanted: int
) -> None:
    said = {
        worker: ScriptReport(4, len(members), RUNNING, kept=step, before=max(-1, step - 1))
        for worker, step in zip(members, steps, strict=False)
    }
    assert safe_step(said, members, generation) == wanted


def test_a_step_counts_only_where_all_scripts_have_kept_it() -> None:
    """One has changed its weights while it kept its first step, which the other one has kept."""
    said = [
        ScriptReport(4, 2, RUNNING, kept=10, before=1, first=1),
        ScriptReport(4, 2, RUNNING, kept=20, before=10, first=10),
    ]
    for members in (("a.0.0", "b.0.0"), ("a.0.0", "a.1.0")):
        reports = dict(zip(members, said, strict=True))
        several = members[1] == "b.0.0"
        assert safe_step(reports, members, 4) == (-1 if several else 10)
        assert not is_settled(reports, members, 4, 0)
        reports[members[0]] = replace(said[0], kept=20, before=10)
        assert safe_step(reports, members, 4) == (10 if several else 20)
        assert is_settled(reports, members, 4, 0)


def test_a_step_that_is_kept_after_another_tells_that_the_other_one_is_mirrored() -> None:
    state = RoundState()
    state.enter(4, 3)
    found = []
    for step in (-1, 10, 10, 20, 40):
        state.keeps(step)
        found.append((state.kept, state.before))
    assert found == [(-1, -1), (10, -1), (10, -1), (20, 10), (40, 20)]
    said = {worker: state.report(None) for worker in MEMBERS}
    assert safe_step(said, MEMBERS, 4) == 20
    near = {worker: replace(said[worker], world=2) for worker in MEMBERS[:2]}
    assert safe_step(near, MEMBERS[:2], 4) == 40, "on one machine"
    state.enter(5, 2)
    assert (state.kept, state.before) == (-1, -1)


def test_survivors_do_not_take_what_they_alone_have_kept_for_the_whole() -> None:
    """Two machines are lost in an exchange: it has the report of the third worker alone, which was made before."""
    number, state = RoundNumber(0, 4), RoundState()
    state.enter(4, 3)
    state.script = RUNNING
    said = {worker: ScriptReport(4, 3, RUNNING, kept=8, before=7, first=1) for worker in MEMBERS}
    state.learn(said, MEMBERS, number)
    assert state.known == KnownStep(number, 7, ("a", "b"))
    state.learn({"b.0.3": said["b.0.3"]}, ("b.0.3",), number)
    assert state.known == KnownStep(number, 7, ("a", "b")), "the memory of the others is waited for"


def test_scripts_keep_nothing_if_one_machine_has_no_directory_in_memory() -> None:
    """All load the same, or nothing."""
    said = reports(WAITING, WAITING, WAITING, held=WHOLE)
    said["b.0.3"] = replace(said["b.0.3"], memory=False, held=())
    found = decide(said, MEMBERS, 4, failing=False)
    assert found == StartScript(STORE, without=("b.0.3",)) and not found.incomplete
    state = RoundState(memory=False)
    state.enter(4, 3)
    assert not state.report(None).memory, "it stays so in each round"


def test_a_machine_whose_memory_is_full_for_a_moment_is_waited_for() -> None:
    said = reports(WAITING, WAITING, WAITING, held=WHOLE)
    said["b.0.3"] = full = replace(said["b.0.3"], memory=None)
    assert decide(said, MEMBERS, 4, failing=False) == AwaitRoom(("b.0.3",))
    said["b.0.3"] = replace(full, lacking_s=1.0)
    assert decide(said, MEMBERS, 4, failing=False) == AwaitRoom(("b.0.3",))
    said["b.0.3"] = replace(full, memory=True)
    found = decide(said, MEMBERS, 4, failing=False)
    assert isinstance(found, CopyThin), "it goes on from what was kept"
    said["b.0.3"] = ScriptReport.from_json(json.loads(json.dumps(replace(full, lacking_s=LACKING_S).to_json())))
    assert decide(said, MEMBERS, 4, failing=False) == StartScript(STORE, without=("b.0.3",))
    said["b.0.3"] = full
    said["a.1.0"] = replace(said["a.1.0"], memory=False)
    found = decide(said, MEMBERS, 4, failing=False)
    assert isinstance(found, StartScript), "a machine without the directory never has room"
    said = reports(WAITING, WAITING, WAITING, held=((), (), ()))
    said["b.0.3"] = replace(said["b.0.3"], memory=None)
    assert isinstance(decide(said, MEMBERS, 4, failing=False), StartScript), "nothing is kept that could be void"


def off(said: dict[str, ScriptReport], number: RoundNumber) -> dict[str, ScriptReport]:
    """The same where a worker knows of a round in which a script kept nothing any more."""
    return {**said, "b.0.3": replace(said["b.0.3"], off=number)}


def test_what_a_script_has_gone_on_from_without_keeping_it_is_loaded_nowhere() -> None:
    """Its machine alone has the word, or had it; the others have all parts of what was kept before."""
    fourth = RoundNumber(0, 4)
    newer = tuple(tuple(replace(one, round=fourth) for one in held) for held in TWICE)
    away = KnownStep(THIRD, 10, ("a", "c"))
    old = reports(WAITING, WAITING, WAITING, held=TWICE, known=away)
    assert decide(off(old, fourth), MEMBERS, 4, failing=False) == start(None, ((), (), ())), "nobody is waited for"
    assert decide(off(old, THIRD), MEMBERS, 4, failing=False) == start(SEVENTH, TWICE), "it is as new as that round"
    rest = reports(WAITING, WAITING, WAITING, held=((part(9, 0), part(8, 0), *TWICE[0]), *TWICE[1:]), known=away)
    assert isinstance(decide(off(rest, THIRD), MEMBERS, 4, failing=False), StartScript), "the lacking parts are nowhere"
    both = reports(WAITING, WAITING, WAITING, held=tuple((*a, *b) for a, b in zip(TWICE, newer, strict=True)))
    assert decide(off(both, fourth), MEMBERS, 4, failing=False) == start(KeptStep(7, fourth, 0), newer)


def test_all_workers_know_for_good_in_which_round_a_script_kept_nothing() -> None:
    state, said = RoundState(), reports(RUNNING, RUNNING, RUNNING)
    state.enter(4, 3)
    state.learn(off(said, RoundNumber(0, 4)), MEMBERS, RoundNumber(0, 4))
    state.learn(said, MEMBERS, RoundNumber(0, 4))
    state.enter(5, 2)
    assert state.report(None).off == RoundNumber(0, 4)


def test_a_hang_is_of_the_same_slot_each_time() -> None:
    """A slot counts its own failures, and a replacement has the highest rank."""
    members = ("a.1.0", "b.0.0", "a.0.7")
    stuck = {worker: ScriptReport(9, 3, RUNNING, idle_s=HANG_S) for worker in members}
    found = decide(stuck, members, 9, failing=False, hang_s=HANG_S)
    assert isinstance(found, Hang) and found.worker == "a.0.7"
    assert found.said == "no script used a processor for 30 s: a.1.0, b.0.0, a.0.7"


def test_that_all_scripts_have_ended_is_known_also_when_a_member_is_lost_just_then() -> None:
    """One survivor decides before it hears of the next generation, and another one after it; both leave."""
    done = reports(DONE, DONE, DONE)
    assert decide(done, MEMBERS[:2], 5, failing=False) == AllDone()
    del done[MEMBERS[2]]
    assert decide(done, MEMBERS[:2], 5, failing=False) == GoOn(), "the lost one had not said that its script had ended"


def test_a_worker_begins_each_round_anew() -> None:
    state = RoundState()
    state.enter(4, 3)
    assert state.report(STORE, 7.0) == ScriptReport(4, 3, WAITING, STORE)
    assert state.report(STORE).held is None, "it has not looked yet"
    state.held = (part(7, 0),)
    assert state.report(STORE).held == (part(7, 0),)
    state.script = RUNNING
    assert state.report(None, 7.0).idle_s == 7.0
    assert state.report(None, 7.0).held is None, "what is kept changes now"
    state.ended(EARLY)
    assert state.report(None, 7.0) == ScriptReport(4, 3, FAILED, None, EARLY)
    failed = reports(FAILED, RUNNING, RUNNING, r0=EARLY)
    assert state.decide(failed, MEMBERS, 4, HANG_S) == GoOn(failing=True)
    assert not state.over
    assert state.decide(failed, MEMBERS, 4, HANG_S) == Blame(MEMBERS[0], EARLY)
    assert state.over
    state.decide(failed, MEMBERS, 4, HANG_S)
    state.enter(5, 2)
    assert state == RoundState(5, 2)


def test_of_several_processes_the_first_failure_counts() -> None:
    """One is killed, and another one raises earlier by the clock, because of it."""
    state = RoundState()
    state.enter(4, 3)
    state.script = RUNNING
    state.ended(None, last=False)
    assert state.script is RUNNING
    state.ended(LATE, last=False)
    state.ended(EARLY, last=False)
    assert state.report(None).failure == EARLY
    state.ended(KILLED, last=False)
    state.ended(None)
    assert state.report(None) == ScriptReport(4, 3, FAILED, None, KILLED)


def test_reports_survive_the_wire() -> None:
    for report in (
        ScriptReport(4, 3, FAILED, None, KILLED),
        ScriptReport(0, 0, WAITING, STORE, idle_s=1.5),
        ScriptReport(4, 3, WAITING, held=WHOLE[0]),
        ScriptReport(4, 3, RUNNING, logged=(LoggedStep(RoundNumber(0, 3), 7, 1, 3, (0.1,), {"loss": (1.5, -0.0)}),)),
        ScriptReport(4, 3, DONE, held=WHOLE[0], hashed=True, digests=DIGESTS[0]),
        ScriptReport(4, 3, RUNNING, off=THIRD),
    ):
        assert ScriptReport.from_json(json.loads(json.dumps(report.to_json()))) == report
    older = {name: value for name, value in ScriptReport(4, 3, RUNNING).to_json().items() if name != "off"}
    assert ScriptReport.from_json(older) == ScriptReport(4, 3, RUNNING), "of a worker that is to be upgraded"


def test_what_record_has_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    stack = 'Traceback\n  File "train.py", line 3, in main\n    f()\n  File "model.py", line 9, in f\n    x\n'
    said = {"message": "ValueError: no", "extraInfo": {"py_callstack": stack, "timestamp": "17"}}
    file.write_text(json.dumps({"message": said}))
    os.utime(file, (17.5, 17.5))
    found = Failure.read(1, 99.0, file)
    assert found == Failure(1, 17.5, "model.py:9", "ValueError: no")
    assert found.said == "the script ended with exit status 1: ValueError: no"


@pytest.mark.parametrize("text", ["{", "{}", '{"message": "killed"}', '{"message": {"extraInfo": 3}}'])
def test_a_damaged_error_file_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "error.json"
    file.write_text(text)
    assert Failure.read(1, 99.0, file) == Failure(1, 99.0, message=f"{file} cannot be read")
    file.unlink()
    killed = Failure.read(-11, 99.0, file)
    assert killed.said == "the script ended with signal 11" and killed.is_from_outside
    assert not Failure(-9, 99.0, message="its timer expired").is_from_outside and not EARLY.is_from_outside


def test_what_a_worker_knows_goes_before_what_a_machine_remembers() -> None:
    said = reports(WAITING, WAITING, WAITING, held=TWICE, known=KnownStep(THIRD, 10, ("a", "c")))
    remembered = replace(said["a.1.0"], known=KnownStep(RoundNumber(0, 5), 9, ()))
    found = decide({**said, "a.1.0": remembered}, MEMBERS, 4, failing=False)
    assert found == AwaitNodes(KnownStep(THIRD, 10, ("c",)))
