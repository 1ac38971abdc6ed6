"""Everything killed, and the same command again: the bits of the quiet run, and the ledger says what was done twice."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from chaos_tests.nemesis import signals
from elastic.checkpoints.series import Series
from elastic.checkpoints.storage import storage_at
from elastic.errors import ExitCode
from elastic.records import ledger
from tests.live.conftest import Quiet
from tests.live.jobs import SCRIPTS, TRAINER, Job

OPTIONS = ("--workers", "2", "--checkpoint-every", "4 steps", "--quiet")


def series_of(job: Job) -> Series:
    return Series(storage_at(str(job.dir / "checkpoints")))


def memory_of(job: Job) -> Path:
    """Where its snapshots lie."""
    return Path(json.loads((job.dir / "checkpoints.json").read_bytes())["memory"])


def test_a_job_that_was_killed_goes_on_from_its_newest_checkpoint(tmp_path: Path, quiet: Quiet) -> None:
    with Job(tmp_path, *OPTIONS, str(TRAINER)) as job:
        job.pace(0.02)
        job.await_event("checkpoint_complete")
        job.await_steps(7)
        job.command.process.kill()
        job.wait()
        assert job.left_behind() == {}
        assert not memory_of(job).exists(), "a snapshot outlives its command"
    found, _ = series_of(job).newest()
    assert found is not None
    before = len(ledger.read(job.dir / "steps.jsonl"))
    with Job(tmp_path, *OPTIONS, str(TRAINER)) as job:
        assert job.wait() == 0, job.story()
        said = " ".join(job.output.split())
        assert f"goes on from step {found.name.step}, checkpoint {found.name}" in said
    assert job.result["digest"] == quiet.digest
    assert ledger.compare(ledger.read(job.dir / "steps.jsonl"), quiet.steps) is None
    (resume,) = map(json.loads, (job.dir / "resumes.jsonl").read_text().splitlines())
    assert resume["step"] == found.name.step
    assert resume["redone"] == ([found.name.step, before - 1] if before > found.name.step else None)
    assert before - found.name.step <= 2 * 4
    assert (job.dir / "runs" / "1" / "journal").is_dir()


def kill_every_worker(job: Job) -> None:
    """At once: none of them sees another one die."""
    pids = job.workers().values()
    signals.freeze(pids)
    signals.send(pids, signal.SIGKILL)


@pytest.mark.long
def test_a_job_that_loses_every_worker_goes_on_from_memory(tmp_path: Path, quiet: Quiet) -> None:
    options = ("--workers", "2", "--json", "--checkpoint-every", "60 steps", "--snapshot-every", "2 steps")
    with Job(tmp_path, *options, str(TRAINER)) as job:
        job.pace(0.005)
        job.shut("step 100")
        step = job.await_event("checkpoint_complete", series="_periodic")["step"]
        job.until("a newer snapshot", lambda: any(line["step"] > step for line in job.events("snapshot_complete")))
        kill_every_worker(job)
        job.open("step 100")
        job.until("it goes on", (job.dir / "resumes.jsonl").exists)
        job.pace(0)
        assert job.wait() == 0, job.story()
        said = " ".join(job.output.split())
        assert not memory_of(job).exists()
    (resume,) = map(json.loads, (job.dir / "resumes.jsonl").read_text().splitlines())
    (summary,) = [json.loads(line) for line in job.output.splitlines() if line.startswith('{"event": "summary"')]
    (resumed,) = summary["resumes"]
    assert resumed == {name: resume[name] for name in resumed} and summary["exit_code"] == 0
    assert resume["memory"] is True
    assert step < resume["step"] <= 100, "newer than the only checkpoint on disk"
    assert resume["redone"] is None or resume["redone"][0] == resume["step"]
    assert f"goes on from step {resume['step']}, snapshot in memory {resume['checkpoint']}" in said
    assert job.result["digest"] == quiet.digest
    assert ledger.compare(ledger.read(job.dir / "steps.jsonl"), quiet.steps) is None


@pytest.mark.long
def test_a_snapshot_that_turns_out_to_be_damaged_while_it_is_loaded_costs_steps_and_not_the_job(
    tmp_path: Path, quiet: Quiet
) -> None:
    options = ("--workers", "2", "--checkpoint-every", "60 steps", "--snapshot-every", "2 steps")
    with Job(tmp_path, *options, str(SCRIPTS / "flipping.py")) as job:
        job.pace(0.005)
        step = job.await_event("checkpoint_complete", series="_periodic")["step"]
        job.pace(0.02)
        job.until("a newer snapshot", lambda: any(line["step"] > step for line in job.events("snapshot_complete")))
        kill_every_worker(job)
        resumes = job.dir / "resumes.jsonl"
        job.until("it goes on twice", lambda: resumes.exists() and len(resumes.read_text().splitlines()) == 2)
        job.pace(0)
        assert job.wait() == 0, job.story()
        said = " ".join(job.output.split())
    first, second = map(json.loads, resumes.read_text().splitlines())
    assert first["memory"] and first["step"] > step
    assert (second["memory"], second["step"]) == (False, step)
    assert f"cannot go on from the snapshot {first['checkpoint']}, which is removed" in said
    assert f"goes on from step {step}, checkpoint {second['checkpoint']}" in said
    assert job.result["digest"] == quiet.digest
    assert ledger.compare(ledger.read(job.dir / "steps.jsonl"), quiet.steps) is None


@pytest.mark.long
def test_a_resumed_job_whose_only_member_dies_before_its_first_step_begins_there_again(
    tmp_path: Path, quiet: Quiet
) -> None:
    words = ("--workers", "1", "--checkpoint-every", "5 steps", "--snapshot-every", "off", "--quiet", str(TRAINER))
    with Job(tmp_path, *words) as job:
        job.pace(0.02)
        job.await_event("checkpoint_complete")
        job.command.process.terminate()
        assert job.wait() in (ExitCode.DRAINED, ExitCode.TERMINATED)  # the latter on a machine too busy for a step
    with Job(tmp_path, *words) as job:
        job.pace(0.0)
        job.shut("shard")
        (member,) = job.await_held("shard")
        job.send(member)
        job.until("the next one", lambda: job.held_at("shard") - {member})
        job.open("shard")
        assert job.wait() == 0
        (again,) = [line for line in job.events("committed", kind="form") if line["generation"] > 1]
        assert "before a step was applied; begins again from checkpoint step-" in again["because"]
        assert job.result["digest"] == quiet.digest
        assert len(job.steps()) == len(quiet.steps)
