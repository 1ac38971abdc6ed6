"""`elastic run` in a job of a real Slurm: preempted, cancelled, at its time limit.

Slurm signals every process of a job. Its packages are installed by `make test-slurm`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.errors import ExitCode
from tests.slurm.cluster import CPUS, GRACE_S, KILL_WAIT_S, Slurm
from tests.slurm.training import Training

WHOLE = f"--cpus-per-task={CPUS}"
"""A node."""


@pytest.fixture
def slurm(home: Path) -> Iterator[Slurm]:
    with Slurm(home, 1) as slurm:
        yield slurm


def preempt(slurm: Slurm, training: Training, *options: str, command: str) -> float:
    """A job is preempted, and goes on from the very step. Returns how many seconds after the other job was submitted it
    heard of that."""
    job = slurm.submit(training.command(command), WHOLE, "--requeue", *options, environment=training.environment)
    slurm.until("it trains", lambda: len(training.steps) > 5)
    training.pace(0.4)  # enough steps are left when Slurm preempts it
    asked_unix_s = time.time()
    urgent = slurm.submit("sleep 3", "--partition=prod", WHOLE)
    slurm.until("it leaves", lambda: training.exit_code is not None)
    (told_unix_s, *_) = sorted(
        line["t_wall"] for event in ("agent_signalled", "notice") for line in training.events(event)
    )
    done = len(training.steps)
    assert training.exit_code == ExitCode.DRAINED, slurm.story()
    slurm.until("the other job runs", lambda: slurm.job(urgent)["JobState"] != "PENDING")
    training.pace(0.0)
    slurm.run_again(job)
    slurm.completes(job)
    training.check(done)
    return float(told_unix_s - asked_unix_s)


def test_a_preempted_job_hears_of_it_at_the_end_of_gracetime_and_then_has_killwait(
    slurm: Slurm, training: Training
) -> None:
    assert preempt(slurm, training, command=f"--grace {KILL_WAIT_S - 5}") > GRACE_S - 1


def test_a_preempted_job_that_asks_for_a_signal_may_hear_of_it_at_the_start_of_gracetime(
    home: Path, training: Training
) -> None:
    options = ("--time=60", "--signal=B:USR1@120")
    with Slurm(home, 1, "SlurmctldParameters=preempt_send_user_signal") as slurm:
        assert preempt(slurm, training, *options, command="--notices slurm:requeue") < GRACE_S - 1


def test_a_cancelled_job_goes_on_from_the_very_step_when_it_is_submitted_again(
    slurm: Slurm, training: Training
) -> None:
    job = slurm.submit(training.command("--grace 8"), WHOLE, environment=training.environment)
    slurm.until("it trains", lambda: len(training.steps) > 5)
    slurm.run("scancel", job)
    assert slurm.end(job) == "CANCELLED"
    assert training.exit_code == ExitCode.DRAINED, slurm.story()
    done = len(training.steps)
    training.pace(0.0)
    slurm.completes(slurm.submit(training.command(), WHOLE, environment=training.environment))
    training.check(done)


def test_a_job_at_its_time_limit_puts_itself_into_the_queue_and_goes_on(slurm: Slurm, training: Training) -> None:
    """Slurm sends the signal at most 60 s before the time that was asked for."""
    limit = ("--time=2", "--signal=B:USR1@45", "--requeue")
    command = training.command("--notices slurm:requeue")
    job = slurm.submit(command, WHOLE, *limit, environment=training.environment)
    slurm.until("it trains", lambda: len(training.steps) > 5)
    training.pace(0.4)  # enough steps are left at the limit
    slurm.until("it leaves", lambda: training.exit_code is not None)
    assert training.exit_code == ExitCode.DRAINED, slurm.story()
    done = len(training.steps)
    training.pace(0.0)
    slurm.run_again(job)
    slurm.completes(job)
    training.check(done)


def test_a_job_whose_node_is_lost_goes_on_elsewhere_from_its_newest_checkpoint(home: Path, training: Training) -> None:
    with Slurm(home, 2) as slurm:
        command = training.command("--checkpoint-every '20 steps'")
        job = slurm.submit(command, WHOLE, "--requeue", environment=training.environment)
        slurm.until("it trains, and has a checkpoint", lambda: len(training.steps) > 45)
        slurm.switch_off(slurm.node_of(job))
        done = len(training.steps)
        training.pace(0.0)
        slurm.run_again(job)
        slurm.completes(job)
        (begun_again_with,) = {line["step"] for line in training.events("state_restored")}
        assert begun_again_with in (20, 40, 60, 80) and begun_again_with <= done
        again = f"steps {begun_again_with} to {done - 1} are done again"
        assert again in slurm.output(job), slurm.story()
        training.check(begun_again_with)
