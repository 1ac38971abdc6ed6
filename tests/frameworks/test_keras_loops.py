"""Scripts with several fit() of Keras, one after the other: deaths, joins and resumed runs in any of them, and between
them, leave no trace in weights, histories and files."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.records import ledger
from tests.frameworks.fates import everything_killed, two_deaths_and_two_joins
from tests.frameworks.test_keras import ended, environment, home, quiet, same, words
from tests.live.jobs import Job

__all__ = ["home"]


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        pytest.param("keras_transfer", (3, 14), id="transfer: in the first loop, and in the second"),
        pytest.param(
            "keras_transfer", (20, 42), id="transfer: in the second loop, and in the third", marks=pytest.mark.long
        ),
        pytest.param("keras_folds", (13, 44), id="folds: in the second loop, and in the last"),
    ],
)
def test_two_deaths_and_two_joins_leave_no_trace(kind: str, steps: tuple[int, ...], home: Path, tmp_path: Path) -> None:
    wanted, output = quiet(kind, home), tmp_path / "output"
    with Job(tmp_path, *words(kind, 3, output), environment=environment(tmp_path)) as job:
        two_deaths_and_two_joins(job, *steps)
        same(ended(job, output), wanted)
        assert not job.events("script_failed"), job.output


@pytest.mark.parametrize(
    ("kind", "step"), [("keras_transfer", 6), ("keras_transfer", 25), ("keras_folds", 20), ("keras_folds", 46)]
)
def test_a_run_goes_on_when_everything_was_killed(kind: str, step: int, home: Path, tmp_path: Path) -> None:
    wanted, output = quiet(kind, home), tmp_path / "output"
    with Job(tmp_path, *words(kind, 2, output), environment=environment(tmp_path)) as job:
        everything_killed(job, step)
    with Job(tmp_path, *words(kind, 3, output), environment=environment(tmp_path)) as job:
        job.pace(0)
        run = ended(job, output)
    assert run.digest == wanted.digest
    assert ledger.compare(run.steps, wanted.steps) is None
    assert run.files == wanted.files


def test_a_death_and_a_join_between_two_loops_leave_no_trace(home: Path, tmp_path: Path) -> None:
    wanted, output = quiet("keras_transfer", home), tmp_path / "output"
    with Job(tmp_path, *words("keras_transfer", 3, output), environment=environment(tmp_path)) as job:
        job.shut("between")
        job.until("three workers between the loops", lambda: len(job.held_at("between")) == 3 or None)
        leader = job.members()[0]
        job.send(leader)
        job.await_event("member_lost")
        job.until("a newcomer", lambda: len(job.workers()) == 3 or None)
        job.pace(0.5)
        job.open("between")
        job.await_world(3)
        job.pace(0)
        same(ended(job, output), wanted)
        assert not job.events("script_failed"), job.output
