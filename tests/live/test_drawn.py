"""A newcomer draws random numbers for a step that is over before it is ready."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live.jobs import SCRIPTS, Job, run_alone

SCRIPT = SCRIPTS / "drawing.py"
NEWCOMER = "local.1.1"


@pytest.mark.long
def test_what_a_newcomer_drew_for_a_step_that_it_did_not_enter_changes_no_bit(tmp_path: Path) -> None:
    """It is held in its rehearsal while the others step on; so it copies the state twice."""
    alone = run_alone(tmp_path, SCRIPT)
    with Job(tmp_path, "--workers", "2", "--quiet", str(SCRIPT)) as job:
        job.pace(0.02)
        job.shut("end")
        _, second = job.await_world(2)
        (job.gates / "shard").write_text(NEWCOMER)
        job.send(second)
        assert job.await_held("shard") == {NEWCOMER}
        job.await_steps(len(job.steps()) + 3)
        job.open("shard")
        assert NEWCOMER in job.await_world(2)
        steps = len(job.steps())
        job.await_steps(steps + 3)
        job.finish()
        assert f"digest {job.result['digest']}" in alone.splitlines()
        assert len(job.events("state_copied", who=NEWCOMER)) == 2
        assert job.left_behind() == {}
