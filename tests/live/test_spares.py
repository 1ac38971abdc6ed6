"""A spare takes the place of a lost member, and another process becomes the spare."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live.conftest import Quiet
from tests.live.jobs import TRAINER, Job


@pytest.mark.long
def test_a_spare_takes_the_place_of_a_killed_member(quiet: Quiet, tmp_path: Path) -> None:
    with Job(tmp_path, "--workers", "2", "--spares", "1", "--quiet", str(TRAINER)) as job:
        job.pace(0.05)
        job.shut("end")
        first, killed = job.await_world(2)
        (spare,) = job.until("a spare", lambda: job.status().get("spares"))
        assert spare not in (first, killed)
        before = job.workers()
        job.send(killed)
        assert job.await_event("invited")["worker_id"] == spare
        assert job.await_world(2) == [first, spare]
        assert job.workers()[spare] == before[spare], "the process that waited, not one that was started for it"
        loss, planned = [line for line in job.events("committed") if line["generation"] > 1][:2]
        assert (loss["kind"], loss["members"]) == ("loss", [first])
        assert (planned["kind"], planned["members"]) == ("planned", [first, spare])
        slot, _, incarnation = killed.rpartition(".")
        successor = f"{slot}.{int(incarnation) + 1}"
        job.until("the next spare", lambda: job.status().get("spares") == [successor])
        assert job.members() == [first, spare]
        job.finish()
        assert job.result["digest"] == quiet.digest
        assert job.left_behind() == {}
        assert {line["because"] for line in job.events("worker_exited", worker_id=successor)} == {"exited with 0"}


@pytest.mark.long
def test_a_job_whose_only_member_dies_in_its_first_step_begins_again(quiet: Quiet, tmp_path: Path) -> None:
    """Nothing was applied, so nothing is lost: what that member held every new process holds."""
    with Job(tmp_path, "--workers", "1", "--spares", "1", "--quiet", str(TRAINER)) as job:
        job.shut("shard")
        (member,) = job.await_held("shard")
        job.until("a spare", lambda: job.status().get("spares"))
        job.send(member)
        job.until("the next one", lambda: job.held_at("shard") - {member})
        job.open("shard")
        assert job.wait() == 0
        (again,) = [line for line in job.events("committed", kind="form") if line["generation"] > 1]
        assert again["because"].endswith("before a step was applied; begins again from its first step (1 of 3)")
        assert job.result["digest"] == quiet.digest
        assert len(job.steps()) == len(quiet.steps)
        assert job.left_behind() == {}
