"""What may be read of a directory of jobs from afar: logs and journals, and no other file whatever the name says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic.records import job_files


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    for directory in (tmp_path, tmp_path / "train-1"):
        for part in ("logs", "journal"):
            (directory / part).mkdir(parents=True)
    (tmp_path / "train-1" / "logs" / "a.0.0.log").write_bytes(b"0123456789")
    (tmp_path / "train-1" / "journal" / "a.0.0.jsonl").write_bytes(b"{}\n")
    (tmp_path / "journal" / "daemon-a.jsonl").write_bytes(b"{}\n")
    (tmp_path / "secret").write_bytes(b"secret")
    return tmp_path


def test_logs_and_journals_are_listed_each_with_its_name(jobs: Path) -> None:
    assert job_files.read(jobs, "train-1", "", 0).text == b"a.0.0\njournal/a.0.0"
    assert job_files.read(jobs, "", "", 0).text == b"journal/daemon-a"


def test_a_name_that_is_no_text_hides_no_other_file(jobs: Path) -> None:
    for part, name in (("logs", b"\xff.log"), ("logs", b"a\nb.log"), ("journal", b"\xff.jsonl")):
        (jobs / "train-1" / part / os.fsdecode(name)).touch()
    assert job_files.read(jobs, "train-1", "", 0).text == b"a.0.0\njournal/a.0.0"


def test_a_file_is_read_in_pieces_from_any_place(jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_files, "PIECE_BYTES", 4)
    read = [job_files.read(jobs, "train-1", "a.0.0", offset) for offset in (0, 4, 8, 10, 99, -3)]
    assert [piece.text for piece in read] == [b"0123", b"4567", b"89", b"", b"", b"789"]
    assert [piece.end for piece in read] == [4, 8, 10, 10, 10, 10]


@pytest.mark.parametrize(
    "name", ["../../secret", "secret", "journal/../../secret", "a.0.0.log", "/etc/passwd", "b.0.0"]
)
def test_no_other_file_is_read(jobs: Path, name: str) -> None:
    for job in ("train-1", "", "..", "../train-1"):
        assert job_files.read(jobs, job, name, 0) == job_files.LogPiece(b"", 0, -1)


def test_a_directory_that_is_not_there_has_nothing(tmp_path: Path) -> None:
    assert job_files.read(tmp_path / "none", "train-1", "", 0) == job_files.LogPiece(b"", 0, 0)
