"""What does not work although training goes on: when it begins, and for as long as it lasts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from elastic import cli
from elastic.checkpoints.settings import Settings
from elastic.records.events import problems
from elastic.records.events.alerts import Alerts
from elastic.records.events.problems import Problem
from elastic.records.journal import Journal, journal_path


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Journal]:
    (tmp_path / "job.json").touch()
    (tmp_path / "checkpoints.json").write_text(json.dumps(asdict(Settings(memory="/dev/shm/x", snapshot_every="auto"))))
    with Journal(journal_path(tmp_path, "local.0.0"), "job", "local.0.0", "local", "local.0.0") as journal:
        yield journal


def failed(journal: Journal, step: int) -> None:
    journal.write("snapshot_failed", series="_periodic", entry=f"step-{step}", because="OSError: No space left")


def test_snapshots_that_fail_are_told_once_and_stand_in_status_until_one_is_whole(
    tmp_path: Path, worker: Journal
) -> None:
    notices = Alerts(tmp_path)
    worker.write("snapshot_complete", step=4)
    assert notices.poll() == [] and problems.of_job(tmp_path) == []
    failed(worker, 6)
    (said,) = notices.poll()
    assert said.startswith("a copy of the state could not be put into the memory of node local: OSError: No space left")
    assert "its newest copy there is of step 4; it is tried again; see what fills /dev/shm" in said
    failed(worker, 8)
    assert notices.poll() == []
    (trouble,) = problems.of_job(tmp_path)
    assert (trouble.about, trouble.where) == ("snapshots", "local")
    assert trouble.because.startswith("2 copies of the state in a row could not be put into the memory of node local")
    worker.write("snapshot_complete", step=10)
    assert notices.poll() == [] and problems.of_job(tmp_path) == []
    failed(worker, 12)
    assert len(notices.poll()) == 1


def test_a_failure_that_all_workers_of_a_node_see_is_one(tmp_path: Path, worker: Journal) -> None:
    failed(worker, 6)
    with Journal(journal_path(tmp_path, "local.1.0"), "job", "local.1.0", "local", "local.1.0") as other:
        failed(other, 6)
    with Journal(journal_path(tmp_path, "far.0.0"), "job", "far.0.0", "far", "far.0.0") as other:
        other.write("snapshot_complete", step=6)
    (trouble,) = problems.of_job(tmp_path)
    assert trouble.because.startswith("a copy of the state") and "there is no copy there" in trouble.because


def test_snapshots_that_are_left_out_now_and_then_are_no_trouble_and_in_a_row_they_are(
    tmp_path: Path, worker: Journal
) -> None:
    def skip(times: int) -> None:
        for step in range(times):
            worker.write("snapshot_skipped", step=step, because="the one before is still being written")

    skip(problems.SKIPS - 1)
    worker.write("snapshot_complete", step=4)
    skip(problems.SKIPS - 1)
    assert problems.of_job(tmp_path) == []
    skip(1)
    (trouble,) = problems.of_job(tmp_path)
    assert trouble.because.startswith("3 copies of the state in a row were left out of the memory of node local")
    assert "--snapshot-every" in trouble.advice


def test_a_node_without_snapshots_stays_in_status(tmp_path: Path, worker: Journal) -> None:
    worker.write("snapshots_off", because="no room")
    worker.write("snapshot_complete", step=4)  # by another worker, which had not seen it yet
    (trouble,) = problems.of_job(tmp_path)
    assert trouble.because == "the state is not kept in the memory of node local, and the job goes on without: no room"


def test_a_machine_without_such_memory_stays_in_status_unless_nobody_wanted_it(tmp_path: Path) -> None:
    for every, count in (("auto", 1), ("off", 0)):
        (tmp_path / "checkpoints.json").write_text(json.dumps(asdict(Settings(snapshot_every=every))))
        assert len(problems.of_job(tmp_path)) == count


def test_status_shows_them_to_people_and_to_machines(
    tmp_path: Path, worker: Journal, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = {"job": "train", "state": "running", "generation": 3, "because": "fine", "applied": 9, "members": []}
    monkeypatch.setattr("elastic.cli.job.status.job_status", lambda job_dir: dict(document))
    assert cli.main(["status", "--job-dir", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {**document, "troubles": []}
    worker.write("snapshots_off", because="no room")
    assert cli.main(["status", "--job-dir", str(tmp_path), "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["troubles"]
    assert set(told) == {"about", "where", "because", "advice"}
    assert cli.main(["status", "--job-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"trouble: {Problem(**told)}"


def test_a_slot_that_cannot_be_connected_is_told_from_the_third_try_on(tmp_path: Path, worker: Journal) -> None:
    notices = Alerts(tmp_path)
    for times, wait_s in enumerate((0.5, 1.0), 1):
        worker.write("newcomer_unreachable", worker_id="local.1.2", times=times, wait_s=wait_s)
    assert notices.poll() == [] and problems.of_job(tmp_path) == []
    worker.write("newcomer_unreachable", worker_id="local.1.2", times=3, wait_s=2.0)
    (said,) = notices.poll()
    assert said.startswith("local.1.2 could not be connected to the members 3 times in a row; it is tried again")
    worker.write("newcomer_unreachable", worker_id="local.1.3", times=4, wait_s=4.0)
    assert notices.poll() == [] and [trouble.where for trouble in problems.of_job(tmp_path)] == ["local.1"]
    with Journal(journal_path(tmp_path, "local.1.3"), "job", "local.1.3", "local", "local.1.3") as newcomer:
        newcomer.write("joined", op=7)
    assert problems.of_job(tmp_path) == []


def test_what_keeps_replacements_out_stands_in_status_until_one_has_joined(tmp_path: Path, worker: Journal) -> None:
    notices = Alerts(tmp_path)
    worker.write("newcomer_in_vain", worker_id="local.2.3", slot="local.2", seconds=300.0)
    worker.write("newcomer_in_vain", worker_id="local.3.1", slot="local.3", seconds=300.0)
    worker.write("state_not_held", because="it takes longer than a step")
    assert [text.split(";")[0] for text in notices.poll()] == [
        "training waited 300 s for local.2.3 to copy the state, and goes on without it",
        "training waited 300 s for local.3.1 to copy the state, and goes on without it",
        "a replacement waits to copy the state, and training goes on without it: it takes longer than a step",
    ]
    assert [trouble.where for trouble in problems.of_job(tmp_path)] == ["local.2", "local.3", "local"]
    with Journal(journal_path(tmp_path, "local.2.4"), "job", "local.2.4", "local", "local.2.4") as newcomer:
        newcomer.write("joined", op=7)
    assert [trouble.where for trouble in problems.of_job(tmp_path)] == ["local.3"]
    assert notices.poll() == []
