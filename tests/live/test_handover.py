"""Another program takes an agent's place: same process, same workers, and the bits of the quiet run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from elastic import ledger
from elastic.handover import Place, of_this_program
from tests.live.conftest import Quiet
from tests.live.jobs import TRAINER, Job


@pytest.mark.long
def test_a_training_goes_on_over_a_new_program_of_its_agent(tmp_path: Path, quiet: Quiet) -> None:
    with Job(tmp_path, "--workers", "2", "--quiet", str(TRAINER)) as job:
        job.pace(0.02)
        job.await_world(2)
        place = Place(job.dir, "local")
        running, before = place.running(), job.events("worker_started")
        assert running is not None and len(before) == 2

        request = of_this_program()
        place.ask(running, request)
        answer = job.until("the new program", lambda: place.answer(request))
        assert not answer["refused"]
        assert place.running() == running, "the same process"
        steps = len(job.steps())
        job.until("steps", lambda: len(job.steps()) > steps + 3)
        assert job.events("worker_started") == before, "no worker was started again"
        assert not job.events("worker_exited") and not job.events("member_lost")

        os.kill(before[1]["pid"], signal.SIGKILL)
        job.await_event("worker_dying", worker_id="local.1.0")  # by its lifeline, which the new program took over
        job.await_event("worker_started", worker_id="local.1.1")
        job.await_world(2)
        job.pace(0.0)
        assert job.wait() == 0, job.story()
        assert job.result["digest"] == quiet.digest
        assert ledger.compare(job.steps(), quiet.steps) is None
        assert job.left_behind() == {}
