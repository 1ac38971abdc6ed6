"""`elastic checkpoints`: what it shows, finds damaged, exports and removes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from elastic import cli
from elastic.checkpoints.settings import Settings
from elastic.errors import ExitCode
from tests.unit.elastic.checkpoints.test_checkpoints import flip, settle
from tests.unit.jobs import Setup, make_job, set_up, train


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Setup]]:
    """Checkpoints of steps 4 and 8, and a save called best."""
    settings = Settings(root=str(tmp_path / "checkpoints"), every="4 steps", job="train", job_id="feed")
    for name, value in settings.to_environment().items():
        monkeypatch.setenv(name, value)
    setup = set_up(make_job())
    setup.model.register_buffer("scale", torch.ones(2), persistent=False)

    def keep_notes(directory: Path, step: int) -> None:
        (directory / "notes.txt").write_text(f"step {step}")

    setup.job.on_checkpoint(keep_notes)
    setup.job.state.mean = torch.arange(3.0)
    setup.job.state.by_class = {1: torch.ones(2), "1": torch.zeros(3)}

    def body(setup: Setup) -> None:
        settle(setup)
        if setup.job._training.at.step == 9:
            setup.job.save("best")

    train(setup, epochs=3, body=body)
    yield tmp_path / "checkpoints", setup


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert cli.main(["checkpoints", *words]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.out + " ".join(captured.err.split())


def test_the_list_has_all_of_them(saved: tuple[Path, Setup], capsys: pytest.CaptureFixture[str]) -> None:
    directory, _ = saved
    rows = json.loads(said(capsys, "list", "--dir", str(directory), "--json"))
    assert [(row["series"], row["step"], row["epoch"], row["problem"]) for row in rows] == [
        ("periodic", 8, 2, ""),
        ("periodic", 4, 1, ""),
        ("best", 9, 2, ""),
    ]
    text = said(capsys, "list", "--dir", str(directory))
    assert len(text.splitlines()) == 4
    assert "periodic" in text


def test_verify_reads_every_byte(saved: tuple[Path, Setup], capsys: pytest.CaptureFixture[str]) -> None:
    directory, _ = saved
    assert said(capsys, "verify", "--dir", str(directory)).count("whole") == 3
    flip(next(directory.glob("best/*/*.safetensors")), 0.99)
    damaged = said(capsys, "verify", "--dir", str(directory), code=1)
    assert damaged.count("whole") == 2
    assert "its SHA-256 is not the one in the manifest" in damaged
    assert "best (step-000000000009" in said(capsys, "show", "best", "--dir", str(directory), code=2)


def test_show_tells_what_is_in_one(saved: tuple[Path, Setup], capsys: pytest.CaptureFixture[str]) -> None:
    directory, _ = saved
    document = json.loads(said(capsys, "show", "latest", "--dir", str(directory), "--json"))
    assert (document["step"], document["epoch"], document["job"], document["shards"]) == (8, 2, "train", 4)
    assert document["tensors"]["model.0.weight"] == "float32 [8, 6]"
    text = said(capsys, "show", document["name"], "--dir", str(directory))
    assert "model.0.weight" in text


def test_an_export_needs_nothing_of_this_project(
    saved: tuple[Path, Setup], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, setup = saved
    out = tmp_path / "out"
    written = said(capsys, "export", "best", "--dir", str(directory), "--output", str(out)).split()
    assert {Path(path).name for path in written} == {
        *("model.safetensors", "optimizer.safetensors", "job-state.safetensors", "notes.txt", "checkpoint.json"),
        "model-nonpersistent.safetensors",
    }
    assert load_file(out / "model-nonpersistent.safetensors")["scale"].tolist() == [1, 1]
    weights = load_file(out / "model.safetensors")
    model = setup.model.state_dict()
    assert weights.keys() == model.keys()
    assert all(torch.equal(weights[name], model[name]) for name in model)
    document: dict[str, Any] = json.loads((out / "checkpoint.json").read_text())
    assert document["step"] == 9
    assert document["state"]["seen"] == 144
    assert document["state"]["mean"] == {"__tensor__": ["job-state.safetensors", "mean"]}
    values = load_file(out / "job-state.safetensors")
    assert torch.equal(values["mean"], torch.arange(3.0))
    keys = [told["__tensor__"][1] for _, told in document["state"]["by_class"]["__dict__"]]
    assert [values[key].tolist() for key in keys] == [[1, 1], [0, 0, 0]]
    assert document["objects"]["scheduler"]["state"]["last_epoch"] == 9
    assert (out / "files" / "notes.txt").read_text() == "step 9"
    assert "is not empty" in said(
        capsys, "export", "best", "--dir", str(directory), "--output", str(out), code=ExitCode.BAD_INPUT
    )


def test_prune_removes_what_is_not_kept(saved: tuple[Path, Setup], capsys: pytest.CaptureFixture[str]) -> None:
    directory, _ = saved
    removed = json.loads(said(capsys, "prune", "--keep", "last 1", "--dir", str(directory), "--json"))
    assert [name[:17] for name in removed] == ["step-000000000004"]
    rows = json.loads(said(capsys, "list", "--dir", str(directory), "--json"))
    assert [row["step"] for row in rows] == [8, 9]


def test_prune_does_not_take_a_damaged_one_for_one_that_may_replace_others(
    saved: tuple[Path, Setup], capsys: pytest.CaptureFixture[str]
) -> None:
    directory, _ = saved
    flip(next(directory.glob("_periodic/step-000000000008*/*.safetensors")), 0.99)
    assert json.loads(said(capsys, "prune", "--keep", "last 1", "--dir", str(directory), "--json")) == []
    assert "its SHA-256" in said(capsys, "verify", "--dir", str(directory), code=1)


@pytest.mark.parametrize(("steps", "skips"), [(6, False), (9, True)])
def test_prune_keeps_that_from_which_the_job_would_go_on(
    saved: tuple[Path, Setup], capsys: pytest.CaptureFixture[str], steps: int, skips: bool
) -> None:
    """The ledger ends before the newest, or an earlier start has skipped it: the one before is the job's only one."""
    directory, _ = saved
    newest = next(directory.glob("_periodic/step-000000000008*")).name
    ledger = directory.parent / "steps.jsonl"
    ledger.write_text("".join(f'{{"step": {step}, "generation": 1, "world": 1}}\n' for step in range(steps)))
    told = Settings(
        root=str(directory), job="train", job_id="feed", ledger=str(ledger), skipped=(newest,) if skips else ()
    )
    (directory.parent / "checkpoints.json").write_text(json.dumps(asdict(told)))
    (directory.parent / "job.json").write_text("{}")
    assert json.loads(said(capsys, "prune", "--keep", "last 1", "--job-dir", str(directory.parent), "--json")) == []


@pytest.mark.parametrize(
    ("words", "because"),
    [
        (["show", "best"], "no usable checkpoint best"),
        (["export", "latest", "--output", "out"], "no usable checkpoint latest"),
        (["prune", "--keep", "nothing"], "keep='nothing': write \"last 2\""),
    ],
)
def test_what_is_not_there_is_said(
    words: list[str], because: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert because in said(capsys, *words, "--dir", str(tmp_path), code=ExitCode.BAD_INPUT)


def test_a_directory_without_a_job_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "holds no job" in said(capsys, "list", "--job-dir", str(tmp_path), code=ExitCode.BAD_INPUT)
    assert "has no checkpoints" in said(capsys, "list", "--dir", str(tmp_path))
