"""Gradients that go over a process group beside the mesh: kills and freezes in the middle of an exchange, and joins.

The group is gloo's between CPUs, in the place of NCCL's between GPUs; everything else is what runs there.
"""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from elastic.records import ledger
from tests.live.conftest import Quiet
from tests.live.exchanges import kill_and_freeze
from tests.live.jobs import TRAINER, Job
from tests.live.test_kills import Killer

pytestmark = pytest.mark.long

SITE = Path(__file__).parent / "gloo_site"
HUNG_DEVICE = Path(__file__).parent / "hung_device_site"
KILLS = 12


def test_kills_freezes_and_joins_leave_the_bits_of_the_quiet_run_over_tcp(quiet: Quiet, tmp_path: Path) -> None:
    with Job(tmp_path, "--workers", "3", "--ring", "nccl", "--quiet", str(TRAINER), site=SITE) as job:
        job.pace(0.05)
        job.shut("end")
        kill_and_freeze(job)
        assert {line["over"] for line in job.events("ring_up")} == {"nccl"}
        assert job.result["digest"] == quiet.digest
        assert ledger.compare(quiet.steps, job.steps()) is None


def test_workers_whose_device_hangs_after_an_abort_are_replaced_and_the_script_is_not_blamed(
    quiet: Quiet, tmp_path: Path
) -> None:
    options = ("--workers", "4", "--ring", "nccl", "--quiet")
    with Job(tmp_path, *options, str(TRAINER), site=HUNG_DEVICE) as job:
        job.pace(0.05)
        job.shut("end")
        job.shut("step 5")
        first = set(job.await_world(4))
        job.until("all at the beginning of one step", lambda: first <= job.held_at("step 5"))
        (job.gates / "exchange").write_text(" ".join(first - {"local.0.0"}))
        job.open("step 5")
        job.until("all in one exchange", lambda: first - {"local.0.0"} <= job.held_at("exchange"))
        job.send("local.3.0", signal.SIGKILL)
        job.await_event("quiesce_started")
        job.open("exchange")
        job.until("other workers in their slots", lambda: not {"local.1.0", "local.2.0"} & set(job.members()))
        assert "local.0.0" in job.await_world(4)
        job.finish()
        hung = job.events("device_hung")
        assert {line["worker_id"] for line in hung} == {"local.1.0", "local.2.0"}
        assert all("still runs an exchange 0.5 s after it was aborted" in line["because"] for line in hung)
        ends = {line["worker_id"]: line["because"] for line in job.events("worker_exited")}
        assert {ends[line["worker_id"]] for line in hung} == {"found itself fenced"}
        assert not job.events("script_failed")
        told = {path.name: path.read_text() for path in job.gates.glob("device.local.[123].*")}
        assert {name: told[name] for name in ("device.local.1.0", "device.local.1.1", "device.local.3.1")} == {
            "device.local.1.0": "",
            "device.local.1.1": "GPU-1",
            "device.local.3.1": "GPU-3",
        }
        assert job.result["digest"] == quiet.digest
        assert ledger.compare(quiet.steps, job.steps()) is None


def test_kills_at_random_moments_end_in_the_bits_of_the_quiet_run_over_tcp(quiet: Quiet, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    with Job(tmp_path, "--workers", "4", "--ring", "nccl", "--quiet", str(TRAINER), site=SITE) as job:
        job.pace(0.12)
        job.shut("end")
        job.await_world(4)
        killer = Killer(job, seed)
        while len(killer.killed) < KILLS:
            print(f"step {len(job.steps())}:", killer.round())
        job.finish()
        assert job.result["digest"] == quiet.digest
        assert job.left_behind() == {}


def test_a_ring_that_the_device_cannot_have_ends_the_job_with_what_to_do(tmp_path: Path) -> None:
    with Job(tmp_path, "--workers", "2", "--ring", "nccl", str(TRAINER)) as job:
        assert job.wait() == 1
        assert "the device of this worker is cpu; use --ring tcp" in job.output
