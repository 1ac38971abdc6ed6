"""What is shown of a running job, from its files and its leader's status."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from elastic.platforms.local.live import LiveView, PlainDisplay, TableDisplay, plain_line, span, summary_text, table
from elastic.records.ledger_tail import StepsTail


def step(number: int, samples: object = ((1, 2), (3,))) -> str:
    return json.dumps({"step": number, "epoch": 0, "scalars": {"loss": 2.5}, "samples": samples}) + "\n"


FACTS: dict[str, Any] = {
    "state": "running",
    "because": "2 of 2 workers are here",
    "restart": False,
    "generation": 4,
    "members": ["local.0.0", "local.1.2"],
    "spares": [],
    "stragglers": {},
    "waits_for": "",
    "again": "",
    "step": 17,
    "total": 400,
    "steps_per_s": 0.8312,
    "eta_s": 460,
    "epoch": 1,
    "scalars": {"loss": 2.34567},
    "samples_per_s": 123.4,
    "shards_per_s": 6.6,
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


def test_steps_that_take_long_have_a_rate_too_and_the_set_up_is_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    tail = StepsTail(path)
    for second in range(0, 100, 5):
        tail.poll(float(second))
        assert tail.steps_per_s == 0.0
    for number in range(4):  # a step in 20 s, from 95 s on
        for wait in range(1, 5):
            path.write_text("".join(step(n) for n in range(number + (wait == 4))))
            tail.poll(95.0 + 20 * number + 5 * wait)
    assert tail.steps_per_s == pytest.approx(4 / 65), "from the last poll without a step on"
    path.write_text("".join(step(number) for number in range(44)))
    tail.poll(180.0)
    assert tail.steps_per_s == pytest.approx(41 / 10), "now they are fast"


def test_a_tail_that_is_polled_rarely_has_a_rate(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    tail = StepsTail(path)
    for number in range(4):
        tail.poll(30.0 * number)
        path.write_text("".join(step(n) for n in range(60 * (number + 1))))
    assert tail.steps_per_s == pytest.approx(2.0)


def running(job_dir: Path, monkeypatch: pytest.MonkeyPatch, **status: Any) -> None:
    (job_dir / "logs").mkdir(exist_ok=True)
    (job_dir / "journal").mkdir(exist_ok=True)
    (job_dir / "rendezvous.json").write_text(json.dumps({"address": "here", "pid": 1}))
    told = {"state": "running", "because": "2 of 2 workers are here", "generation": 1, "members": [], **status}
    monkeypatch.setattr("elastic.platforms.local.live.fetch_status", lambda address, timeout_s: told)


def test_before_the_first_step_it_is_said_what_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = LiveView(tmp_path)
    assert "waits for etcd and the rendezvous to start" in plain_line(snapshot.facts())
    running(tmp_path, monkeypatch, state="forming", because="waiting for 2 workers")
    snapshot.gather()
    assert snapshot.facts()["waits_for"] == "2 workers to get through the script's set-up"
    lost = "every copy of the state is lost after 12 applied steps; waiting for new processes, to go on from a copy"
    running(tmp_path, monkeypatch, state="forming", because=lost)
    snapshot.gather()
    assert snapshot.facts()["waits_for"] == "" and f"because {lost}" in plain_line(snapshot.facts())
    member = {"worker_id": "local.0.0", "phase": "shard 1 in pass 0 of step 0"}
    running(tmp_path, monkeypatch, members=[member])
    snapshot.gather()
    facts = snapshot.facts()
    assert facts["waits_for"] == "the first step; local.0.0 is in shard 1 in pass 0 of step 0"
    console = Console(width=200, file=None)
    with console.capture() as shown:
        console.print(table(facts))
    assert "waits for" in shown.get() and "shard 1 in pass 0" in shown.get()
    (tmp_path / "steps.jsonl").write_text(step(0))
    snapshot.gather()
    assert snapshot.facts()["waits_for"] == "" and "waits for" not in plain_line(snapshot.facts())


def test_the_total_is_what_workers_say_and_a_script_that_draws_its_samples_has_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running(tmp_path, monkeypatch)
    times = iter(float(second) for second in range(100))
    monkeypatch.setattr("elastic.platforms.local.live.time.monotonic", lambda: next(times))
    snapshot = LiveView(tmp_path)
    snapshot.gather()
    assert snapshot.facts()["total"] is None
    worker = "local.0.0"
    (tmp_path / "journal" / f"{worker}.jsonl").write_text(
        json.dumps(
            {
                "t_mono_ns": 1,
                "t_wall": 1.0,
                "job": "train",
                "generation": 1,
                "worker_id": worker,
                "node": "local",
                "pid": 1,
                "who": worker,
                "event": "steps_planned",
                "total": 60,
                "shards": 8,
            },
            separators=(",", ":"),
        )
        + "\n"
    )
    for done in (10, 20):
        (tmp_path / "steps.jsonl").write_text("".join(step(number, []) for number in range(done)))
        snapshot.gather()
    facts = snapshot.facts()
    assert (facts["total"], facts["eta_s"]) == (60, 4)
    assert (facts["samples_per_s"], facts["shards_per_s"]) == (None, 80.0)
    assert "step 19 of 60" in plain_line(facts) and "10 steps/s, 80 shards/s, 4 s left" in plain_line(facts)


def test_while_steps_are_done_again_it_is_said_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running(tmp_path, monkeypatch, applied=44)
    (tmp_path / "steps.jsonl").write_text("".join(step(number) for number in range(76)))
    resumes = [{"run": 2, "redone": None}, {"run": 3, "redone": [40, 75]}]
    (tmp_path / "resumes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in resumes))
    snapshot = LiveView(tmp_path)
    assert snapshot.facts()["again"] == "steps 40 to 75 are done again, 40 is next", "no leader has told of one yet"
    snapshot.gather()
    facts = snapshot.facts()
    console = Console(width=200, file=None)
    with console.capture() as shown:
        console.print(table(facts))
    for text in (plain_line(facts), shown.get()):
        assert "steps 40 to 75 are done again, 44 is next" in text and "steps/s" not in text
    (tmp_path / "steps.jsonl").write_text("".join(step(number) for number in range(77)))
    snapshot.gather()
    assert snapshot.facts()["again"] == "" and "steps/s" in plain_line(snapshot.facts())


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(4, "4 s"), (90, "2 min"), (3600, "60 min"), (7500, "2 h 5 min"), (86400, "24 h 0 min"), (260000, "3 d 0 h")],
)
def test_a_span_is_said_in_its_largest_units(seconds: float, said: str) -> None:
    assert span(seconds) == said


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
    for word in ("17 of 400", "2.346", "123 samples/s", "0.831 steps/s", "8 min left", "4", "42 ms"):
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
    snapshot = LiveView(tmp_path)
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
        from elastic.platforms.local.live import PlainDisplay
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


@pytest.mark.parametrize("say", ["output", "notice", "show"])
def test_a_reader_that_takes_nothing_is_waited_for_until_a_signal_asks_to_stop(
    say: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with open(reader, "rb"), open(writer, "w") as full:
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * select.PIPE_BUF)
        os.set_blocking(writer, True)
        for stream in ("stdout", "stderr"):
            monkeypatch.setattr(sys, stream, full)
        looks = iter([False, False, True])
        display = PlainDisplay(stopping=lambda: next(looks))
        {
            "output": lambda: display.output(b"x" * 10_000),
            "notice": lambda: display.notice("x"),
            "show": lambda: display.show(FACTS),
        }[say]()
        assert list(looks) == []


def summary(**changed: object) -> str:
    recoveries = [{"recovery_ms": 30.0}, {"recovery_ms": 50.0}]
    known: dict[str, Any] = {
        "job": "train",
        "restart": False,
        "steps": 10,
        "samples": 80,
        "seconds": 4.0,
        "generation": 3,
        "recoveries": recoveries,
        "digest": "abc",
        "exit_code": 0,
        "job_dir": "/jobs/train-1",
    }
    return summary_text({**known, **changed})


def test_the_summary_says_what_a_person_wants_to_know() -> None:
    text = summary()
    for words in ("10 steps, 80 samples in 4.0 s (20 samples/s)", "2 recoveries, median 40 ms, worst 50 ms"):
        assert words in text
    assert "digest abc" in text and "/jobs/train-1" in text


def test_a_job_of_restarted_scripts_has_rounds_in_place_of_steps(tmp_path: Path) -> None:
    facts = {**FACTS, "restart": True, "step": None, "total": None, "scalars": {}}
    assert plain_line(facts).startswith("elastic: running, 2 members, round 4")
    console = Console(width=80)
    with console.capture() as shown:
        console.print(table(facts))
    assert "round" in shown.get() and "step" not in shown.get()
    text = summary(restart=True, steps=0, samples=0)
    assert "train: 3 rounds in 4.0 s" in text and "step" not in text
    assert "train: 1 round in" in summary(restart=True, generation=1, steps=0)
    kept = {**FACTS, "restart": True, "step": 41, "total": None, "samples_per_s": None, "shards_per_s": None}
    assert "step 41" in plain_line(kept) and "shards/s" not in plain_line(kept)
    assert "train: 42 steps, 3 rounds in 4.0 s" in summary(restart=True, steps=42, samples=0)
    snapshot = LiveView(tmp_path)
    snapshot.status = {"state": "running", "restart": True, "members": [], "because": ""}
    assert snapshot.facts()["waits_for"] == ""


def test_of_samples_that_nobody_knows_the_summary_says_nothing() -> None:
    assert "10 steps in 4.0 s (2.5 steps/s), generation 3" in summary(samples=0)
    assert "9000 steps in 4.0 s (2250 steps/s)" in summary(samples=0, steps=9000)


def test_a_terminal_that_is_gone_ends_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, ours = os.openpty()
    with open(ours, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(sys, "stdout", stream)
        display = TableDisplay()
        display.show(FACTS)
        os.close(terminal)
        with pytest.raises(OSError, match="Input/output error"):
            os.write(ours, b"gone")
        display.show(FACTS)
        display.output(b"a line\n")
        display.notice("a word")
        display.close()
        with contextlib.suppress(OSError):
            stream.close()  # what it holds cannot be written
