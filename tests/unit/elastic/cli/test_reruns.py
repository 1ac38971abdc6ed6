"""Several runs of one command: one summary, and a signal between two of them ends it in order."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic.config import JobSpec
from elastic.errors import ConfigError, ExitCode
from elastic.platforms.local import job_run, reruns
from elastic.platforms.local.interrupts import Signals
from elastic.platforms.local.job_run import RunOutcome
from elastic.records import resume
from elastic.records.journal import Journal, journal_path
from elastic.records.resume import Resumption

LOST = RunOutcome(ExitCode.STATE_LOST, "every copy of the state is lost")
DONE = RunOutcome(ExitCode.DONE, "all members have finished", "c0ffee")
SPEC = JobSpec(name="train", command=("true",), workers=1)

Between = Callable[[int], None]


@pytest.fixture
def job_dir(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def run_all(job_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs that end like this; `between` is called with the number of the run that is being prepared."""

    def run_all(*ends: RunOutcome, between: Between = lambda number: None, as_json: bool = True) -> int:
        left = list(ends)

        def begin(spec: JobSpec, job_dir: Path, *, again: bool, memory: Path | None) -> Resumption | None:
            number = len(ends) - len(left)
            assert again == (number > 0)
            between(number)
            return Resumption(checkpoint=f"step-{number}", step=number, redone=None, skipped=()) if again else None

        def attempt(spec: JobSpec, job_dir: Path, signals: Signals, **_: Any) -> RunOutcome:
            with Journal(journal_path(job_dir, "leader"), "train", "leader", "local") as journal:
                journal.write("published", generation=len(ends) - len(left) + 1)
            return left.pop(0)

        monkeypatch.setattr(resume, "begin", begin)
        monkeypatch.setattr(resume, "has_advanced", lambda job_dir: bool(left))
        monkeypatch.setattr(job_run, "attempt", attempt)
        return reruns.to_the_end(
            SPEC, job_dir, again=False, memory=None, notices="off", grace_s=None, quiet=False, as_json=as_json
        )

    return run_all


def summary(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    (line,) = capsys.readouterr().out.splitlines()
    document: dict[str, Any] = json.loads(line)
    assert document["event"] == "summary"
    return document


def test_a_job_that_was_resumed_twice_has_one_summary_that_says_from_what(
    run_all: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_all(LOST, LOST, DONE) == 0
    told = summary(capsys)
    assert (told["exit_code"], told["digest"], told["generation"]) == (0, "c0ffee", 3)
    assert [resumed["checkpoint"] for resumed in told["resumes"]] == ["step-1", "step-2"]


def test_people_hear_of_each_loss_when_it_comes_and_of_the_end_once(
    run_all: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_all(LOST, DONE, as_json=False) == 0
    said = capsys.readouterr().err
    places = [said.index(text) for text in ("every copy of the state is lost", "it goes on from step 1", "exit 0")]
    assert places == sorted(places) and said.count("; see ") == 1


def test_a_run_that_gets_nowhere_is_the_last_one(
    run_all: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_all(LOST, LOST) == ExitCode.STATE_LOST
    assert len(summary(capsys)["resumes"]) == 1


def test_a_command_under_nohup_outlives_its_terminal(
    run_all: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run_all(LOST, DONE, between=lambda run_number: os.kill(os.getpid(), signal.SIGHUP)) == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_between_two_runs_ends_the_command_in_order(
    run_all: Callable[..., int], capsys: pytest.CaptureFixture[str], number: signal.Signals, code: int
) -> None:
    before = signal.getsignal(number)

    def ask_to_stop(run_number: int) -> None:
        if run_number:
            os.kill(os.getpid(), number)

    assert run_all(LOST, DONE, between=ask_to_stop) == code
    told = summary(capsys)
    assert (told["exit_code"], told["resumes"]) == (code, [])
    assert f"stopped by {number.name}" in told["because"]
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_end_is_told_changes_nothing_of_it(
    run_all: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    told = reruns._summary

    def interrupted(*arguments: Any) -> dict[str, Any]:
        os.kill(os.getpid(), number)
        return told(*arguments)

    monkeypatch.setattr(reruns, "_summary", interrupted)
    assert run_all(DONE) == 0
    assert summary(capsys)["because"] == DONE.because


FAILED = RunOutcome(ExitCode.SCRIPT_FAILED, "the script raised")
AGAIN = "stopped by SIGINT; the same command again goes on from the newest checkpoint"
COMPLETE = "stopped by SIGINT when the job was complete: nothing is left to go on with"


@pytest.mark.parametrize(
    ("before", "result", "agent_status", "code", "because"),
    [
        (None, None, 130, ExitCode.INTERRUPTED, AGAIN),
        (None, DONE, 130, ExitCode.INTERRUPTED, COMPLETE),  # recorded while it stopped
        (DONE, DONE, 130, ExitCode.INTERRUPTED, COMPLETE),  # the script did something after its loop
        (DONE, DONE, -signal.SIGKILL, ExitCode.INTERRUPTED, COMPLETE),
        (DONE, DONE, 0, ExitCode.DONE, DONE.because),  # all had ended by themselves
        (None, DONE, 0, ExitCode.DONE, DONE.because),
        (FAILED, FAILED, 130, ExitCode.SCRIPT_FAILED, FAILED.because),
        (None, FAILED, 130, ExitCode.INTERRUPTED, AGAIN),  # because it was stopped
        (LOST, LOST, 130, ExitCode.INTERRUPTED, AGAIN),
        (None, LOST, 130, ExitCode.INTERRUPTED, AGAIN),
    ],
)
def test_what_is_told_of_a_stop_is_what_is_kept(
    before: RunOutcome | None, result: RunOutcome | None, agent_status: int, code: int, because: str
) -> None:
    told = job_run.how_stopped(signal.SIGINT, before, result, agent_status)
    assert told.exit_code == code and told.because.startswith(because)
    assert told.digest == (result.digest if result is DONE else "")


def test_a_job_that_cannot_go_on_says_why_in_its_summary_and_one_that_cannot_begin_has_none(
    run_all: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(run_number: int, *, first: int) -> None:
        if run_number >= first:
            raise ConfigError("none of its checkpoints can be used")

    assert run_all(LOST, DONE, between=lambda run_number: refuse(run_number, first=1)) == ExitCode.BAD_INPUT
    assert summary(capsys)["because"] == "none of its checkpoints can be used"
    with pytest.raises(ConfigError):
        run_all(LOST, DONE, between=lambda run_number: refuse(run_number, first=0))
