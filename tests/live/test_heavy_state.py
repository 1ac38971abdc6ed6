"""A newcomer whose copy takes many steps: nobody waits for it, and it catches up by results."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from elastic.protocol.membership.newcomers import OUTDATED
from tests.live.jobs import SCRIPTS, Job, run_alone

HEAVY = SCRIPTS / "heavy.py"
LOADS = [f"load {number}" for number in range(1, OUTDATED + 2)]
"""Gates: the copy in the window, which is cut off, and those that are held."""


def hold_loads(job: Job, steps: int) -> None:
    """Let each copy that the newcomer loads take so many steps, until it has joined or training waits for it.

    The gates LOADS are shut. How many loads there are is not certain: a copy in the window may be cut off
    before the newcomer has received it, and then nothing of it is loaded.
    """

    def wait(what: str, reached: Callable[[], bool]) -> None:
        job.until(what, lambda: reached() or job.events("joined") or job.events("newcomer_awaited"))

    for gate in LOADS:
        wait(f"somebody at gate {gate!r}", partial(_is_held, job, gate))
        wait(f"{steps} more steps", partial(_has_applied, job, len(job.steps()) + steps))
        job.open(gate)


def _is_held(job: Job, gate: str) -> bool:
    return bool(job.held_at(gate))


def _has_applied(job: Job, steps: int) -> bool:
    return len(job.steps()) >= steps


@pytest.mark.long
def test_a_replacement_whose_copy_takes_many_steps_catches_up_and_has_the_same_bits(tmp_path: Path) -> None:
    with Job(tmp_path, "--workers", "2", "--quiet", "--checkpoint-every", "off", str(HEAVY)) as job:
        job.pace(0.005)
        for gate in ("on", *LOADS):
            job.shut(gate)
        _, second = job.await_world(2)
        job.send(second)
        hold_loads(job, 10)
        joined = job.await_event("joined")
        taken = job.events("state_held")[-1]
        assert joined["op"] >= taken["op"] + 20
        job.await_world(2)
        job.open("on")
        assert job.wait() == 0
        assert run_alone(tmp_path, HEAVY, str(len(job.steps()))).split()[-1] == job.result["digest"]
        assert [line["step"] for line in job.steps()] == list(range(len(job.steps())))
        assert job.left_behind() == {}


@pytest.mark.long
def test_training_waits_for_a_replacement_whose_copies_are_always_out_of_date(tmp_path: Path) -> None:
    """Two results of a step are 16 MB, and 64 MiB of them are kept for who copies the state."""
    floats = "2000000"
    with Job(tmp_path, "--workers", "2", "--checkpoint-every", "off", str(HEAVY), "0", floats) as job:
        for gate in ("on", *LOADS):
            job.shut(gate)
        _, second = job.await_world(2)
        job.await_steps(2)
        job.send(second)
        hold_loads(job, 8)
        assert job.await_event("newcomer_awaited")["outdated"] == len(job.events("copy_outdated")) == OUTDATED
        joined = job.await_event("joined")
        copied = job.events("state_copied")[-1]
        assert joined["op"] == copied["op"], "it is the state of the step that waits"
        job.await_world(2)
        job.open("on")
        assert job.wait() == 0
        assert "training waits" in job.output
        assert run_alone(tmp_path, HEAVY, str(len(job.steps())), floats).split()[-1] == job.result["digest"]
        assert [line["step"] for line in job.steps()] == list(range(len(job.steps())))
