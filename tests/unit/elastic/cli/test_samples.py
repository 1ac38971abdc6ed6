"""`elastic samples`: what a ledger proves, and which sample, in which step, spoils the proof."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from elastic import cli
from elastic.config import JobSpec
from elastic.errors import ExitCode
from elastic.records.exactly_once import Epoch, prove
from elastic.records.ledger import UNWAITING
from elastic.wire import codec
from runtime.loop.job import Job
from tests.unit.features import mlp
from tests.unit.jobs import Recorded, cross_entropy, dataset, make_job

Lines = list[dict[str, Any]]
SAMPLES, BATCH, SHARDS, STEPS = 50, 16, 4, 3
"""Of an epoch; two samples are its tail."""


def loader(job: Job, **arguments: Any) -> Any:
    return job.loader(dataset(SAMPLES), BATCH, shards=SHARDS, **arguments)


def nine() -> list[Any]:
    data = dataset(9)
    return [data[i] for i in range(9)]


SOURCES: dict[str, Callable[[Job], Any]] = {
    "shuffled": lambda job: loader(job, shuffle=True),
    "in order": loader,
    "padded": lambda job: loader(job, shuffle=True, tail="pad"),
    "weighted": lambda job: loader(job, weights=range(SAMPLES)),
    "stream": lambda job: job.stream(lambda _shard, _epoch, skip: nine()[3 + skip :], shards=SHARDS),
    "unknown": lambda job: None,
}


@cache
def recorded(source: str, epochs: int = 2) -> Lines:
    session = Recorded()
    job = make_job(session)
    model = mlp()
    job.register(model=model)
    data = SOURCES[source](job)
    for _ in job.epochs(epochs):
        for step in job.steps(data) if data is not None else job.steps(shards=SHARDS, total=STEPS):
            for batch in step:
                x, y = batch if data is not None else dataset(2)[:]
                cross_entropy(model(x).reshape(-1, 2), y.reshape(-1)).backward()
            model.zero_grad()
    job.close()
    lines: Lines = json.loads(json.dumps([asdict(record) for record in session.records]))
    return lines


def ledger(source: str) -> Lines:
    return copy.deepcopy(recorded(source))


@pytest.mark.parametrize("source", ["shuffled", "unknown"])
def test_a_second_training_loop_counts_its_epochs_anew(source: str) -> None:
    lines, second = ledger(source), ledger(source)
    for line in second:
        line["step"] += len(lines)
        line["data"] = {**(line["data"] or {"order": "unknown"}), "loop": 1}
    epochs = prove([*lines, *second])
    assert [(epoch.loop, epoch.number) for epoch in epochs] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [epoch.proved for epoch in epochs] == 4 * [source != "unknown"]
    assert all(not epoch.findings for epoch in epochs)
    del second[:STEPS]  # it may go on counting
    second = [{**line, "step": line["step"] - STEPS} for line in second]
    assert all(not epoch.findings for epoch in prove([*lines, *second]))
    third = [{**line, "data": {**line["data"], "loop": 3}} for line in second]  # the loops before it had no step
    assert all(not epoch.findings for epoch in prove([*lines, *third]))


@pytest.mark.parametrize(
    ("source", "steps", "used", "left_out", "repeated"),
    [
        ("shuffled", 3, 48, 2, 0),
        ("in order", 3, 48, 2, 0),
        ("padded", 4, 50, 0, 14),
        ("weighted", 3, 48, 2, 0),
        ("stream", 6, 24, 0, 0),
    ],
)
def test_a_ledger_proves_each_epoch_of_what_it_has(
    source: str, steps: int, used: int, left_out: int, repeated: int
) -> None:
    for number, epoch in enumerate(prove(ledger(source))):
        assert epoch.proved and epoch.finished
        assert (epoch.number, epoch.steps, epoch.used) == (number, steps, used)
        assert (epoch.left_out, epoch.repeated) == (left_out, repeated)


def test_steps_of_many_samples_are_proved_by_their_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.data.loader.SAMPLES_LISTED_MAX", 8)
    recorded.cache_clear()
    lines = ledger("shuffled")
    recorded.cache_clear()
    assert lines[0]["samples"][0].keys() == {"n", "sha256"}
    assert [(epoch.proved, epoch.used) for epoch in prove(lines)] == [(True, 48), (True, 48)]
    lines[4]["samples"][2]["sha256"] = "0" * 64
    (finding,) = prove(lines)[1].findings
    assert (finding.step, finding.what) == (4, "shard 2 had other samples than planned, by their hash")


def test_the_epoch_in_progress_is_proved_as_far_as_it_is() -> None:
    first, second = prove(ledger("shuffled")[:5])
    assert first.finished and not second.finished and second.proved
    assert (second.steps, second.planned_steps, second.used, second.left_out) == (2, 3, 32, 0)


def said(epochs: list[Epoch]) -> list[str]:
    return [f"{finding.epoch} {finding.step} {finding.what}" for epoch in epochs for finding in epoch.findings]


def test_a_sample_used_twice_is_named_with_both_steps_and_the_one_it_displaced() -> None:
    lines = ledger("in order")
    lines[4]["samples"][1][0] = 3
    assert said(prove(lines)) == [
        "1 4 shard 1 had sample 3 instead of sample 20",
        "1 None sample 3 was used more than once, in steps 3, 4",
    ]


def test_counting_finds_what_a_wrong_plan_would_hide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect in the order of an epoch would be in the ledger and in the comparison alike."""
    lines = ledger("in order")
    monkeypatch.setattr("elastic.records.exactly_once._deviation", lambda *_: None)
    lines[1]["samples"][0] = lines[0]["samples"][0]
    assert said(prove(lines)) == [f"0 None sample {i} was used more than once, in steps 0, 1" for i in range(4)]


