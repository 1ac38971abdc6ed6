"""Jobs under a real Slurm: preempted, cancelled, at their time limit, on nodes that are switched off.

Slurm signals every process of a job. Its packages are installed by `make test-slurm`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.errors import ExitCode
from tests.live.conftest import Quiet
from tests.live.fleet import Fleet
from tests.slurm.cluster import CPUS, Slurm
from tests.slurm.training import ENVIRONMENT, Training

WHOLE = f"--cpus-per-task={CPUS}"
"""A node."""


@pytest.fixture
def slurm(home: Path) -> Iterator[Slurm]:
    with Slurm(home, 1) as slurm:
        yield slurm


def test_a_preempted_job_goes_on_from_the_very_step(slurm: Slurm, training: Training) -> None:
    job = slurm.submit(training.command("--grace 18"), WHOLE, "--requeue", environment=training.environment)
    slurm.until("it trains", lambda: len(training.steps) > 5)
    urgent = slurm.submit("sleep 3", "--partition=prod", WHOLE)
    slurm.until("it leaves", lambda: training.exit_code is not None)
    done = len(training.steps)
    assert training.exit_code == ExitCode.DRAINED
    slurm.until("the other job runs", lambda: slurm.job(urgent)["JobState"] != "PENDING")
    training.pace(0.0)
    slurm.run_again(job)
    assert slurm.end(job) == "COMPLETED"
    training.check(done)


def test_a_cancelled_job_goes_on_from_the_very_step_when_it_is_submitted_again(
    slurm: Slurm, training: Training
) -> None:
    job = slurm.submit(training.command("--grace 8"), WHOLE, environment=training.environment)
    slurm.until("it trains", lambda: len(training.steps) > 5)
    slurm.run("scancel", job)
    assert slurm.end(job) == "CANCELLED"
    assert training.exit_code == ExitCode.DRAINED
    done = len(training.steps)
    training.pace(0.0)
    assert slurm.end(slurm.submit(training.command(), WHOLE, environment=training.environment)) == "COMPLETED"
    training.check(done)


def test_a_job_at_its_time_limit_puts_itself_into_the_queue_and_goes_on(slurm: Slurm, training: Training) -> None:
    """Slurm sends the signal at most 60 s before the time that was asked for."""
    limit = ("--time=2", "--signal=B:USR1@45", "--requeue")
    command = training.command("--notices slurm:requeue")
    job = slurm.submit(command, WHOLE, *limit, environment=training.environment)
    slurm.until("it trains", lambda: len(training.steps) > 5)
    training.pace(0.4)  # enough steps are left at the limit
    slurm.until("it leaves", lambda: training.exit_code is not None)
    assert training.exit_code == ExitCode.DRAINED
    done = len(training.steps)
    training.pace(0.0)
    slurm.run_again(job)
    assert slurm.end(job) == "COMPLETED"
    training.check(done)


def agent(fleet: Fleet, *options: str) -> str:
    words = ("elastic agent --rendezvous", ",".join(fleet.client.replicas), "--node $SLURMD_NODENAME --jobs-dir")
    return " ".join([*words, f"{fleet.home}/$SLURMD_NODENAME", *options])


def test_an_agent_of_an_array_is_preempted_and_comes_back(home: Path, quiet: Quiet) -> None:
    with Slurm(home, 3) as slurm, Fleet(home, replicas=1) as fleet:
        words = (WHOLE, "--array=1-3", "--requeue")
        array = slurm.submit(f"exec {agent(fleet, '--grace 15')}", *words, environment=ENVIRONMENT)
        fleet.await_nodes(*slurm.nodes)
        job = fleet.train("together")
        fleet.pace(0.1)
        fleet.await_members(job, "n1.0.0", "n2.0.0", "n3.0.0")
        urgent = slurm.submit("sleep 3", "--partition=prod", WHOLE)
        slurm.until("the other job runs", lambda: slurm.job(urgent)["JobState"] == "RUNNING")
        left = slurm.job(urgent)["NodeList"]
        fleet.await_slots(job, *(f"{node}.0" for node in slurm.nodes if node != left))
        (requeued,) = [f"{array}_{n}" for n in (1, 2, 3) if slurm.job(f"{array}_{n}")["JobState"] != "RUNNING"]
        slurm.run_again(requeued)
        fleet.await_slots(job, *(f"{node}.0" for node in slurm.nodes))
        assert fleet.events("member_lost") == []
        fleet.finish(job, quiet.digest, quiet.steps)


def test_a_node_of_an_allocation_is_switched_off(home: Path, quiet: Quiet) -> None:
    with Slurm(home, 3) as slurm, Fleet(home, replicas=1) as fleet:
        step = "srun --no-kill --kill-on-bad-exit=0 --wait=0 --ntasks-per-node=1"
        script = f"{step} bash -c 'exec {agent(fleet, '--notices none')}'"
        allocation = slurm.submit(script, "--nodes=3", "--no-kill", WHOLE, environment=ENVIRONMENT)
        fleet.await_nodes(*slurm.nodes)
        job = fleet.train("together")
        fleet.pace(0.1)
        fleet.await_members(job, "n1.0.0", "n2.0.0", "n3.0.0")
        first = slurm.job(allocation)["BatchHost"]
        lost = next(node for node in slurm.nodes if node != first)
        slurm.switch_off(lost)
        fleet.await_slots(job, *(f"{node}.0" for node in slurm.nodes if node != lost))
        slurm.until("Slurm knows", lambda: slurm.states()[lost].startswith("down"))
        time.sleep(1.0)  # nothing tells that Slurm leaves the others alone
        assert slurm.job(allocation)["JobState"] == "RUNNING"
        fleet.finish(job, quiet.digest, quiet.steps)
        slurm.run("scancel", allocation)
        slurm.until("it is gone", lambda: slurm.job(allocation)["JobState"] == "CANCELLED")
