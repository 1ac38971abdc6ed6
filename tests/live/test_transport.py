"""Gradients that go over a process group beside the mesh: kills and freezes in the middle of an exchange, and joins.

The group is gloo's between CPUs, in the place of NCCL's between GPUs; everything else is what runs there.
"""

from __future__ import annotations

import signal
from pathlib import Path

from elastic import ledger
from tests.live.conftest import Quiet
from tests.live.jobs import TRAINER, Job

SITE = Path(__file__).parent / "gloo_site"


def test_kills_freezes_and_joins_leave_the_bits_of_the_quiet_run_over_tcp(quiet: Quiet, tmp_path: Path) -> None:
    words = ("--workers", "3", "--ring", "nccl", "--quiet")
    with Job(tmp_path, *words, str(TRAINER), site=SITE) as job:
        job.pace(0.05)
        job.shut("end")
        members = job.await_world(3)
        victims = []
        for sent in (signal.SIGKILL, signal.SIGSTOP):
            victim = members[1]
            (job.gates / "exchange").write_text(victim)
            job.until("the victim in an exchange", (job.gates / f"exchange.{victim}").exists)
            job.send(victim, sent)
            job.open("exchange")
            victims.append(victim)
            job.until("a world without it", lambda victim=victim: victim not in job.members())  # type: ignore[misc]
            members = job.await_world(3)
        job.pace(0)
        job.open("end")
        assert job.wait() == 0
        assert job.result["digest"] == quiet.digest
        assert ledger.compare(quiet.steps, job.steps()) is None
        ends = {line["worker_id"]: line["because"] for line in job.events("worker_exited")}
        stayed = {line["worker_id"] for line in job.events("entered")} - set(victims)
        assert {ends[worker] for worker in stayed} == {"exited with 0"}, "a survivor was restarted"
        assert len(stayed) == 3, "each victim was replaced, and nobody else"
        assert job.left_behind() == {}