def changed(source: str, change: Callable[[Lines], object]) -> list[str]:
    lines = ledger(source)
    change(lines)
    return said(prove(lines))


@pytest.mark.parametrize(
    ("source", "change", "words"),
    [
        ("shuffled", lambda lines: lines[1]["samples"][0].pop(), "0 1 its shards had [3, 4, 4, 4] samples"),
        ("weighted", lambda lines: lines[1]["samples"].pop(), "0 1 its shards had [4, 4, 4] samples"),
        ("shuffled", lambda lines: lines[1]["samples"][0].reverse(), "0 1 shard 0 had its samples in another order"),
        ("in order", lambda lines: lines[2]["samples"][3].__setitem__(3, 77), "there is no sample 77"),
        ("shuffled", lambda lines: lines.pop(1), "0 1 its line in the ledger is that of step 2"),
        ("shuffled", lambda lines: lines.__delitem__(slice(3)), "1 0 epoch 1 comes after epoch -1"),
        ("stream", lambda lines: lines[2]["samples"].__setitem__(1, {"batch": 1}), "0 2 its shards had the batches"),
        ("shuffled", lambda lines: lines[2]["data"].update(seed=1), "0 2 it was planned from other data"),
    ],
)
def test_what_is_not_as_planned_is_named_with_its_step(
    source: str, change: Callable[[Lines], object], words: str
) -> None:
    assert any(words in finding for finding in changed(source, change)), changed(source, change)


def test_an_epoch_that_was_left_early_did_not_use_all_its_samples() -> None:
    lines = ledger("shuffled")
    del lines[2]
    for step, line in enumerate(lines):
        line["step"] = step
    assert said(prove(lines)) == ["0 None it ended after 2 of 3 steps, and the rest of its samples was not used"]


def test_an_epoch_with_too_many_steps_is_named() -> None:
    lines = ledger("shuffled")[:3]
    lines.append({**lines[2], "step": 3})
    assert said(prove(lines)) == ["0 3 the epoch's plan has only 3 steps"]


