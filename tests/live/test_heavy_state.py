"""A newcomer whose copy takes many steps: nobody waits for it, and it catches up by results."""

from __future__ import annotations

from pathlib import Path

from tests.live.jobs import SCRIPTS, Job, run_alone

HEAVY = SCRIPTS / "heavy.py"


def test_a_replacement_whose_copy_takes_many_steps_catches_up_and_has_the_same_bits(tmp_path: Path) -> None:
    with Job(tmp_path, "--workers", "2", "--quiet", "--checkpoint-every", "off", str(HEAVY)) as job:
        job.pace(0.005)
        for gate in ("on", "load 1", "load 2"):
            job.shut(gate)
        _, second = job.await_world(2)
        job.send(second)
        for gate in ("load 1", "load 2"):  # the copy in the window, which is cut off, and the one that is held
            job.await_held(gate)
            job.await_steps(len(job.steps()) + 10)
            job.open(gate)
        joined = job.await_event("joined")
        (taken,) = job.events("state_held")
        assert joined["op"] >= taken["op"] + 20
        job.await_world(2)
        job.open("on")
        assert job.wait() == 0
        assert run_alone(tmp_path, HEAVY, str(len(job.steps()))).split()[-1] == job.result["digest"]
        assert [line["step"] for line in job.steps()] == list(range(len(job.steps())))
        assert job.left_behind() == {}
