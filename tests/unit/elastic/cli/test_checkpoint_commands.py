"""`elastic checkpoints`: what it shows, finds damaged, exports and removes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from elastic import cli
from elastic.checkpoints.series import Series
from elastic.checkpoints.settings import Settings
from elastic.checkpoints.storage import LocalStorage, storage_at
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


@pytest.mark.parametrize(("verb", "meanwhile"), [("list", "files"), ("verify", "files"), ("verify", "open")])
def test_what_the_job_removes_while_it_is_read_is_left_out(
    saved: tuple[Path, Setup],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    meanwhile: str,
) -> None:
    directory, _ = saved
    series = Series(storage_at(str(directory)))
    newest, call = series.names()[-1], getattr(LocalStorage, meanwhile)

    def removing(storage: LocalStorage, path: str) -> Any:
        if str(newest) in path:
            series.remove(newest)
        return call(storage, path)

    monkeypatch.setattr(LocalStorage, meanwhile, removing)
    rows = json.loads(said(capsys, verb, "--dir", str(directory), "--json"))
    assert [(row["series"], row["step"], row["problem"]) for row in rows] == [("periodic", 4, ""), ("best", 9, "")]


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


def test_an_export_that_cannot_be_written_names_its_directory_and_leaves_nothing(
    saved: tuple[Path, Setup], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = saved

    def full(*_: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("elastic.checkpoints.export._copy", full)
    for out in (tmp_path / "new", tmp_path / "given"):
        (tmp_path / "given").mkdir(exist_ok=True)
        words = ("export", "best", "--dir", str(directory), "--output", str(out))
        told = said(capsys, *words, code=ExitCode.BAD_INPUT)
        assert f"to {out}: [Errno 28] No space left on device" in told
        assert "cannot be used" not in told
    assert not (tmp_path / "new").exists() and (tmp_path / "given").exists()


def test_prune_removes_what_is_not_kept(saved: tuple[Path, Setup], capsys: pytest.CaptureFixture[str]) -> None:
    directory, _ = saved
    removed = json.loads(said(capsys, "prune", "--keep", "last 1", "--dir", str(directory), "--json"))
    assert [name[:17] for name in removed] == ["step-000000000004"]
    rows = json.loads(said(capsys, "list", "--dir", str(directory), "--json"))
    assert [row["step"] for row in rows] == [8, 9]


def test_prune_keeps_what_the_job_keeps_for_good(saved: tuple[Path, Setup], capsys: pytest.CaptureFixture[str]) -> None:
    job_dir = saved[0].parent
    told = Settings(root=str(saved[0]), keep="last 1, every 5 steps", job="train", job_id="feed")
    (job_dir / "checkpoints.json").write_text(json.dumps(asdict(told)))
    (job_dir / "job.json").write_text("{}")
    assert said(capsys, "prune", "--job-dir", str(job_dir)) == "nothing to remove\n"
    assert "removed step-000000000004" in said(capsys, "prune", "--keep", "last 1", "--job-dir", str(job_dir))


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


def describe(job_dir: Path, **job: str) -> None:
    """What `elastic run` has left there of a job with the checkpoints of `saved`."""
    told = Settings(root=str(job_dir / "checkpoints"), job="train", job_id="feed")
    (job_dir / "checkpoints.json").write_text(json.dumps(asdict(told)))
    (job_dir / "job.json").write_text(json.dumps(job))


def test_a_copy_of_a_job_has_checkpoints_of_its_own(
    saved: tuple[Path, Setup], tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    job_dir, copy = saved[0].parent, tmp_path_factory.mktemp("copies") / "copy"
    describe(job_dir)
    shutil.copytree(job_dir, copy)
    assert "removed step-000000000004" in said(capsys, "prune", "--keep", "last 1", "--job-dir", str(copy))
    for place, steps in ((copy, [8, 9]), (job_dir, [8, 4, 9])):
        rows = json.loads(said(capsys, "list", "--job-dir", str(place), "--json"))
        assert [row["step"] for row in rows] == steps


def test_a_job_that_was_moved_with_a_checkpoint_directory_of_its_own_name(
    saved: tuple[Path, Setup], tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    job_dir, copy = saved[0].parent, tmp_path_factory.mktemp("copies") / "copy"
    describe(job_dir, checkpoint_dir="checkpoints")
    shutil.copytree(job_dir, copy)
    settings = json.loads((copy / "checkpoints.json").read_text())
    (copy / "checkpoints.json").write_text(json.dumps({**settings, "ledger": str(job_dir / "steps.jsonl")}))
    shutil.rmtree(saved[0])
    assert len(json.loads(said(capsys, "list", "--job-dir", str(copy), "--json"))) == 3


def test_a_copy_of_a_job_with_checkpoints_elsewhere_has_the_same(
    saved: tuple[Path, Setup], tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    job_dir, copy = saved[0].parent, tmp_path_factory.mktemp("copies") / "copy"
    describe(job_dir, checkpoint_dir="checkpoints")
    shutil.copytree(job_dir, copy, ignore=shutil.ignore_patterns("checkpoints"))
    assert len(json.loads(said(capsys, "list", "--job-dir", str(copy), "--json"))) == 3


@pytest.mark.parametrize("content", ['{"root": "', "[]", '{"newer": 1}', '{"skipped": 1}'])
def test_damaged_settings_are_named(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    describe(tmp_path)
    (tmp_path / "checkpoints.json").write_text(content)
    told = said(capsys, "list", "--job-dir", str(tmp_path), code=ExitCode.BAD_INPUT)
    assert f"{tmp_path}/checkpoints.json is damaged" in told


def test_what_the_output_refuses_is_not_said_of_the_checkpoints(tmp_path: Path) -> None:
    words = [sys.executable, "-u", "-m", "elastic.cli", "checkpoints", "list", "--dir", str(tmp_path)]
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as unread, open("/dev/full", "wb") as full:
        ends = [subprocess.run(words, stdout=out, stderr=subprocess.PIPE, check=False) for out in (unread, full)]
    assert (ends[0].returncode, ends[0].stderr) == (128 + signal.SIGPIPE, b"")
    assert ends[1].returncode == ExitCode.BAD_INPUT
    assert b"No space left on device" in ends[1].stderr and str(tmp_path).encode() not in ends[1].stderr


@pytest.mark.parametrize(
    ("words", "because"),
    [
        (["show", "best"], "no usable checkpoint best"),
        (["export", "latest", "--output", "out"], "no usable checkpoint latest"),
        (["verify"], "has no completed checkpoints, so there is nothing to verify"),
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
