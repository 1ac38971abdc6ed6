"""The files of jobs, as a process follows them that others may kill, resume and remove meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from elastic.metrics import follower as follower_module
from elastic.metrics.follower import CLOSED_S, Follower, JobsIn
from elastic.metrics.job_fold import JobFold
from elastic.metrics.metric_registry import MetricRegistry
from elastic.records import job_follower
from elastic.records.job_follower import SETTLE_NS, Growing, JobFiles
from elastic.records.journal import Journal, journal_path
from tests.unit.elastic.metrics.test_job_fold import shown

LATER_NS = 1 << 62
"""Later than any line."""


def step(job_dir: Path, *numbers: int) -> None:
    with (job_dir / "steps.jsonl").open("a") as ledger:
        ledger.writelines(json.dumps({"step": number, "samples": [[number]]}) + "\n" for number in numbers)


def start(job_dir: Path, count: int, who: str = "agent-n") -> None:
    with Journal(journal_path(job_dir, who), "j", who, "n") as journal:
        for number in range(count):
            journal.write("worker_started", worker_id=f"n.0.{number}")


def files_of(job_dir: Path, registry: MetricRegistry) -> JobFiles:
    return JobFiles(job_dir, JobFold(registry, "j"), from_end=True)


def test_what_was_written_before_the_process_began_is_not_counted(tmp_path: Path) -> None:
    """A restarted process begins at 0; the step number goes on."""
    step(tmp_path, *range(50))
    start(tmp_path, 7)
    registry = MetricRegistry()
    files = files_of(tmp_path, registry)
    files.look(LATER_NS, 0.0)
    assert ("elastic_job_steps_total", "j") not in shown(registry)
    step(tmp_path, 50, 51)
    start(tmp_path, 1)
    start(tmp_path, 2, who="agent-late")  # a process that began later
    files.look(LATER_NS, 0.0)
    seen = shown(registry)
    assert seen["elastic_job_steps_total", "j"] == 2 and seen["elastic_job_step", "j"] == 51
    assert seen["elastic_workers_started_total", "j"] == 3


def test_a_run_that_begins_again_puts_journals_aside_and_no_count_goes_back(tmp_path: Path) -> None:
    registry = MetricRegistry()
    files = files_of(tmp_path, registry)
    start(tmp_path, 5)
    step(tmp_path, *range(10))
    files.look(LATER_NS, 0.0)
    (tmp_path / "runs" / "1").mkdir(parents=True)
    (tmp_path / "journal").rename(tmp_path / "runs" / "1" / "journal")
    resume = {"run": 2, "redone": [6, 9]}
    (tmp_path / "resumes.jsonl").write_text(json.dumps(resume) + "\n")
    files.look(LATER_NS, 0.0)
    start(tmp_path, 9)  # longer than what it replaces
    (tmp_path / "resumes.jsonl").write_text(json.dumps(resume) + "\n" + json.dumps({"run": 3, "redone": None}) + "\n")
    step(tmp_path, 10)
    files.look(LATER_NS, 0.0)
    seen = shown(registry)
    assert seen["elastic_workers_started_total", "j"] == 14
    assert seen["elastic_job_steps_total", "j"] == 11
    assert seen["elastic_recoveries_total", "j", "resume"] == 2
    assert seen["elastic_steps_redone_total", "j"] == 4


def test_torn_and_foreign_lines_are_left_out_and_completed_ones_taken(tmp_path: Path) -> None:
    registry = MetricRegistry()
    files = files_of(tmp_path, registry)
    start(tmp_path, 1)
    with (tmp_path / "steps.jsonl").open("w") as ledger:
        ledger.write('{"step": 0, "samples": [[1]]}\nnonsense\n[1]\n{"step": 1, "sam')
        ledger.flush()
        files.look(LATER_NS, 0.0)
        assert shown(registry)["elastic_job_steps_total", "j"] == 1
        ledger.write('ples": [[2]]}\n')
    files.look(LATER_NS, 0.0)
    assert shown(registry)["elastic_job_steps_total", "j"] == 2


def test_a_long_journal_is_read_in_pieces_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 MB take 25 looks; here 64 KiB take some."""
    monkeypatch.setattr(job_follower, "READ_BYTES", 1 << 12)
    registry = MetricRegistry()
    files = files_of(tmp_path, registry)
    start(tmp_path, 300)
    size = journal_path(tmp_path, "agent-n").stat().st_size
    counts = [0.0]
    for _ in range(size // (1 << 12) + 2):
        files.look(LATER_NS, 0.0)
        counts.append(shown(registry)["elastic_workers_started_total", "j"])
    assert counts[1] < 30 and counts[-1] == 300 and counts == sorted(counts)


def test_a_line_as_young_as_the_look_waits_so_that_processes_stay_in_order(tmp_path: Path) -> None:
    registry = MetricRegistry()
    files = files_of(tmp_path, registry)
    start(tmp_path, 1)
    written_ns = json.loads(journal_path(tmp_path, "agent-n").read_bytes())["t_mono_ns"]
    files.look(written_ns, 0.0)
    assert ("elastic_workers_started_total", "j") not in shown(registry)
    files.look(written_ns + SETTLE_NS, 0.0)
    assert shown(registry)["elastic_workers_started_total", "j"] == 1


def job_in(parent: Path, name: str) -> Path:
    (parent / name / "journal").mkdir(parents=True)
    (parent / name / "job.json").write_text("{}")
    return parent / name


def test_jobs_of_a_node_come_end_and_are_forgotten(tmp_path: Path) -> None:
    over = job_in(tmp_path, "over")
    (over / "result.json").write_text("{}")
    registry = MetricRegistry()
    jobs = JobsIn(tmp_path, registry, leader_only=False)
    new = job_in(tmp_path, "new")
    removed = job_in(tmp_path, "removed")
    for job_dir in (over, new, removed):
        step(job_dir, 0)
    jobs.look(0, 0.0)
    counted = {key[1] for key in shown(registry) if key[0] == "elastic_job_steps_total"}
    assert counted == {"new", "removed"}
    shutil.rmtree(removed)
    (new / "result.json").write_text("{}")
    jobs.look(1, 0.0)
    assert {key[1] for key in shown(registry) if key[0] == "elastic_job_steps_total"} == {"new"}
    jobs.look(int(CLOSED_S * 1e9) + 2, 0.0)
    jobs.look(int(CLOSED_S * 1e9) + 3, 0.0)
    assert not any("new" in key for key in shown(registry))


def test_what_raises_for_one_job_keeps_no_other_from_being_looked_at(tmp_path: Path) -> None:
    """Also where it raised as the process began; and as soon as it can be read it is, from where it was then."""
    broken = [job_in(tmp_path, f"broken-{number}") for number in range(4)]
    for job_dir in broken:
        (job_dir / "resumes.jsonl").write_text("nonsense\n")
        step(job_dir, 0)
    registry = MetricRegistry()
    jobs = JobsIn(tmp_path, registry, leader_only=False)
    for number in range(4):
        step(job_in(tmp_path, f"good-{number}"), 0)
    for time_ns in range(2):
        with pytest.raises(ValueError, match="Expecting value"):
            jobs.look(time_ns, 0.0)
    assert {key[1] for key in shown(registry) if key[0] == "elastic_job_steps_total"} == {
        f"good-{number}" for number in range(4)
    }
    for job_dir in broken:
        (job_dir / "resumes.jsonl").unlink()
    jobs.look(2, 0.0)
    for job_dir in broken:
        step(job_dir, 1)
    jobs.look(3, 0.0)
    assert {value for key, value in shown(registry).items() if key[0] == "elastic_job_steps_total"} == {1.0}


@pytest.mark.parametrize("name", ["steps.jsonl", "resumes.jsonl", "lock", "run.lock", "journal/agent-n.jsonl"])
def test_a_fifo_in_the_directory_of_a_job_blocks_nobody(tmp_path: Path, name: str) -> None:
    """The job may run as another user than the one who looks."""
    os.mkfifo(job_in(tmp_path, "early") / name)
    jobs: list[JobsIn] = []

    def look() -> None:
        registry = MetricRegistry()
        jobs.append(JobsIn(tmp_path, registry, leader_only=False))
        os.mkfifo(job_in(tmp_path, "late") / name)
        with contextlib.suppress(OSError):  # that is told
            jobs[0].look(0, 0.0)
        jobs.append(jobs[0])

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    looking.join(20)
    assert len(jobs) == 2, "it hangs, or has failed"


def test_a_torn_last_line_that_was_there_before_brings_no_old_lines_when_it_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "steps.jsonl"
    whole = [json.dumps({"step": number, "samples": [[number]]}) + "\n" for number in range(100)]
    for block in (1 << 16, 7):
        monkeypatch.setattr(job_follower, "BLOCK_BYTES", block)
        path.write_text("".join(whole) + whole[0][:25])
        lines = Growing(path, from_end=True)
        path.write_text("".join(whole))
        assert lines.lines() == []
        path.write_text("".join(whole) + whole[7])
        assert lines.lines() == [whole[7].strip().encode()]
    path.write_text(whole[0][:25])
    lines = Growing(path, from_end=True)
    path.write_text(whole[0])
    assert lines.lines() == [whole[0].strip().encode()]


def test_a_look_that_fails_is_counted_is_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "LOOK_S", 0.001)
    registry, looked, broken = MetricRegistry(), threading.Semaphore(0), threading.Event()
    broken.set()

    def fails(now_ns: int, now_wall: float) -> None:
        if broken.is_set():
            raise OSError("no such disk")

    def looks(now_ns: int, now_wall: float) -> None:
        looked.release()

    def await_looks() -> None:
        """Two whole ones from now on."""
        while looked.acquire(blocking=False):
            continue
        assert all(looked.acquire(timeout=60) for _ in range(4))

    follower = Follower(registry, fails, looks)
    try:
        await_looks()
        assert follower.problem == "OSError: no such disk"
        assert shown(registry)["elastic_metrics_failures_total",] >= 2
        broken.clear()
        await_looks()
        assert follower.problem == ""
    finally:
        follower.close()
