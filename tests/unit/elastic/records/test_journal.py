"""The event log: what survives, how logs are merged, and the arithmetic of a recovery."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from elastic.records.journal import Journal, journal_path, merge, read, read_all, recoveries


def line(t_ms: float, event: str, worker: str = "", generation: int = 0, **fields: object) -> dict[str, Any]:
    return {"t_mono_ns": int(t_ms * 1e6), "event": event, "worker_id": worker, "generation": generation, **fields}


def test_a_line_says_when_who_and_where(tmp_path: Path) -> None:
    path = journal_path(tmp_path, "a.0.1")
    with Journal(path, "job", "a.0.1", "a", worker_id="a.0.1") as journal:
        journal.write("ring_up", generation=3, world=2)
    (found,) = read(path)
    assert path == tmp_path / "journal" / "a.0.1.jsonl"
    assert set(found) == {
        *("t_mono_ns", "t_wall", "job", "generation", "worker_id", "node", "pid", "who", "event", "world")
    }
    assert (found["generation"], found["worker_id"], found["node"], found["world"]) == (3, "a.0.1", "a", 2)


def test_a_field_may_name_another_worker_than_the_writer(tmp_path: Path) -> None:
    with Journal(tmp_path / "a.jsonl", "job", "agent", "a") as journal:
        journal.write("worker_exited", worker_id="a.1.0", pid=7)
    (found,) = read(tmp_path / "a.jsonl")
    assert (found["who"], found["worker_id"], found["pid"]) == ("agent", "a.1.0", 7)


def test_a_torn_line_is_left_out_and_the_next_writer_starts_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with Journal(path, "job", "agent", "a") as journal:
        journal.write("first")
    with path.open("a") as file:
        file.write('{"t_mono_ns": 12, "eve')
    assert [found["event"] for found in read(path)] == ["first"]
    with Journal(path, "job", "agent", "a") as journal:
        journal.write("second")
    assert [found["event"] for found in read(path)] == ["first", "second"]


def test_merge_orders_the_lines_of_all_processes_by_time(tmp_path: Path) -> None:
    one = Journal(journal_path(tmp_path, "one"), "job", "one", "a")
    two = Journal(journal_path(tmp_path, "two"), "job", "two", "a")
    with one, two:
        for number in range(3):
            one.write("tick", number=2 * number)
            two.write("tick", number=2 * number + 1)
    merged = merge(tmp_path)
    assert merged == tmp_path / "journal.jsonl"
    assert [json.loads(text)["number"] for text in merged.read_text().splitlines()] == list(range(6))
    assert read(merge(tmp_path)) == read_all(tmp_path)


def test_a_full_disk_is_said_and_does_not_raise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = Journal(Path("/dev/full"), "job", "one", "a")
    journal.write("lost")
    journal.write("lost too")
    journal.close()
    said = capsys.readouterr().err
    assert said.count("journal lines are being lost") == 1
    assert "/dev/full" in said


def test_a_disk_that_takes_no_new_file_costs_lines_and_not_the_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "journal").write_text("in the way")
    with Journal(tmp_path / "journal" / "one.jsonl", "job", "one", "a") as journal:
        journal.write("lost")
        (tmp_path / "journal").unlink()
        journal.write("kept")
    assert [line["event"] for line in read(tmp_path / "journal" / "one.jsonl")] == ["journal_gap", "kept"]
    assert "journal lines are being lost" in capsys.readouterr().err


def test_a_line_that_comes_after_the_end_gets_into_no_other_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Journal(tmp_path / "one.jsonl", "job", "one", "a") as journal:
        journal.write("kept")
    with (tmp_path / "other").open("w") as other:  # it has the number of the journal's descriptor
        journal.write("late")
        journal.close()
        other.write("its own")
    assert (tmp_path / "other").read_text() == "its own" and capsys.readouterr().err == ""
    assert [line["event"] for line in read(tmp_path / "one.jsonl")] == ["kept"]


KILL = [
    line(0, "fault_injected", "c", fault="SIGKILL"),
    line(2, "worker_exited", "c"),
    line(3, "member_lost", "c", because="SIGKILL"),
    line(3, "quiesce_started", generation=1, because="c lost: SIGKILL"),
    line(4, "ring_aborted", "a", 1),
    line(7, "quiesce_complete"),
    line(9, "committed", generation=2, kind="loss", members=["a", "b"]),
    line(10, "published", generation=2, kind="loss"),
    line(12, "ring_up", "a", 2),
    line(15, "ring_up", "b", 2),
    line(16, "running", generation=2),
    line(17, "redo_started", "a", 2),
    line(21, "result_copied", "b", 2),
    line(30, "op_complete", "a", 2),
    line(40, "op_complete", "b", 2),
    line(50, "op_complete", "b", 2),
]


def test_a_recovery_is_split_without_gap_or_overlap() -> None:
    (told,) = recoveries(KILL)
    assert told == {
        "generation": 2,
        "lost": ["c"],
        "because": "c lost: SIGKILL",
        "complete": True,
        "started_ns": KILL[3]["t_mono_ns"],
        "detect_ms": 3,
        "abort_ms": 4,
        "decide_ms": 3,
        "build_ms": 5,
        "sync_ms": 6,
        "redo_ms": 19,
        "recovery_ms": 21,
    }


def test_detection_counts_from_the_exit_where_no_harness_speaks() -> None:
    (told,) = recoveries(KILL[1:])
    assert told["detect_ms"] == 1


def test_a_survivor_that_notices_first_does_not_hide_who_was_lost() -> None:
    """Its broken ring starts the quiesce; the agent's word on the dead worker comes after."""
    swapped = [KILL[0], line(1, "quiesce_started", generation=1, because="a says ring 1 is broken"), *KILL[1:3]]
    (told,) = recoveries(swapped + KILL[4:])
    assert (told["lost"], told["detect_ms"], told["abort_ms"]) == (["c"], 1, 6)


