"""What all workers of a round decide from the same reports, and what a script finds in its environment."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from runtime.restart.rounds import (
    AllDone,
    Blame,
    Failure,
    GoOn,
    ScriptReport,
    ScriptState,
    StartScript,
    decide,
    environment,
)

MEMBERS = ("a.0.0", "a.1.0", "b.0.3")
STORE = ("10.0.0.1", 4000)
WAITING, RUNNING, DONE, FAILED = ScriptState.WAITING, ScriptState.RUNNING, ScriptState.DONE, ScriptState.FAILED
EARLY, LATE, KILLED = Failure(1, 10.0), Failure(1, 11.0), Failure(-9, 12.0)


def reports(
    *states: ScriptState, store: bool = True, generation: int = 4, **failures: Failure
) -> dict[str, ScriptReport]:
    """failures: of the members whose rank is in the name, r0 to r2."""
    return {
        worker: ScriptReport(generation, state, STORE if store and rank == 0 else None, failures.get(f"r{rank}"))
        for rank, (worker, state) in enumerate(zip(MEMBERS, states, strict=False))
    }


@pytest.mark.parametrize(
    ("said", "failing", "wanted"),
    [
        (reports(WAITING, WAITING, WAITING), False, StartScript(STORE)),
        (reports(WAITING, WAITING, WAITING, store=False), False, GoOn()),
        (reports(WAITING, WAITING), False, GoOn()),
        (reports(WAITING, WAITING, WAITING, generation=3), False, GoOn()),
        (reports(WAITING, RUNNING, WAITING), False, GoOn()),
        (reports(RUNNING, RUNNING, RUNNING), False, GoOn()),
        (reports(DONE, RUNNING, DONE), False, GoOn()),
        (reports(DONE, DONE, DONE), False, AllDone()),
        (reports(RUNNING, FAILED, RUNNING, r1=LATE), False, GoOn(failing=True)),
        (reports(RUNNING, FAILED, RUNNING, r1=LATE), True, Blame("a.1.0", LATE)),
        (reports(FAILED, FAILED, FAILED, r0=LATE, r1=LATE, r2=EARLY), True, Blame("b.0.3", EARLY)),
        (reports(FAILED, FAILED, FAILED, r0=EARLY, r1=KILLED, r2=LATE), True, Blame("a.1.0", KILLED)),
        (reports(DONE, FAILED, DONE, r1=EARLY), True, Blame("a.1.0", EARLY)),
        (reports(FAILED, FAILED, DONE, r0=EARLY, r1=EARLY), True, Blame("a.0.0", EARLY)),
    ],
)
def test_decisions(said: dict[str, ScriptReport], failing: bool, wanted: object) -> None:
    assert decide(said, MEMBERS, 4, failing=failing) == wanted


def test_reports_survive_the_wire() -> None:
    for report in (ScriptReport(4, FAILED, None, KILLED), ScriptReport(0, WAITING, STORE)):
        assert ScriptReport.from_json(json.loads(json.dumps(report.to_json()))) == report


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
    assert Failure.read(-11, 99.0, file).said == "the script ended with signal 11"


def test_the_environment_is_that_of_torchrun() -> None:
    found = [environment(worker, MEMBERS, STORE, "job", 2, Path("/e.json")) for worker in MEMBERS]
    assert [one["RANK"] for one in found] == ["0", "1", "2"]
    assert [one["LOCAL_RANK"] for one in found] == ["0", "1", "0"]
    assert [one["GROUP_RANK"] for one in found] == ["0", "0", "1"]
    assert [one["LOCAL_WORLD_SIZE"] for one in found] == ["2", "2", "1"]
    for one in found:
        assert (one["WORLD_SIZE"], one["GROUP_WORLD_SIZE"]) == ("3", "2")
        assert (one["MASTER_ADDR"], one["MASTER_PORT"]) == ("10.0.0.1", "4000")
        assert (one["TORCHELASTIC_RESTART_COUNT"], one["TORCHELASTIC_ERROR_FILE"]) == ("2", "/e.json")
