"""Whole jobs over the fake device: `elastic run --ring nccl` through faults of NCCL, of the GPU and of processes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from chaos_tests.support.processes import kill_if_there
from tests.gpu.fake.device import FakeDevice
from tests.live.jobs import Job

TRAIN = Path(__file__).parent / "train.py"
STEPS = 60
REMOTE_ERROR = 6
"""ncclRemoteError."""
LAUNCH_FAILURE = 719
"""cudaErrorLaunchFailure."""
WAIT_S = "2"
"""How long torch waits for a communicator in these jobs."""


@pytest.fixture
def gpus(device: FakeDevice) -> FakeDevice:
    """Four devices, on which a member waits for the others as over NCCL."""
    device.set("devices", 4)
    device.set("meets")
    device.set("reads_zeros")
    return device


def job_over(gpus: FakeDevice, home: Path, *options: str) -> Job:
    """Of three workers, which go slowly until the test opens the gate `end`."""
    words = ("--workers", "3", "--ring", "nccl", *options, "--quiet", str(TRAIN))
    job = Job(home, *words, environment={**gpus.environment(), "TORCH_NCCL_NONBLOCKING_TIMEOUT": WAIT_S})
    job.shut("end")
    return job


def finish(job: Job, gpus: FakeDevice, lost: int) -> None:
    """Let the job end, with all its workers, and check what it has left. lost: workers that were killed."""
    assert len(job.await_world(3)) == 3
    job.open("end")
    assert job.wait() == 0
    assert [line["step"] for line in job.steps()] == list(range(STEPS))
    assert {line["over"] for line in job.events("ring_up")} == {"nccl"}
    ends = [line["because"] for line in job.events("worker_exited")]
    assert sorted(ends) == ["exited with 0"] * 3 + ["killed by SIGKILL"] * lost
    assert not job.events("script_failed")
    assert job.left_behind() == {}
    assert gpus.count("used_after_free") == 0


def kill_last(job: Job, members: list[str]) -> None:
    """SIGKILL the member of the highest rank."""
    job.send(members[-1], signal.SIGKILL)
    job.until("a world without it", lambda: members[-1] not in job.members())


def test_without_faults_a_member_makes_one_communicator(gpus: FakeDevice, tmp_path: Path) -> None:
    with job_over(gpus, tmp_path) as job:
        finish(job, gpus, lost=0)
        assert {line["start"] for line in job.events("worker_started")} == {"forked"}
    assert gpus.count("inits") == 3


@pytest.mark.parametrize("reduction", ["exact", "fixed"])
def test_a_member_that_is_killed_in_an_exchange_is_replaced(reduction: str, gpus: FakeDevice, tmp_path: Path) -> None:
    with job_over(gpus, tmp_path, "--reduction", reduction) as job:
        members = job.await_world(3)
        gpus.set("exchange_hangs")
        before = len(job.steps())
        kill_last(job, members)
        gpus.set("exchange_hangs", 0)
        assert len(job.steps()) <= before + 1
        finish(job, gpus, lost=1)


def test_an_error_of_nccl_in_all_members_costs_a_generation_and_nobody(gpus: FakeDevice, tmp_path: Path) -> None:
    with job_over(gpus, tmp_path) as job:
        job.await_world(3)
        gpus.set("comm_fails", REMOTE_ERROR)
        job.until("a failure", lambda: len(job.events("committed")) > 1)
        gpus.set("comm_fails", 0)
        finish(job, gpus, lost=0)


def test_a_member_that_is_killed_after_an_error_of_nccl_is_replaced(gpus: FakeDevice, tmp_path: Path) -> None:
    """As real deaths are: the network says it before the agent does."""
    with job_over(gpus, tmp_path) as job:
        members = job.await_world(3)
        gpus.set("exchange_hangs")
        gpus.set("comm_fails", REMOTE_ERROR)
        kill_last(job, members)
        gpus.set("exchange_hangs", 0)
        gpus.set("comm_fails", 0)
        finish(job, gpus, lost=1)


def test_a_communicator_that_is_not_ready_in_time_is_tried_again(gpus: FakeDevice, tmp_path: Path) -> None:
    gpus.set("init_hangs")
    with job_over(gpus, tmp_path) as job:
        job.await_event("entered", generation=2)  # after the first one has failed
        gpus.set("init_hangs", 0)
        finish(job, gpus, lost=0)


def test_a_member_that_is_killed_while_a_communicator_is_made_is_replaced(gpus: FakeDevice, tmp_path: Path) -> None:
    with job_over(gpus, tmp_path) as job:
        members = job.await_world(3)
        gpus.set("init_hangs")
        kill_last(job, members)
        members = job.members()
        made = gpus.count("inits")
        job.until("two that wait for a communicator", lambda: gpus.count("inits") > made or None)
        job.send(members[-1], signal.SIGKILL)
        job.until("a world without it", lambda: members[-1] not in job.members())
        gpus.set("init_hangs", 0)
        finish(job, gpus, lost=2)


def test_a_newcomer_that_cannot_connect_does_not_stop_the_others(gpus: FakeDevice, tmp_path: Path) -> None:
    with job_over(gpus, tmp_path) as job:
        members = job.await_world(3)
        gpus.set("init_fails", REMOTE_ERROR, world=3)
        kill_last(job, members)
        job.until("a newcomer that cannot connect", lambda: job.events("newcomer_unreachable"))
        before = len(job.steps())
        job.await_steps(before + 5)
        gpus.set("init_fails", 0)
        job.open("end")  # it may be tried again after the end
        assert job.wait() == 0
        assert [line["step"] for line in job.steps()] == list(range(STEPS))
        ends = {line["worker_id"]: line["because"] for line in job.events("worker_exited")}
        assert [ends[member] for member in members[:-1]] == ["exited with 0"] * 2


def test_a_member_whose_device_an_abort_has_hurt_is_replaced(gpus: FakeDevice, tmp_path: Path) -> None:
    """Its device fails between two exchanges, as others abort, and works again in the next process."""
    with job_over(gpus, tmp_path) as job:
        members = job.await_world(3)
        (job.gates / "shard").write_text(members[1])
        job.until("its script at rest", lambda: members[1] in job.held_at("shard"))
        gpus.set("cuda_fails", LAUNCH_FAILURE, pid=job.workers()[members[1]])
        kill_last(job, members)
        job.until("a ring that was not built", lambda: len(job.events("committed")) > 2)
        gpus.set("cuda_fails", 0)
        job.open("shard")
        hung = job.await_event("device_hung", worker_id=members[1])
        assert "unspecified launch failure" in hung["because"]
        job.until("its end", lambda: members[1] not in job.workers())
        job.await_world(3)
        job.open("end")
        assert job.wait() == 0
        ends = {line["worker_id"]: line["because"] for line in job.events("worker_exited")}
        assert (ends[members[0]], ends[members[1]]) == ("exited with 0", "found itself fenced")
        assert not job.events("script_failed")


def test_a_job_ends_well_right_after_a_loss(gpus: FakeDevice, tmp_path: Path) -> None:
    """Threads may still be in the abort, in torch's C++, when the script is over."""
    with job_over(gpus, tmp_path, "--no-replace") as job:
        members = job.await_world(3)
        gpus.set("abort_ms", 3000)
        job.shut("last step")
        job.open("end")
        job.await_held("last step")
        job.send(members[-1], signal.SIGKILL)
        job.open("last step")
        assert job.wait() == 0
        ends = {line["worker_id"]: line["because"] for line in job.events("worker_exited")}
        assert [ends[member] for member in members[:-1]] == ["exited with 0"] * 2


