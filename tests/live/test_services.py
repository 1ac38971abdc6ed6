"""The services around the workers die in the middle of a run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from chaos_tests.nemesis import signals
from elastic.config import Timing
from elastic.records import ledger
from tests.live.conftest import Quiet
from tests.live.jobs import TRAINER, Job


@pytest.mark.long
def test_workers_lost_before_during_and_after_the_loss_of_the_rendezvous(quiet: Quiet, tmp_path: Path) -> None:
    """Nothing can be decided without it, but nothing is undone: the next one learns everything from the agent."""
    with Job(tmp_path, "--workers", "3", "--quiet", str(TRAINER)) as job:
        job.pace(0.05)
        job.shut("end")
        first, second, _ = job.await_world(3)
        generation = job.status()["generation"]
        os.kill(job.pid_of("elastic.rendezvous"), signal.SIGKILL)
        steps = len(job.steps())
        job.until("the ring steps on without a leader", lambda: len(job.steps()) > steps + 2)
        job.until("it is started again", lambda: len(job.events("leading")) == 2)
        job.await_world(3)
        assert job.status()["generation"] == generation, "the new leader touched nothing"
        job.send(first)
        job.until("a world without it", lambda: first not in job.members() and job.members())

        os.kill(job.pid_of("elastic.rendezvous"), signal.SIGKILL)
        job.send(second)
        job.await_event("worker_exited", worker_id=second)
        steps = len(job.steps())
        job.until("steps again", lambda: len(job.steps()) > steps + 2)
        assert len(job.events("leading")) == 3
        job.finish()
        assert job.result["digest"] == quiet.digest
        assert ledger.compare(quiet.steps, job.steps()) is None
        lost = {line["worker_id"]: line["because"] for line in job.events("member_lost")}
        assert lost.pop(first) == lost.pop(second) == "killed by SIGKILL"
        newcomers = {worker for worker in lost if not worker.endswith(".0")}  # one may give way to another process
        assert lost == dict.fromkeys(newcomers, "found itself fenced")
        assert job.left_behind() == {}


@pytest.mark.long
def test_services_that_stand_still_for_a_while_cost_no_worker(quiet: Quiet, tmp_path: Path) -> None:
    """The agent, the rendezvous service and etcd, each frozen for longer than a worker may be silent."""
    with Job(tmp_path, "--workers", "2", "--quiet", str(TRAINER)) as job:
        job.pace(0.1)
        job.shut("end")
        job.await_world(2)
        pids = job.workers()
        for service in ("elastic.agent", "elastic.rendezvous", "--data-dir=data"):
            thaw = signals.freeze([job.pid_of(service)])
            time.sleep(Timing().evict_s * 1.3)
            thaw()
            steps = len(job.steps())
            job.await_steps(steps + 3)
            job.await_world(2)
        assert job.workers() == pids
        job.finish()
        assert job.result["digest"] == quiet.digest
        assert ledger.compare(quiet.steps, job.steps()) is None
        assert job.left_behind() == {}
