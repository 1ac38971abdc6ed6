"""What workers say to each other beside gradients survives the death of the leader in the middle of a step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.live.jobs import SCRIPTS, Job, run_alone

SCRIPT = SCRIPTS / "together.py"


@pytest.mark.long
def test_shared_values_rollouts_and_logs_survive_the_leader(tmp_path: Path) -> None:
    """Killed in the second pass of a step, so its rollouts die with it and others make them again."""
    alone = tmp_path / "alone"
    alone.mkdir()
    quiet = run_alone(alone, SCRIPT)
    with Job(tmp_path, "--workers", "3", "--quiet", str(SCRIPT)) as job:
        job.shut("second pass")
        job.shut("end")
        first = job.await_world(3)
        leader, successor = first[:2]
        job.until("the leader in the second pass", lambda: leader in job.held_at("second pass"))
        job.send(leader)
        job.open("second pass")
        copied = job.until("a newcomer's copy", lambda: next(iter(job.events("state_copied")), None))
        replacement = str(copied["worker_id"])
        job.open("end")
        assert job.wait() == 0
        assert f"digest {job.result['digest']}" in quiet.splitlines()
        assert job.left_behind() == {}
    assert (tmp_path / "named").read_text().splitlines() == [leader]
    assert (tmp_path / f"saw.{replacement}").read_text() == "blue run"
    assert {path.name for path in tmp_path.glob("led.*")} == {f"led.{leader}", f"led.{successor}"}
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(24))
    assert [step["scalars"] for step in steps] == [
        json.loads(line)["scalars"] for line in (alone / "metrics.jsonl").read_text().splitlines()
    ]
    told = [line for line in job.output.splitlines() if line.startswith("step ")]
    assert told[0].startswith(f"step 0 led by {leader}, 3 members")
    assert told[-1].startswith(f"step 23 led by {successor}, 3 members")
