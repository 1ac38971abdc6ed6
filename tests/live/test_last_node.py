"""`elastic run` on a machine that has to go: training goes on to the last call, and then stops in order, once."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from elastic.checkpoints.series import Series
from elastic.checkpoints.storage import storage_at
from elastic.errors import ExitCode
from tests.live.jobs import SCRIPTS, Job

pytestmark = pytest.mark.long

DRAINED = SCRIPTS / "drained.py"


def told(job: Job, what: str, worker_id: str) -> list[str]:
    path = job.gates / f"{what}.{worker_id}"
    return path.read_text().splitlines() if path.exists() else []


def give_notice(job: Job, seconds_left: float) -> Path:
    path = job.dir.parent / "notice"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"seconds_left": seconds_left, "because": "rack 7 is switched off"}))
    temporary.rename(path)
    return path


def start(home: Path, *words: str) -> Job:
    return Job(home, "--workers", "2", "--notices", f"file:{home / 'notice'}", *words, str(DRAINED))


def test_all_stop_after_the_same_step(tmp_path: Path) -> None:
    with start(tmp_path) as job:
        job.pace(0.01)
        job.await_world(2)
        give_notice(job, 6.0)
        assert job.wait() == ExitCode.DRAINED
        assert "every node had to go" in job.output
        assert "node local has to go within 6 s: rack 7 is switched off" in job.output
        result = job.result
        assert result["exit_code"] == ExitCode.DRAINED
        for worker_id in ("local.0.0", "local.1.0"):
            assert told(job, "drain", worker_id) == ["rack 7 is switched off"]
        assert job.events("quiesce_started") == []
        applied = [line["step"] for line in job.steps()]
        assert applied == list(range(len(applied)))
        found, _ = Series(storage_at(str(job.dir / "checkpoints"))).newest()
        assert found is not None and found.name.step == len(applied), "something would be done again"
        assert job.left_behind() == {}


def test_with_long_steps_all_stop_after_a_checkpoint_too(tmp_path: Path) -> None:
    """With passes of 6 s all begin to stop 25 s before the end, as half of the time is over then. The checkpoint that
    is wished for 20 s before the end would be too late for a stop that begins 15 s before it."""
    with start(tmp_path) as job:
        job.pace(3.0)
        job.await_world(2)
        job.until("a pass whose length is known", lambda: len(job.steps()) >= 2)
        give_notice(job, 50.0)
        assert job.wait() == ExitCode.DRAINED
        found, _ = Series(storage_at(str(job.dir / "checkpoints"))).newest()
        assert found is not None and found.name.step == len(job.steps()), "something would be done again"


def test_sigterm_with_a_grace_is_a_notice_and_another_one_stops_at_once(tmp_path: Path) -> None:
    for grace, again, code in (("2", False, ExitCode.DRAINED), ("300", True, ExitCode.TERMINATED)):
        with Job(tmp_path, "--workers", "2", "--grace", grace, str(DRAINED), name=f"job-{grace}") as job:
            job.pace(0.01)
            job.await_world(2)
            job.command.process.terminate()
            job.await_event("node_leaves", because="it was asked to stop (SIGTERM)")
            if again:
                job.command.process.terminate()
            assert job.wait() == code
            assert job.left_behind() == {}
            assert ("every node had to go" in job.output) is not again


def test_a_notice_that_is_taken_back_in_time_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIVE_STEPS", "400")
    with start(tmp_path) as job:
        job.pace(0.03)
        job.shut("end")
        job.await_world(2)
        generation, before = job.status()["generation"], len(job.steps())
        notice = give_notice(job, 300.0)
        job.until("the script to have heard it", lambda: told(job, "drain", "local.0.0"))
        notice.unlink()
        job.await_event("node_stays")
        job.finish()
        assert len(job.steps()) == 400
        assert {line["generation"] for line in job.steps()[before + 1 :]} == {generation}
        assert "node local stays: the notice was taken back" in job.output


def test_slurm_signals_the_command_and_takes_the_job_back_when_the_workers_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/scontrol.said\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(scontrol.parent), prepend=":")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 16))
    with Job(tmp_path, "--workers", "2", "--notices", "slurm:requeue", str(DRAINED)) as job:
        job.pace(0.01)
        job.await_world(2)
        os.kill(job.command.process.pid, signal.SIGUSR1)
        job.await_event("node_leaves", because="Slurm job 77 reaches its time limit")
        assert job.wait() == ExitCode.DRAINED
        assert (tmp_path / "scontrol.said").read_text() == "requeue 77\n"


def test_the_only_copy_of_the_state_is_not_ended_for_a_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIVE_STEPS", "400")
    with start(tmp_path) as job:
        job.pace(0.01)
        job.await_world(2)
        job.shut("shard")
        job.await_held("shard")
        give_notice(job, 1.0)
        job.await_event("node_out")
        time.sleep(0.5)  # long enough for a signal that must not come
        assert len(job.workers()) == 2
        job.open("shard")
        assert job.wait() == ExitCode.DRAINED
        assert job.events("member_lost") == []


def test_the_script_hears_of_every_size_of_its_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIVE_STEPS", "600")
    with Job(tmp_path, "--workers", "2", "--no-replace", str(DRAINED)) as job:
        job.pace(0.03)
        job.shut("end")
        job.await_world(2)
        job.send("local.1.0")
        job.until("the survivor to hear it", lambda: told(job, "resize", "local.0.0"))
        job.finish()
        (line,) = told(job, "resize", "local.0.0")
        assert line.startswith("2 1 local.1.0 lost: killed by SIGKILL")
