"""A worker that is frozen for good is expelled by name while the others go on, killed and replaced."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from elastic.config import Timing
from elastic.records import ledger
from tests.live.conftest import Quiet
from tests.live.jobs import SLACK_S, TRAINER, Job, Line

EXPELLED_S = 1.2
PACE_S = 0.1


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Three workers that take a while over a step; the tests of this file go on with it one after the other.

    test_one_job.py has the worker that is thawed."""
    with Job(tmp_path_factory.mktemp("freeze"), "--workers", "3", "--quiet", str(TRAINER)) as job:
        job.pace(PACE_S)
        job.shut("end")
        job.await_world(3)
        yield job


def expelled(job: Job, worker: str, frozen_ns: int) -> Line:
    """The journal's line; checked against the promise, the status, and the steps of the others."""
    lost = job.await_event("expelled", worker_id=worker)
    job.until("the world without it", lambda: worker not in job.members())
    world, steps = job.status(), len(job.steps())
    assert (lost["t_mono_ns"] - frozen_ns) / 1e9 < EXPELLED_S + SLACK_S
    assert worker in world["because"]
    (found,) = job.events("worker_frozen", worker_id=worker)
    assert found["because"].startswith("no beat for") and "stopped by a signal" in found["because"]
    job.until("the others go on", lambda: len(job.steps()) > steps)
    return lost


@pytest.mark.long
def test_a_worker_frozen_for_good_is_killed_after_the_grace_and_replaced(job: Job) -> None:
    """Rank 0 this time: donor, and leader of the script."""
    worker = job.members()[0]
    slot = worker.rpartition(".")[0]
    frozen_ns = time.monotonic_ns()
    job.send(worker, signal.SIGSTOP)
    gone = expelled(job, worker, frozen_ns)
    exit_ = job.await_event("worker_exited", worker_id=worker)
    assert exit_["because"] == "killed by SIGKILL"
    assert (exit_["t_mono_ns"] - gone["t_mono_ns"]) / 1e9 >= Timing().fence_grace_s - 0.1
    world = job.await_world(3)  # a newcomer that comes at the end of an epoch is too late, and another one follows
    assert worker not in world and slot in {member.rpartition(".")[0] for member in world}


@pytest.mark.long
def test_the_frozen_worker_left_no_trace(job: Job, quiet: Quiet) -> None:
    job.finish()
    assert job.result["digest"] == quiet.digest
    assert ledger.compare(quiet.steps, job.steps()) is None
    assert job.left_behind() == {}
