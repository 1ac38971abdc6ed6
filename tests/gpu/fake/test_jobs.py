"""Whole jobs over the fake device: `elastic run --ring nccl` with faults of NCCL and of the GPU."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.gpu.fake.device import FakeDevice
from tests.live.jobs import Job

TRAIN = Path(__file__).parent / "train.py"


@pytest.fixture
def gpus(device: FakeDevice) -> FakeDevice:
    """Four devices, on which a member waits for the others as over NCCL."""
    device.set("devices", 4)
    device.set("meets")
    device.set("reads_zeros")
    return device


def job_over(gpus: FakeDevice, home: Path, *options: str) -> Job:
    """Of three workers."""
    words = ("--workers", "3", "--ring", "nccl", *options, "--quiet", str(TRAIN))
    return Job(home, *words, environment=gpus.environment())


def test_a_job_without_faults_makes_one_communicator_a_member(gpus: FakeDevice, tmp_path: Path) -> None:
    with job_over(gpus, tmp_path) as job:
        assert job.wait() == 0
        assert len(job.steps()) == 60
        assert {line["over"] for line in job.events("ring_up")} == {"nccl"}
        assert job.left_behind() == {}
    assert gpus.count("inits") == 3
    assert gpus.count("used_after_free") == 0


@pytest.mark.long
def test_a_device_that_no_abort_brings_to_rest_costs_its_workers_and_not_the_job(
    gpus: FakeDevice, tmp_path: Path
) -> None:
    """All members, in an exchange or as they greet a newcomer, while their scripts wait for the device: every copy of
    the state is lost, and kept. It takes a minute."""
    with job_over(gpus, tmp_path, "--snapshot-every", "1 steps") as job:
        job.pace(0.1)
        job.await_world(3)
        job.until("a snapshot", lambda: job.events("snapshot_complete"))

        def hung() -> set[str]:
            return {line["worker_id"] for line in job.events("device_hung")}

        gpus.set("abort_in_vain", world=3)
        gpus.set("exchange_hangs", world=3)
        job.send("local.2.0", signal.SIGKILL)
        job.until("the survivors to give way", lambda: {"local.0.0", "local.1.0"} <= hung())
        gpus.set("exchange_hangs", 0)
        gpus.set("abort_in_vain", 0)
        job.await_world(3)
        job.pace(0)
        assert job.wait() == 0
        assert "every copy of the state is lost" in job.output and "it goes on from step" in job.output
        assert "raised at" not in job.output


def test_a_newcomer_that_nccl_cannot_connect_is_tried_less_and_less_often(gpus: FakeDevice, tmp_path: Path) -> None:
    with job_over(gpus, tmp_path) as job:
        job.pace(0.4)  # alone a member would take three minutes
        job.await_world(3)
        gpus.set("init_fails", 3, world=3)
        job.send("local.2.0", signal.SIGKILL)
        job.until("three tries", lambda: len(job.events("newcomer_unreachable")) >= 3)
        tried = job.events("newcomer_unreachable")
        assert [line["times"] for line in tried[:3]] == [1, 2, 3]
        at_s = [line["t_mono_ns"] / 1e9 for line in tried]
        assert at_s[1] - at_s[0] >= 0.5 and at_s[2] - at_s[1] >= 1.0
        gpus.set("init_fails", 0)
        job.await_world(3)
        job.pace(0)
        assert job.wait() == 0


def test_a_gpu_that_is_lost_costs_its_slot_and_no_other(gpus: FakeDevice, tmp_path: Path) -> None:
    with job_over(gpus, tmp_path) as job:
        job.pace(0.4)
        job.await_world(3)
        gpus.set("devices", 2)
        job.send("local.1.0", signal.SIGKILL)
        job.send("local.2.0", signal.SIGKILL)
        job.until("another worker of slot 1", lambda: any(w.startswith("local.1.") for w in job.members()))
        given_up = job.await_event("slot_given_up")
        assert "is gone: torch sees GPU-" in given_up["because"]
        job.pace(0)
        assert job.wait() == 0
