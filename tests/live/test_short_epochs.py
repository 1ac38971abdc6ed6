"""A newcomer that is never ready before its epoch is over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live.jobs import SCRIPTS, Job


@pytest.mark.long
def test_a_replacement_gets_in_though_epochs_are_shorter_than_its_start(tmp_path: Path) -> None:
    with Job(tmp_path, "--workers", "2", "--quiet", str(SCRIPTS / "epochs.py")) as job:
        job.pace(0.05)
        job.shut("end")
        first, second = job.await_world(2)
        job.send(second)
        job.until("a world without it", lambda: job.members() == [first])
        job.await_event("newcomer_awaited")
        job.await_world(2)
        steps = len(job.steps())
        job.await_steps(steps + 3)
        assert job.members()[0] == first
        job.open("end")
        assert job.wait() == 0
        assert job.left_behind() == {}
