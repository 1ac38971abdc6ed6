"""Stopping a job whose workers do all they can not to be stopped: everything is gone, and soon."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic import cli
from elastic.checkpoints.series import Series
from elastic.checkpoints.storage import storage_at
from elastic.errors import ExitCode
from elastic.platforms.local.job_run import LEAVE_S
from tests.live.jobs import SCRIPTS, SLACK_S, Job

STOPPED_S = 5.0

STUBBORN = """
import os, signal, subprocess, time
from pathlib import Path

signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
subprocess.Popen(["sleep", "600"])
Path(os.environ["LIVE_GATES"], "ready." + os.environ["ELASTIC_SLOT"]).touch()
time.sleep(600)
"""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory of the command's own, so that what it leaves there is seen."""
    directory = Path(tempfile.mkdtemp(prefix="e"))
    monkeypatch.setenv("TMPDIR", str(directory))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def job(tmp_path: Path, temporary: Path) -> Iterator[Job]:
    """Two workers that ignore every polite signal, each with a child."""
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    with Job(tmp_path, "--quiet", "--workers", "2", "--cold-start", "stubborn.py") as job:
        job.until("both workers are there", lambda: job.held_at("ready") == {"0", "1"})
        yield job


@pytest.mark.parametrize(
    ("number", "to_group", "code"),
    [
        pytest.param(signal.SIGINT, True, 130, id="Ctrl-C at the terminal"),
        pytest.param(signal.SIGINT, False, 130, id="SIGINT", marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, False, 143, id="SIGTERM"),
    ],
)
def test_a_stop_ends_stubborn_and_frozen_workers(
    number: signal.Signals, to_group: bool, code: int, job: Job, temporary: Path
) -> None:
    job.send("local.1.0", signal.SIGSTOP)
    began_s = time.monotonic()
    if to_group:
        os.killpg(job.command.process.pid, number)
    else:
        os.kill(job.command.process.pid, number)
    assert job.wait() == code
    assert time.monotonic() - began_s < STOPPED_S + SLACK_S
    assert (
        job.output == f"elastic: stopped by {number.name}; the same command again goes on from the newest checkpoint\n"
    )
    assert job.left_behind() == {}
    assert list(temporary.iterdir()) == []


TAIL = """
import torch
import elastic
from tests.live.scripts import gates

job = elastic.join()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.register(model=model, optimizer=optimizer)
for step in job.steps(shards=4, total=40):
    for _ in step:
        gates.pace()
        model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
job.close()
gates.hold("tail")
"""


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_stop_after_the_completion_says_that_the_job_is_complete(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "tail.py").write_text(TAIL)
    with Job(tmp_path, "--quiet", "--workers", "2", "tail.py") as job:
        job.shut("tail")
        job.until("it is complete", lambda: (job.dir / "result.json").exists())
        job.until("both are behind their loop", lambda: len(job.held_at("tail")) == 2)
        job.command.process.send_signal(number)
        assert job.wait() == 128 + number
        told = f"elastic: stopped by {number.name} when the job was complete: nothing is left to go on with"
        assert told in " ".join(job.output.split()) and job.result["exit_code"] == 0
    with Job(tmp_path, "--quiet", "--workers", "2", "tail.py") as again:
        assert again.wait() == ExitCode.BAD_INPUT
        assert "holds a completed job" in " ".join(again.output.split())


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_about_the_completion_tells_what_is_kept(number: signal.Signals, tmp_path: Path) -> None:
    """At random moments from the last steps to the end of the command."""
    (tmp_path / "tail.py").write_text(TAIL)
    seed = int(os.environ.get("SEED", time.time_ns() % 10**6))
    print(f"\nSEED={seed}", flush=True)
    random_ = random.Random(seed)
    for turn in range(12):
        words = ("--quiet", "--workers", "2", "--checkpoint-every", "5 steps", "tail.py")
        with Job(tmp_path, *words, name=f"job{turn}") as job:
            job.pace(0.01)
            job.await_steps(38)
            time.sleep(delay_s := random_.uniform(0.0, 0.4))
            job.command.process.send_signal(number)
            code, told = job.wait(), " ".join(job.output.split())
        with Job(tmp_path, *words, name=f"job{turn}") as again:
            if complete := (code == 0 or "when the job was complete" in told):
                assert again.wait() == ExitCode.BAD_INPUT, told
                assert "holds a completed job" in " ".join(again.output.split())
            else:
                assert code in (128 + number, ExitCode.DRAINED), told
                assert again.wait() == 0, told
        print(f"{turn}: after {delay_s:.3f} s: exit code {code}, {'complete' if complete else 'not complete'}")