def write(directory: Path, lines: Lines) -> list[str]:
    (directory / "job.json").write_bytes(codec.to_json(JobSpec(name="job", command=("train",), workers=2)))
    (directory / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ["samples", "--job-dir", str(directory)]


def test_the_command_shows_a_table_and_says_that_it_is_proved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(write(tmp_path, ledger("shuffled")[:5])) == ExitCode.DONE
    assert capsys.readouterr().out.splitlines() == [
        "epoch order            steps         used  left out  repeated",
        "    0 shuffled           3/3           48         2         0  each sample once",
        "    1 shuffled           2/3           32         0         0  each sample once so far",
        "proved: each sample of each epoch's plan was used exactly once",
    ]


def test_without_a_directory_it_is_the_newest_job_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["samples"]) == ExitCode.BAD_INPUT
    assert "there is no job in" in " ".join(capsys.readouterr().err.split())
    for number, lines in enumerate((ledger("in order")[:1], ledger("shuffled"))):
        directory = tmp_path / "elastic-jobs" / f"train-{number}"
        directory.mkdir(parents=True)
        write(directory, lines)
        os.utime(directory / "job.json", (number, number))
    assert cli.main(["samples", "--json"]) == ExitCode.DONE
    said = capsys.readouterr()
    assert json.loads(said.out)["epochs"][0]["order"] == "shuffled" and "train-1, the newest of 2" in said.err


def test_the_command_fails_with_the_step_and_the_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ledger("in order")
    lines[4]["samples"][1][0] = 3
    assert cli.main(write(tmp_path, lines)) == 1
    out = capsys.readouterr().out.splitlines()
    assert "epoch 1, step 4: shard 1 had sample 3 instead of sample 20" in out
    assert out[-1] == "not proved"
    assert cli.main([*write(tmp_path, lines), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["proved"] is False
    assert [epoch["proved"] for epoch in document["epochs"]] == [True, False]
    assert document["epochs"][1]["findings"][0]["step"] == 4


def test_a_script_that_draws_its_own_samples_is_not_proved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(write(tmp_path, ledger("unknown"))) == 1
    assert "draws its own samples" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["a quorum", "no waiting"])
def test_nothing_is_said_of_samples_where_workers_do_not_wait(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ledger("shuffled")
    for line in lines:
        line["samples"] = []
        if kind == "a quorum":
            line["scalars"]["elastic.replicas"] = 2.0
        else:
            line["data"][UNWAITING] = True
    assert cli.main([*write(tmp_path, lines), "--json"]) == 1
    epochs = json.loads(capsys.readouterr().out)["epochs"]
    assert [(epoch["order"], epoch["findings"]) for epoch in epochs] == [("unknown", [])] * len(epochs)
    assert cli.main(write(tmp_path, lines)) == 1
    assert "workers do not wait" in capsys.readouterr().out


def test_the_parts_of_several_nodes_prove_what_none_of_them_does_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ledger("shuffled")
    for name in ("late", "early", "none"):
        (tmp_path / name).mkdir()
    late, early = write(tmp_path / "late", lines[2:]), write(tmp_path / "early", lines[:4])
    none = write(tmp_path / "none", [])
    assert cli.main(late) == ExitCode.SCRIPT_FAILED
    assert cli.main([*late, *early[1:]]) == ExitCode.DONE
    assert "proved: each sample" in capsys.readouterr().out
    (tmp_path / "none" / "steps.jsonl").unlink()
    assert cli.main([*late, *none[1:]]) == ExitCode.BAD_INPUT
    assert "steps.jsonl is not there" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda directory: (directory / "job.json").unlink(), "holds no job"),
        (lambda directory: (directory / "steps.jsonl").unlink(), "no applied step yet"),
        (lambda directory: (directory / "steps.jsonl").write_text(""), "no applied step yet"),
        (lambda directory: (directory / "steps.jsonl").write_text("{\n"), "line 1 is damaged"),
        (lambda directory: (directory / "steps.jsonl").write_text('{"step": 0}\n'), "is damaged: KeyError"),
        (lambda directory: write(directory, [{**ledger("stream")[0], "samples": [[1]]}]), "is damaged: AttributeError"),
    ],
)
def test_a_directory_without_a_job_or_a_readable_ledger_is_bad_input(
    spoil: Callable[[Path], object], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = write(tmp_path, ledger("shuffled"))
    spoil(tmp_path)
    assert cli.main(arguments) == ExitCode.BAD_INPUT
    assert words in " ".join(capsys.readouterr().err.split())
