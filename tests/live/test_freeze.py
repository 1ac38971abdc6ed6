"""A frozen worker is expelled by name while the others go on; thawed, it changes nothing and leaves."""

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
FENCED = "found itself fenced"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Three workers that take a while over a step; the tests of this file go on with it one after the other."""
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


def test_a_short_pause_expels_nobody(job: Job) -> None:
    """Every worker in turn, the donor among them, stands still for a moment. Where this process itself was paused
    meanwhile, and it was longer, a worker may have been expelled."""
    generation, longest_s = job.status()["generation"], 0.0
    for worker in job.members():
        steps, begun_s = len(job.steps()), time.monotonic()
        job.send(worker, signal.SIGSTOP)
        time.sleep(Timing().beat_s)
        job.send(worker, signal.SIGCONT)
        longest_s = max(longest_s, time.monotonic() - begun_s)
        job.await_steps(steps + 2)
    if longest_s < Timing().stopped_s - Timing().beat_s:
        assert job.events("expelled") == []
        assert job.status()["generation"] == generation
    job.await_world(3)


def test_a_frozen_worker_is_expelled_and_finds_itself_fenced_when_thawed(job: Job) -> None:
    worker = job.members()[1]
    pid, slot = job.workers()[worker], worker.split(".")[1]
    frozen_ns = time.monotonic_ns()
    job.send(worker, signal.SIGSTOP)
    expelled(job, worker, frozen_ns)
    job.send(worker, signal.SIGCONT)
    exit_ = job.await_event("worker_exited", worker_id=worker)
    assert (exit_["pid"], exit_["because"]) == (pid, FENCED)
    assert job.events("kill", worker_id=worker) == []
    assert f"local.{slot}.1" in job.await_world(3), "its slot comes back as a newcomer"


@pytest.mark.long
def test_a_worker_frozen_for_good_is_killed_after_the_grace_and_replaced(job: Job) -> None:
    """Rank 0 this time: donor, and leader of the script."""
    worker = job.members()[0]
    slot, incarnation = worker.split(".")[1:]
    frozen_ns = time.monotonic_ns()
    job.send(worker, signal.SIGSTOP)
    gone = expelled(job, worker, frozen_ns)
    exit_ = job.await_event("worker_exited", worker_id=worker)
    assert exit_["because"] == "killed by SIGKILL"
    assert (exit_["t_mono_ns"] - gone["t_mono_ns"]) / 1e9 >= Timing().fence_grace_s - 0.1
    assert f"local.{slot}.{int(incarnation) + 1}" in job.await_world(3)


def test_the_frozen_workers_left_no_trace(job: Job, quiet: Quiet) -> None:
    job.pace(0)
    job.open("end")
    assert job.wait() == 0
    assert job.result["digest"] == quiet.digest
    assert ledger.compare(quiet.steps, job.steps()) is None
    assert job.left_behind() == {}
