"""--reduction fixed: kills, freezes, joins and resumes over every kind of ring leave the bits of one worker."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.records import ledger
from tests.live.exchanges import kill_and_freeze, kill_two
from tests.live.jobs import DEADLINE_S, TRAINER, Job, Line

GLOO = Path(__file__).parent / "gloo_site"
FIXED = ("--reduction", "fixed", "--quiet")


class Alone:
    """What scripts/trainer.py comes to in a world of one."""

    def __init__(self, job: Job) -> None:
        self.digest: str = job.result["digest"]
        self.steps: list[Line] = job.steps()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    with Job(tmp_path_factory.mktemp("alone"), "--workers", "1", *FIXED, str(TRAINER)) as job:
        assert job.wait(2 * DEADLINE_S) == 0
        yield Alone(job)


def check_end(job: Job, alone: Alone) -> None:
    assert job.result["digest"] == alone.digest
    assert ledger.compare(alone.steps, job.steps()) is None


@pytest.mark.long
def test_a_member_and_rank_0_die_while_gradients_leave_and_no_bit_changes(alone: Alone, tmp_path: Path) -> None:
    """With --overlap on, which test_overlap.py tries in more ways."""
    with Job(tmp_path, "--workers", "3", "--overlap", "on", *FIXED, str(TRAINER)) as job:
        kill_two(job)
        check_end(job, alone)
        assert not list(job.events("overlap_given_up"))
        assert job.left_behind() == {}


@pytest.mark.long
def test_over_gloo_in_the_place_of_nccl_the_sums_are_its_own_allreduce(alone: Alone, tmp_path: Path) -> None:
    with Job(tmp_path, "--workers", "3", "--ring", "nccl", *FIXED, str(TRAINER), site=GLOO) as job:
        job.pace(0.05)
        job.shut("end")
        kill_and_freeze(job)
        assert {line["over"] for line in job.events("ring_up")} == {"nccl"}
        check_end(job, alone)


@pytest.mark.long
def test_over_mpi(alone: Alone, tmp_path: Path) -> None:
    with Job(tmp_path, "--workers", "3", "--ring", "mpi", *FIXED, str(TRAINER)) as job:
        job.pace(0.05)
        job.shut("end")
        members = job.await_world(3)
        assert {line["over"] for line in job.events("ring_up")} == {"mpi"}
        job.send(members[1], signal.SIGKILL)
        job.await_world(3)
        job.pace(0)
        job.open("end")
        assert job.wait() == 0
        check_end(job, alone)


@pytest.mark.long
def test_a_job_goes_on_from_its_checkpoint_with_another_number_of_workers(alone: Alone, tmp_path: Path) -> None:
    options = ("--checkpoint-every", "5 steps", *FIXED)
    with Job(tmp_path, "--workers", "2", *options, str(TRAINER)) as job:
        job.pace(0.02)
        job.await_event("checkpoint_complete")
        job.await_steps(7)
        job.command.process.kill()
        job.wait()
    with Job(tmp_path, "--workers", "3", *options, str(TRAINER)) as job:
        assert job.wait() == 0, job.story()
        assert (job.dir / "resumes.jsonl").exists()
        assert json.loads((job.dir / "result.json").read_bytes())["digest"] == alone.digest
