"""Whole jobs whose workers are forked, cold, or both: the same bits, and nothing left behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from elastic.errors import ExitCode
from tests.live.conftest import Quiet
from tests.live.fleet import lives
from tests.live.jobs import TRAINER, Job

pytestmark = pytest.mark.long

PACE_S = 0.05


def fork_server(job: Job) -> int:
    """The pid of the first one, once it can fork. Workers do not wait for it for ever, if the machine is busy."""
    return int(job.await_event("fork_server_ready")["pid"])


def ways(job: Job) -> list[str]:
    return [line["start"] for line in job.events("worker_started")]


def await_successor(job: Job, gone: str) -> str:
    """The worker that has joined in the slot of this one. A newcomer whose epoch ends before it has copied the state
    gives way to another process."""
    slot, _, incarnation = gone.rpartition(".")

    def joined() -> str:
        found = [str(line["worker_id"]).rpartition(".") for line in job.events("joined")]
        return next((".".join((at, new)) for at, _, new in found if at == slot and int(new) > int(incarnation)), "")

    return job.until(f"a successor of {gone}", joined)


def test_cold_workers_and_their_replacements_compute_the_bits_of_forked_ones(quiet: Quiet, tmp_path: Path) -> None:
    with Job(tmp_path, "--workers", "2", "--quiet", "--cold-start", str(TRAINER)) as job:
        job.pace(PACE_S)
        job.shut("end")
        job.await_world(2)
        job.send("local.1.0")
        await_successor(job, "local.1.0")
        job.finish()
        assert job.result["digest"] == quiet.digest
        assert len(ways(job)) > 2 and set(ways(job)) == {"cold"}
        assert job.events("fork_server_ready") == []
        assert job.left_behind() == {}


def test_a_job_whose_fork_server_is_killed_goes_on_with_the_same_bits(quiet: Quiet, tmp_path: Path) -> None:
    """A replacement is forked, the next one comes cold, and the members never notice."""
    with Job(tmp_path, "--workers", "2", "--quiet", str(TRAINER)) as job:
        job.pace(PACE_S)
        job.shut("end")
        job.await_world(2)
        pid = fork_server(job)
        job.send("local.1.0")
        second = await_successor(job, "local.1.0")
        forked = len(ways(job))
        os.kill(pid, signal.SIGKILL)
        job.send(second)
        await_successor(job, second)
        job.finish()
        assert job.result["digest"] == quiet.digest
        assert set(ways(job)[2:forked]) == {"forked"} and ways(job)[forked] == "cold"
        assert [line["because"] for line in job.events("worker_exited", worker_id="local.0.0")] == ["exited with 0"]
        assert job.left_behind() == {}


def test_the_death_of_the_only_agent_loses_every_copy_and_leaves_no_fork_server(tmp_path: Path) -> None:
    with Job(tmp_path, "--workers", "2", "--quiet", "--snapshot-every", "off", str(TRAINER)) as job:
        job.pace(PACE_S)
        job.await_world(2)
        pid = fork_server(job)
        assert lives(pid)
        os.kill(job.pid_of("elastic.agent"), signal.SIGKILL)
        assert job.wait() == ExitCode.STATE_LOST
        assert "every copy of the state is lost after" in job.output
        assert job.left_behind() == {}
        assert not lives(pid)
