"""What a job writes, and what its members do together between steps, while members die in it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.checkpoints.manifest import Manifest
from elastic.checkpoints.series import Series
from elastic.checkpoints.storage import storage_at
from elastic.records import ledger
from tests.live.conftest import Quiet
from tests.live.jobs import DEADLINE_S, ROOT, TRAINER, Job

PACE_S = 0.1
JOURNAL_FIELDS = {"t_mono_ns", "t_wall", "job", "generation", "worker_id", "node", "pid", "who", "event"}


def best(job_dir: Path) -> Manifest | None:
    """The newest complete save of that name."""
    found, skipped = Series(storage_at(str(job_dir / "checkpoints")), "best").newest()
    assert all(entry.unfinished for entry in skipped)
    return found.manifest if found is not None else None


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Three workers; the tests of this file go on with it one after the other."""
    with Job(tmp_path_factory.mktemp("files"), "--workers", "3", "--quiet", str(TRAINER)) as job:
        job.pace(PACE_S)
        for gate in ("end", "evaluate", "save"):
            job.shut(gate)
        job.await_world(3)
        yield job


def test_status_as_json_while_it_runs(job: Job) -> None:
    command = [sys.executable, "-m", "elastic.cli", "status", "--job-dir", str(job.dir), "--json"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=DEADLINE_S, check=True).stdout
    document = json.loads(said)
    generation = job.events("committed")[-1]["generation"]
    assert (document["job"], document["state"], document["generation"]) == ("trainer", "running", generation)
    workers = job.workers()
    for rank, member in enumerate(document["members"]):
        assert member["rank"] == rank
        assert member["pid"] == workers[member["worker_id"]]
        assert 0 < member["applied"] <= len(job.steps()) + 1


def test_a_worker_is_killed_in_the_second_pass_of_a_step(job: Job) -> None:
    """The first pass is installed and applied to the weights already; whoever waits at the gate owes the second its
    shards. Survivors stay there until the replacement is up, so that it joins long before the epoch ends."""
    job.shut("second pass")
    job.send(min(job.await_held("second pass")))
    job.await_event("redo_started")
    job.until("its replacement is up", lambda: job.status().get("waiting"))
    job.open("second pass")
    job.await_world(3)


def test_a_worker_is_killed_in_an_evaluation_and_the_leader_in_a_save(job: Job) -> None:
    job.pace(0.02)
    job.until("all three evaluate", lambda: len(job.held_at("evaluate") & set(job.workers())) == 3)
    job.pace(PACE_S)
    leader, victim, _ = job.members()
    job.send(victim)
    job.until("the loss is decided", lambda: victim not in job.members() and job.members())
    job.open("evaluate")
    job.until("both save", lambda: len(job.held_at("save") & set(job.workers())) == 2)
    assert best(job.dir) is None, "nothing may count before it is complete"
    job.send(leader)
    job.until("the loss is decided", lambda: leader not in job.members() and job.members())
    job.open("save")
    first = job.until("the save of the survivor", lambda: best(job.dir))
    assert (first.moment.step, first.moment.epoch, first.moment.seed) == (20, 0, 7)
    assert set(first.header["objects"]) == {"model", "optimizer", "scheduler", "clerk"}
    assert job.events("checkpoint_part_taken_over", of=leader)


def test_the_leader_is_killed_in_once_and_the_next_one_repeats_it(job: Job) -> None:
    leader = job.await_world(3)[0]
    job.shut("once")
    held = job.await_held("once")
    assert held == {leader}, "the leader alone runs it"
    job.send(leader)
    job.until("the next leader runs it", lambda: job.held_at("once") - held)
    job.open("once")


def test_all_of_that_ended_as_if_nothing_had_happened(job: Job, quiet: Quiet) -> None:
    job.pace(0)
    job.open("end")
    assert job.wait() == 0
    assert job.result["digest"] == quiet.digest
    assert ledger.compare(quiet.steps, job.steps()) is None
    assert len(job.steps()) == 151, "stop() ended the run after the step in which it was called"
    signed = [int(line.split()[0]) for line in (job.dir / "once.txt").read_text().splitlines()]
    assert signed == list(range(8))
    ours, theirs = best(job.dir), best(quiet.dir)
    assert ours is not None and theirs is not None
    assert (ours.moment, ours.header) == (theirs.moment, theirs.header)
    assert job.left_behind() == {}


def test_the_merged_journal_has_every_field_in_every_line_by_time(job: Job) -> None:
    lines = [json.loads(text) for text in (job.dir / "journal.jsonl").read_text().splitlines()]
    assert len(lines) > 100
    assert all(set(line) >= JOURNAL_FIELDS for line in lines)
    assert {line["job"] for line in lines} == {"trainer"}
    times = [line["t_mono_ns"] for line in lines]
    assert times == sorted(times)


def test_nothing_else_is_left_in_the_job_directory(job: Job) -> None:
    names = {path.name for path in job.dir.iterdir()}
    expected = {"job.json", "lock", "rendezvous.json", "result.json", "steps.jsonl", "journal", "journal.jsonl", "logs"}
    written = {"checkpoints", "checkpoints.json", "flight", "id", "once.txt", "local.slots.json", "run.lock"}
    assert names - expected == written
