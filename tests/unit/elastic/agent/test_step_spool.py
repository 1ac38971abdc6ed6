"""Step records wait in order, in bounded memory, and none is lost however slow the agent is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.agent.worker.step_spool import ON_THE_WAY, StepSpool, left_behind, spill_path


def taken(backlog: StepSpool) -> list[tuple[int, str]]:
    records = []
    while (record := backlog.take()) is not None:
        records.append(record)
    return records


def test_records_go_out_once_in_order_and_only_so_many_at_a_time(tmp_path: Path) -> None:
    backlog = StepSpool(tmp_path / "spill")
    for step in range(ON_THE_WAY + 3):
        backlog.add(str(step))
    first = taken(backlog)
    assert first == [(n + 1, str(n)) for n in range(ON_THE_WAY)]
    assert not backlog.has_next
    backlog.acknowledged(2)
    assert taken(backlog) == [(ON_THE_WAY + 1, str(ON_THE_WAY)), (ON_THE_WAY + 2, str(ON_THE_WAY + 1))]


def test_what_does_not_fit_goes_to_the_file_and_comes_back_in_order(tmp_path: Path) -> None:
    spill = tmp_path / "deep" / "spill"
    backlog = StepSpool(spill, in_memory=4)
    for step in range(10):
        backlog.add(str(step))
    assert spill.exists()
    seen = []
    while records := taken(backlog):
        seen += records
        backlog.acknowledged(records[-1][0])
    assert seen == [(n + 1, str(n)) for n in range(10)]
    assert not spill.exists()


@given(st.lists(st.sampled_from(["add", "take", "ack", "ack one"]), max_size=120))
def test_any_order_of_calls_loses_and_swaps_nothing(tmp_path_factory: pytest.TempPathFactory, calls: list[str]) -> None:
    backlog = StepSpool(tmp_path_factory.mktemp("backlog") / "spill", in_memory=3)
    added, sent, known = 0, [], 0
    for call in calls:
        match call:
            case "add":
                added += 1
                backlog.add(str(added))
            case "take":
                record = backlog.take()
                sent += [record] if record else []
            case "ack":
                known = len(sent)
                backlog.acknowledged(known)
            case "ack one":
                known = min(known + 1, len(sent))
                backlog.acknowledged(known)
    while len(sent) < added:
        backlog.acknowledged(len(sent))
        sent += taken(backlog)
    assert sent == [(n + 1, str(n + 1)) for n in range(added)]
    backlog.close()


def test_what_was_never_acknowledged_is_left_for_the_agent(tmp_path: Path) -> None:
    path = spill_path(tmp_path, "a.0.0")
    backlog = StepSpool(path, in_memory=2)
    for step in range(5):
        backlog.add(json.dumps({"step": step}))
    taken(backlog)
    backlog.acknowledged(1)
    backlog.close()
    assert [json.loads(text) for text in left_behind(path)] == [{"step": step} for step in range(1, 5)]


def test_nothing_is_left_when_everything_was_acknowledged(tmp_path: Path) -> None:
    path = spill_path(tmp_path, "a.0.0")
    backlog = StepSpool(path)
    backlog.add("{}")
    taken(backlog)
    backlog.acknowledged(1)
    backlog.close()
    assert not path.exists()
    assert list(left_behind(path)) == []


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "spill"
    path.write_text('{"step": 1}\n{"st')
    assert [json.loads(text) for text in left_behind(path)] == [{"step": 1}]
