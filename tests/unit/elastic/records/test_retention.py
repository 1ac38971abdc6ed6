"""What is left of the journals of processes that run for ever, and of the jobs that a replica has seen."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic.records.journal import Journal, journal_path, read_all
from elastic.records.retention import Retention, forget

SMALL = Retention("rendezvous-", part_bytes=2000, kept_bytes=8000)
LINES = 200


def written(directory: Path, who: str, first: int, lines: int = LINES, retention: Retention | None = SMALL) -> None:
    with Journal(journal_path(directory, who), "job", who, "here", retention=retention) as journal:
        for number in range(first, first + lines):
            journal.write("tick", number=number)


def numbers(directory: Path) -> list[int]:
    return [line["number"] for line in read_all(directory)]


def size(directory: Path) -> int:
    return sum(path.stat().st_size for path in (directory / "journal").iterdir())


def test_the_newest_lines_are_kept_without_a_gap_and_no_more_than_so_much(tmp_path: Path) -> None:
    written(tmp_path, "rendezvous-1", 0)
    kept = numbers(tmp_path)
    assert kept == list(range(kept[0], LINES)) and 0 < kept[0] < LINES - 10
    assert SMALL.kept_bytes - 2 * SMALL.part_bytes < size(tmp_path) <= SMALL.kept_bytes + SMALL.part_bytes


def test_a_process_of_the_same_name_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    for first in range(0, LINES, 5):
        written(tmp_path, "rendezvous-1", first, 5)
    kept = numbers(tmp_path)
    assert kept == list(range(kept[0], LINES)) and size(tmp_path) <= SMALL.kept_bytes + SMALL.part_bytes


def test_journals_of_processes_that_are_gone_go_first_and_others_stay(tmp_path: Path) -> None:
    written(tmp_path, "agent-a", 0, 100, retention=None)
    for pid in range(40):
        written(tmp_path, f"rendezvous-{pid}", 1000 * pid, 10)
        path = journal_path(tmp_path, f"rendezvous-{pid}")
        os.utime(path, ns=(pid, pid))
    left = {path.name for path in (tmp_path / "journal").iterdir()}
    assert "agent-a.jsonl" in left and "rendezvous-0.jsonl" not in left and "rendezvous-39.jsonl" in left
    assert numbers(tmp_path)[:100] == list(range(100))


def test_a_journal_that_somebody_has_removed_is_begun_again(tmp_path: Path) -> None:
    path = journal_path(tmp_path, "rendezvous-1")
    with Journal(path, "job", "rendezvous-1", "here", retention=SMALL) as journal:
        journal.write("tick", number=1)
        path.unlink()
        journal.write("tick", number=2)
    assert numbers(tmp_path) == [2]


@pytest.mark.parametrize(("kept", "left"), [(9, "abcd"), (3, "acd"), (1, "c"), (0, "c")])
def test_jobs_that_nobody_knows_go_the_oldest_first(tmp_path: Path, kept: int, left: str) -> None:
    for age, name in enumerate("dacb"[::-1]):
        (tmp_path / name / "journal").mkdir(parents=True)
        os.utime(tmp_path / name, ns=(age, age))
    gone = forget(tmp_path, {"c"}, kept)
    assert "".join(sorted(path.name for path in tmp_path.iterdir())) == left
    assert sorted([*gone, *left]) == list("abcd")
    assert forget(tmp_path / "none", set(), 0) == []


def test_a_directory_that_another_replica_removes_just_now_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    is_dir = Path.is_dir

    def looks(path: Path) -> bool:
        found = is_dir(path)
        if path.name == "b":
            path.rmdir()
        return found

    monkeypatch.setattr(Path, "is_dir", looks)
    assert forget(tmp_path, {"c"}, 1) == ["a"]