def test_sigterm_leaves_time_for_a_step_and_a_checkpoint(tmp_path: Path) -> None:
    with Job(tmp_path, "--quiet", "--workers", "2", str(SCRIPTS / "drained.py")) as job:
        job.pace(0.01)
        job.await_steps(3)
        job.command.process.terminate()
        assert job.wait() == ExitCode.DRAINED
        found, _ = Series(storage_at(str(job.dir / "checkpoints"))).newest()
        assert found is not None and found.name.step == len(job.steps()), "something would be done again"
        assert job.left_behind() == {}


@pytest.mark.long
def test_sigterm_does_not_wait_for_a_step_that_does_not_end(tmp_path: Path) -> None:
    with Job(tmp_path, "--quiet", "--workers", "2", str(SCRIPTS / "drained.py")) as job:
        job.await_steps(3)
        job.shut("shard")
        job.await_held("shard")
        began_s = time.monotonic()
        job.command.process.terminate()
        assert job.wait() == ExitCode.TERMINATED
        assert time.monotonic() - began_s < LEAVE_S + STOPPED_S + SLACK_S
        assert job.left_behind() == {}


@pytest.mark.long
def test_a_job_that_loses_its_workers_while_it_stops_does_not_go_on_from_memory(tmp_path: Path) -> None:
    """A service manager may send SIGTERM to every process at once."""
    with Job(tmp_path, "--quiet", "--workers", "2", "--snapshot-every", "1 step", str(SCRIPTS / "drained.py")) as job:
        job.await_steps(3)
        job.until("a snapshot", lambda: any(line["step"] > 0 for line in job.events("snapshot_complete")))
        job.shut("shard")
        job.await_held("shard")
        job.command.process.terminate()
        job.await_event("agent_signalled", signal="SIGTERM")
        for worker_id in ("local.0.0", "local.1.0"):
            job.send(worker_id)
        assert job.wait() == ExitCode.TERMINATED
        assert job.result["exit_code"] == ExitCode.STATE_LOST
        assert job.left_behind() == {}


@pytest.mark.long
def test_a_stop_does_not_wait_for_frozen_services(job: Job, temporary: Path) -> None:
    for service in ("elastic.agent", "elastic.rendezvous"):
        os.kill(job.pid_of(service), signal.SIGSTOP)
    began_s = time.monotonic()
    os.kill(job.command.process.pid, signal.SIGTERM)
    assert job.wait() == ExitCode.TERMINATED
    assert time.monotonic() - began_s < STOPPED_S + SLACK_S
    assert job.left_behind() == {}


@pytest.mark.long
def test_the_death_of_the_agent_takes_its_workers_and_their_children_along(job: Job) -> None:
    os.kill(job.pid_of("elastic.agent"), signal.SIGKILL)
    assert job.wait() == ExitCode.STATE_LOST
    assert "the agent was ended by SIGKILL" in job.output
    assert job.left_behind() == {}


def test_a_sigkill_of_the_command_leaves_a_directory_that_no_other_job_takes(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.kill(job.command.process.pid, signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
    assert job.left_behind() == {}
    assert (
        cli.main(["run", "--job-dir", str(job.dir), "--name", "other", str(tmp_path / "stubborn.py")])
        == ExitCode.BAD_INPUT
    )
    said = " ".join(capsys.readouterr().err.split())
    assert "holds the interrupted job" in said
    assert "--fresh" in said
