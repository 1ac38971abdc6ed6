"""What is shown of a running job, from its files and its leader's status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from elastic.live import PlainDisplay, Snapshot, plain_line, summary_text, table
from elastic.tail import StepsTail


def step(number: int, samples: object = ((1, 2), (3,))) -> str:
    return json.dumps({"step": number, "epoch": 0, "scalars": {"loss": 2.5}, "samples": samples}) + "\n"


FACTS: dict[str, Any] = {
    "state": "running",
    "because": "2 of 2 workers are here",
    "generation": 4,
    "members": ["local.0.0", "local.1.2"],
    "spares": [],
    "stragglers": {},
    "step": 17,
    "epoch": 1,
    "scalars": {"loss": 2.34567},
    "samples_per_s": 123.4,
    "recoveries": 2,
    "last_recovery_ms": 41.7,
}


def test_a_tail_counts_whole_lines_only_and_goes_on_from_there(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    tail = StepsTail(path)
    tail.poll(0.0)
    text = step(0) + step(1)
    path.write_text(text[:-5])
    tail.poll(1.0)
    assert (tail.steps, tail.samples, tail.samples_per_s) == (1, 3, 3.0)
    path.write_text(text + step(2, [{"n": 5000, "sha256": "ab"}]))
    tail.poll(2.0)
    assert (tail.steps, tail.samples, tail.last["step"]) == (3, 5006, 2)


def test_the_rate_forgets_what_is_long_ago(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    tail = StepsTail(path)
    tail.poll(0.0)
    path.write_text("".join(step(number) for number in range(100)))
    for second in range(1, 31):
        tail.poll(float(second))
    assert tail.samples_per_s == 0.0


def test_spares_are_counted_apart() -> None:
    assert "2 members, 1 spare, generation 4" in plain_line({**FACTS, "spares": ["local.2.0"]})
    assert "spare" not in plain_line(FACTS)


def test_the_table_names_stragglers_and_why() -> None:
    console = Console(width=200, file=None)
    with console.capture() as shown:
        console.print(table({**FACTS, "stragglers": {"local.1.2": "a shard takes it 61.3 ms"}}))
    assert "local.1.2: a shard takes it 61.3 ms" in shown.get()


def test_a_plain_line_has_what_the_table_has() -> None:
    line = plain_line(FACTS)
    console = Console(width=200, file=None)
    with console.capture() as shown:
        console.print(table(FACTS))
    for word in ("17", "2.346", "123", "4", "42 ms"):
        assert word in line
        assert word in shown.get()
    assert "2 members" in line
    assert "local.0.0 local.1.2" in shown.get()


def test_a_job_that_does_not_run_says_why() -> None:
    line = plain_line({**FACTS, "state": "paused", "because": "below quorum", "step": None})
    assert line.startswith("elastic: paused")
    assert line.endswith("because below quorum")


def test_a_leader_that_does_not_answer_is_told_in_words(tmp_path: Path) -> None:
    """It may be on its way back; the training does not wait for it."""
    snapshot = Snapshot(tmp_path)
    assert snapshot.facts()["state"] == "starting"
    (tmp_path / "rendezvous.json").write_text(json.dumps({"address": f"unix:{tmp_path}/nobody", "pid": 1}))
    snapshot.gather()
    assert snapshot.facts()["because"] == "no leader answers at the moment; training goes on"
    (tmp_path / "result.json").write_text(json.dumps({"because": "all members have finished", "generation": 3}))
    snapshot.gather()
    facts = snapshot.facts()
    assert (facts["state"], facts["because"], facts["generation"]) == ("closed", "all members have finished", 3)


def test_json_keeps_stdout_to_itself(capfd: pytest.CaptureFixture[str]) -> None:
    """The script's output goes to stderr, so that every line of stdout can be parsed."""
    display = PlainDisplay(as_json=True)
    display.output(b"hello\n")
    display.show(FACTS)
    sys.stdout.flush()
    out, err = capfd.readouterr()
    assert json.loads(out) == {"event": "progress", **FACTS}
    assert err == "hello\n"


def test_a_full_disk_below_our_output_costs_words_and_not_the_job() -> None:
    program = """if True:
        import sys
        from elastic.live import PlainDisplay
        display = PlainDisplay()
        for _ in range(3000):
            display.output(b"hello\\n")
            display.notice("something")
        sys.stdout = sys.stderr = None
        import os; os._exit(7)
    """
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=full, timeout=60, check=False)
    assert done.returncode == 7


def test_the_summary_says_what_a_person_wants_to_know() -> None:
    recoveries = [{"recovery_ms": 30.0}, {"recovery_ms": 50.0}]
    text = summary_text(
        {
            "job": "train",
            "steps": 10,
            "samples": 80,
            "seconds": 4.0,
            "generation": 3,
            "recoveries": recoveries,
            "digest": "abc",
            "exit_code": 0,
            "job_dir": "/jobs/train-1",
        }
    )
    for words in ("10 steps", "20 samples/s", "2 recoveries, median 40 ms, worst 50 ms", "digest abc", "/jobs/train-1"):
        assert words in text