def test_nothing_is_redone_when_no_operation_was_interrupted() -> None:
    (told,) = recoveries([found for found in KILL if found["event"] != "redo_started"])
    assert told["redo_ms"] == 0


def test_a_loss_while_the_ring_is_built_belongs_to_the_same_recovery() -> None:
    nested = [
        *KILL[:9],
        line(13, "member_lost", "b"),
        line(13, "quiesce_started", generation=2, because="b lost"),
        line(14, "quiesce_complete"),
        line(15, "committed", generation=3, kind="loss", members=["a"]),
        line(16, "published", generation=3, kind="loss"),
        line(18, "ring_up", "a", 3),
        line(18, "op_complete", "a", 3),
    ]
    (told,) = recoveries(nested)
    assert (told["generation"], told["lost"], told["complete"]) == (3, ["c", "b"], True)
    assert (told["abort_ms"], told["decide_ms"], told["build_ms"]) == (5, 5, 5)
    assert told["recovery_ms"] == 18


def test_a_loss_during_the_redo_is_a_recovery_of_its_own() -> None:
    second = [
        line(20, "member_lost", "b"),
        line(20, "quiesce_started", generation=2, because="b lost"),
        line(21, "quiesce_complete"),
        line(22, "committed", generation=3, kind="loss", members=["a"]),
        line(23, "published", generation=3, kind="loss"),
        line(24, "ring_up", "a", 3),
        line(24, "op_complete", "a", 3),
    ]
    told = recoveries(KILL[:12] + second)
    assert [(one["generation"], one["lost"], one["complete"]) for one in told] == [(2, ["c"], False), (3, ["b"], True)]
    assert told[1]["recovery_ms"] == 4


def test_a_newcomer_that_is_planned_out_again_is_no_part_of_a_later_loss() -> None:
    left = [
        line(-90, "worker_exited", "d"),
        line(-89, "member_lost", "d", because="exited with 75"),
        line(-88, "committed", generation=1, kind="planned", members=["a", "b", "c"]),
    ]
    assert recoveries(left + KILL) == recoveries(KILL)


def test_a_recovery_ends_also_where_a_planned_generation_takes_effect_after_the_redone_operation() -> None:
    joined = line(29, "entered", "a", 3, kind="planned", members=["a", "b", "d"])
    early = [*KILL[:13], joined, line(30, "op_complete", "a", 3), line(40, "op_complete", "b", 3)]
    assert recoveries(early) == recoveries(KILL)


def test_a_recovery_does_not_wait_for_a_member_that_was_drained_with_the_redone_operation() -> None:
    left = line(29, "entered", "a", 3, kind="planned", members=["a"])
    (told,) = recoveries([*KILL[:13], left, line(30, "op_complete", "a", 3)])
    assert (told["complete"], told["redo_ms"]) == (True, 9)


def test_a_fault_that_a_worker_survived_is_not_the_cause_of_its_later_loss() -> None:
    survived = [line(-500, "fault_injected", "c", number=1, lethal=False), line(-400, "fault_ended", number=1)]
    assert recoveries([*survived, *KILL]) == recoveries(KILL)


def test_a_planned_generation_is_no_recovery() -> None:
    planned = [line(1, "committed", generation=2, kind="planned", members=["a"]), line(2, "ring_up", "a", 2)]
    assert recoveries(planned) == []


def test_a_journal_that_ends_early_tells_an_incomplete_recovery() -> None:
    (told,) = recoveries(KILL[:6])
    assert (told["complete"], told["abort_ms"], told["build_ms"]) == (False, 4, 0)


def test_the_journal_of_a_daemon_is_in_its_log_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = journal_path(tmp_path, "d")
    with Journal(path, "train-1", "d", "a", logged=logging.INFO) as journal:
        journal.write("job_agent_started", pid=7)
        journal.write("job_agent_trouble", 3, because="no disk")
    with Journal(path, "", "d", "a", logged=logging.DEBUG) as journal:
        journal.write("committed", 4)
        journal.write("refused", because="he is a stranger")
        caplog.set_level(logging.DEBUG)
        journal.write("refused", because="he is a stranger")
    with Journal(path, "", "d", "a") as journal:
        journal.write("refused")
    told = [(one.name, one.levelname, one.getMessage(), getattr(one, "fields", None)) for one in caplog.records]
    assert told == [
        (__name__, "INFO", "job_agent_started", {"job": "train-1", "pid": 7}),
        (__name__, "WARNING", "job_agent_trouble", {"job": "train-1", "generation": 3, "because": "no disk"}),
        (__name__, "DEBUG", "refused", {"because": "he is a stranger"}),
    ]
    events = ["job_agent_started", "job_agent_trouble", "committed", *["refused"] * 3]
    assert [line["event"] for line in read(path)] == events


def test_a_daemon_logs_that_lines_of_its_journal_are_lost(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = Journal(Path("/dev/full"), "", "d", "a", logged=logging.INFO)
    journal.write("lost")
    journal.close()
    assert "journal lines are being lost" in caplog.text and capsys.readouterr().err == ""
