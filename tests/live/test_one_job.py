"""One job through all that it survives: kills in each of its stages, of its leader and its etcd, and a freeze.

Status, metrics and dashboard show it, it ends in the bits of the quiet run, and story and trace tell of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos_tests.nemesis.out_of_memory import starve, why_not
from elastic import cli
from elastic.checkpoints.manifest import Manifest
from elastic.checkpoints.series import Series
from elastic.checkpoints.storage import storage_at
from elastic.config import Timing
from elastic.errors import ExitCode
from elastic.records import journal, ledger
from tests.live.conftest import Quiet
from tests.live.dashboard_page import PageClient, address_in
from tests.live.jobs import DEADLINE_S, ROOT, TRAINER, Job
from tests.live.test_freeze import expelled
from tests.live.test_metrics import free_ports

PACE_S = 0.1
EPOCH_STEPS = 20
JOURNAL_FIELDS = {"t_mono_ns", "t_wall", "job", "generation", "worker_id", "node", "pid", "who", "event"}


def best(job_dir: Path) -> Manifest | None:
    """The newest complete save of that name."""
    found, skipped = Series(storage_at(str(job_dir / "checkpoints")), "best").newest()
    assert all(entry.unfinished for entry in skipped)
    return found.manifest if found is not None else None


@pytest.fixture(scope="module")
def port() -> int:
    """Of the metrics."""
    (port,) = free_ports(1)
    return port


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, port: int) -> Iterator[Job]:
    """Three workers; the tests of this file go on with it one after the other."""
    options = ("--workers", "3", "--metrics", str(port), "--dashboard")
    with Job(tmp_path_factory.mktemp("one"), *options, str(TRAINER)) as job:
        job.pace(1.0)  # nobody joins behind the first epoch, which a worker begins alone where the others start slowly
        for gate in ("end", "evaluate", "save"):
            job.shut(gate)
        job.await_world(3)
        job.pace(PACE_S)
        yield job


def test_status_as_json_while_it_runs(job: Job) -> None:
    command = [sys.executable, "-m", "elastic.cli", "status", "--job-dir", str(job.dir), "--json"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=DEADLINE_S, check=True).stdout
    document = json.loads(said)
    generation = job.events("committed")[-1]["generation"]
    assert (document["job"], document["state"], document["generation"]) == ("trainer", "running", generation)
    assert [member["worker_id"] for member in document["members"]] == job.members()
    workers = job.workers()
    for rank, member in enumerate(document["members"]):
        assert member["rank"] == rank
        assert member["pid"] == workers[member["worker_id"]]
        assert 0 < member["applied"] <= len(job.steps()) + 1


def test_a_second_command_on_its_directory_is_refused(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--job-dir", str(job.dir), "--fresh", str(TRAINER)]) == ExitCode.BAD_INPUT
    assert "in use by a live job" in " ".join(capsys.readouterr().err.split())
    assert job.command.process.poll() is None


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


def test_a_short_pause_expels_nobody(job: Job) -> None:
    """Every worker in turn, the donor among them, stands still for a moment. Where this process itself was paused
    meanwhile, and it was longer, a worker may have been expelled."""
    job.await_world(3)
    generation, longest_s = job.status()["generation"], 0.0
    for worker in job.members():
        steps, begun_s = len(job.steps()), time.monotonic()
        job.send(worker, signal.SIGSTOP)
        time.sleep(Timing().beat_s)
        job.send(worker, signal.SIGCONT)
        longest_s = max(longest_s, time.monotonic() - begun_s)
        job.await_steps(steps + 2)
    if longest_s < Timing().stopped_s - Timing().beat_s:
        assert job.events("expelled") == []
        assert job.status()["generation"] == generation
    job.await_world(3)


def test_a_frozen_worker_is_expelled_and_finds_itself_fenced_when_thawed(job: Job) -> None:
    # In a long epoch: a newcomer that comes at the end of one is too late, and another one follows.
    job.until("an epoch has begun", lambda: 0 < len(job.steps()) % EPOCH_STEPS < EPOCH_STEPS // 2)
    job.pace(0.3)
    worker = job.members()[1]
    pid, (_, slot, incarnation) = job.workers()[worker], worker.split(".")
    frozen_ns = time.monotonic_ns()
    job.send(worker, signal.SIGSTOP)
    expelled(job, worker, frozen_ns)
    job.send(worker, signal.SIGCONT)
    exit_ = job.await_event("worker_exited", worker_id=worker)
    assert (exit_["pid"], exit_["because"]) == (pid, "found itself fenced")
    assert job.events("kill", worker_id=worker) == []
    assert f"local.{slot}.{int(incarnation) + 1}" in job.await_world(3), "its slot comes back as a newcomer"
    job.pace(PACE_S)


def test_a_worker_and_the_leader_of_the_job_are_killed(job: Job) -> None:
    """SIGKILL of a worker, by the kernel for want of memory where a test can bring that about, then of the rendezvous
    service: a survivor keeps its process."""
    survivor, victim, _ = job.await_world(3)
    pid, steps = job.workers()[survivor], len(job.steps())
    if starves := not why_not():
        starve(job.workers()[victim])
    else:
        job.send(victim)
    job.until("a step without it", lambda: any(line["world_size"] == 2 for line in job.steps()[steps:]))
    os.kill(job.pid_of("elastic.rendezvous"), signal.SIGKILL)
    job.until("it is started again", lambda: len(job.events("leading")) == 2)
    assert survivor in job.await_world(3)
    assert {line["pid"] for line in journal.read(journal.journal_path(job.dir, survivor))} == {pid}
    assert {line["worker_id"] for line in job.events("worker_out_of_memory")} == ({victim} if starves else set())
    for told in job.events("worker_out_of_memory"):
        assert told["because"].endswith("probably this one"), "its cgroup is not the agent's"
        assert told["peak_bytes"] > 10e6
        job.until("the command says so", lambda: f"{victim} was killed: a process of this machine" in job.output)


def test_a_killed_etcd_is_started_again_with_its_data(job: Job) -> None:
    """A worker that dies meanwhile is replaced."""
    victim = job.members()[2]
    os.kill(job.pid_of("--data-dir=data"), signal.SIGKILL)
    job.send(victim)
    job.until("a world without it", lambda: job.members() and victim not in job.members())
    job.await_world(3)


def test_metrics_and_the_dashboard_have_counted_it(job: Job, port: int) -> None:
    lost = len(job.events("member_lost"))
    assert lost >= 7

    def counted() -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S) as answer:
            lines = answer.read().decode().splitlines()
        return 'elastic_job_members{elastic_job="trainer"} 3.0' in lines

    job.until("three members in the metrics", counted)
    page = PageClient(job.until("its address", lambda: address_in(job.output)))
    assert page.session["mode"] == "job" and page.session["job"] == job.dir.name
    job.until("three members on the page", lambda: page.job()["generations"][-1]["members"] == 3)
    assert page.job()["summary"]["time"]["goodput"] > 0


def test_all_of_that_ended_as_if_nothing_had_happened(job: Job, quiet: Quiet) -> None:
    job.finish()
    assert "recoveries, median" in job.output
    assert "rendezvous service ended (SIGKILL)" in job.output
    assert job.output.count("etcd ended (SIGKILL); training goes on, and it is started again") == 1
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


def test_its_story_and_its_trace_are_told(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    victim = job.events("member_lost")[0]["worker_id"]
    assert cli.main(["story", victim, "--job-dir", str(job.dir)]) == 0
    assert "killed by SIGKILL" in capsys.readouterr().out
    assert cli.main(["trace", "--job-dir", str(job.dir)]) == 0
    trace = json.loads(capsys.readouterr().out)["traceEvents"]
    recoveries = [event["args"]["lost"] for event in trace if event.get("cat") == "recovery"]
    assert recoveries[0] == [victim]
    assert {"generation", "computes", "exchange", "copy"} <= {event.get("cat") for event in trace if event["ph"] == "X"}
