"""Whole jobs over the fake device: `elastic run --ring nccl` with faults of NCCL and of the GPU."""

from __future__ import annotations

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