def test_thirty_generations_in_a_row(gpus: FakeDevice, tmp_path: Path) -> None:
    with job_over(gpus, tmp_path) as job:
        for _ in range(15):
            kill_last(job, job.await_world(3))
        job.await_world(3)
        assert job.status()["generation"] >= 30
        finish(job, gpus, lost=15)


def test_a_device_that_no_abort_brings_to_rest_costs_its_workers_and_not_the_job(
    gpus: FakeDevice, tmp_path: Path
) -> None:
    """All members, in an exchange or as they greet a newcomer, while their scripts wait for the device. If they end
    before a newcomer has come, every copy of the state is lost, and kept. It takes a minute."""
    with job_over(gpus, tmp_path, "--snapshot-every", "1 steps") as job:
        job.await_world(3)
        job.until("a snapshot", lambda: job.events("snapshot_complete"))
        gpus.set("abort_in_vain", world=3)
        gpus.set("exchange_hangs", world=3)
        job.send("local.2.0", signal.SIGKILL)
        for survivor in ("local.0.0", "local.1.0"):
            ended = job.await_event("worker_exited", worker_id=survivor)
            assert ended["because"] == "found itself fenced"
        gpus.set("exchange_hangs", 0)
        gpus.set("abort_in_vain", 0)
        job.open("end")
        assert job.wait() == 0
        assert job.events("device_hung")
        assert not job.events("script_failed")
        assert job.steps()[-1]["step"] == STEPS - 1


def test_a_newcomer_that_nccl_cannot_connect_is_tried_less_and_less_often(gpus: FakeDevice, tmp_path: Path) -> None:
    with job_over(gpus, tmp_path) as job:
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
        job.open("end")
        assert job.wait() == 0


def test_a_gpu_that_is_lost_costs_its_slot_and_no_other(gpus: FakeDevice, tmp_path: Path) -> None:
    with job_over(gpus, tmp_path) as job:
        job.await_world(3)
        pids = job.workers()
        gpus.set("devices", 2)
        kill_if_there(pids["local.1.0"])
        kill_if_there(pids["local.2.0"])  # it may have ended already, by an error of the GPU that it has lost
        job.until("another worker of slot 1", lambda: any(w.startswith("local.1.") for w in job.members()))
        given_up = job.await_event("slot_given_up")
        assert "is gone: torch sees GPU-" in given_up["because"]
        job.open("end")
        assert job.wait() == 0
