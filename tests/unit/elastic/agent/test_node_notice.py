"""The notice of a node where a script asks for it: in its worker, in a child of it, and anywhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

import elastic
from elastic.agent.worker.node_notice import NOTICE_FILE, NodeNotice, NoticeFile, kept_in
from runtime.loop import job as jobs
from tests.unit.jobs import Recorded, make_job

NOTICE = NodeNotice.begins(90.0, "rack 7", "reclaim", "EC2", signalled=False)


def test_a_process_that_is_no_worker_has_none() -> None:
    assert elastic.notice() is None


def test_a_job_and_whoever_has_no_job_at_hand_are_told_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Recorded()
    job = make_job(session)
    assert job.notice is None
    monkeypatch.setattr(session, "going", NOTICE)
    assert job.notice is NOTICE
    assert elastic.notice() is None, "this process has not joined it"
    monkeypatch.setattr(jobs, "_current", job)
    assert elastic.notice() is NOTICE
    monkeypatch.setattr(session, "going", None)
    assert elastic.notice() is None


def test_a_script_that_is_a_child_of_its_worker_reads_what_the_worker_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = NoticeFile(tmp_path / "a.0.0.notice")
    monkeypatch.setenv(NOTICE_FILE, str(kept.path))
    assert elastic.notice() is None
    kept.keep(NOTICE)
    found = elastic.notice()
    assert found == NOTICE and found.deadline == NOTICE.deadline
    written = kept.path.stat().st_mtime_ns
    kept.keep(NOTICE)
    assert kept.path.stat().st_mtime_ns == written, "only what is new is written"
    kept.keep(None)
    kept.keep(None)
    assert elastic.notice() is None and not kept.path.exists()


def test_what_an_earlier_worker_of_the_same_name_has_left_is_no_notice(tmp_path: Path) -> None:
    path = tmp_path / "a.0.0.notice"
    NoticeFile(path).keep(NOTICE)
    assert kept_in(path) == NOTICE
    NoticeFile(path)
    assert kept_in(path) is None
