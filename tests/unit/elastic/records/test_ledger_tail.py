"""What the end of a ledger says of the last step."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from elastic.protocol import outer_round
from elastic.records import ledger_tail
from elastic.records.ledger_tail import last_step
from elastic.records.resume import steps_on_file


def line(step: int, **scalars: float) -> str:
    return json.dumps({"step": step, "samples": [], "scalars": scalars}) + "\n"


def test_the_last_step_is_that_of_the_last_whole_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "steps.jsonl"
    assert last_step(path) == {}
    path.write_text("")
    assert last_step(path) == {}
    path.write_text("".join(line(step, loss=0.5) for step in range(100)))
    assert last_step(path)["step"] == 99
    with path.open("a") as ledger:
        ledger.write(line(100)[:20])
    assert last_step(path)["step"] == 99, "a line that is being written is none"
    monkeypatch.setattr(ledger_tail, "LINE_BYTES", 80)
    assert last_step(path)["step"] == 99
    monkeypatch.setattr(ledger_tail, "LINE_BYTES", 30)
    assert last_step(path) == {}, "the line is longer than what is read"


def test_a_step_without_a_round_says_nothing_of_one() -> None:
    assert outer_round.told_of({}) == outer_round.told_of(json.loads(line(1, loss=0.5))) == {}
    round_of = {"elastic.drift": 0.25, "elastic.summed_bytes": 8.0, "loss": 1.0}
    assert outer_round.told_of({"scalars": round_of}) == {"drift": 0.25, "summed_bytes": 8.0}
    assert outer_round.told_of({"scalars": {**round_of, "elastic.late": 1.0}})["late"] == 1.0


def test_steps_are_counted_without_the_whole_ledger_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    assert steps_on_file(tmp_path) == 0
    samples = [list(range(1000))]
    path.write_text("".join(json.dumps({"step": step, "samples": samples}) + "\n" for step in range(1000)) + '{"step":')
    tracemalloc.start()
    try:
        assert steps_on_file(tmp_path) == 1000
        assert tracemalloc.get_traced_memory()[1] < path.stat().st_size / 10
    finally:
        tracemalloc.stop()
