"""Scripts with Lightning, unchanged: deaths, joins and resumed runs leave no trace in weights, metrics and files."""

from __future__ import annotations

import csv
import functools
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.records import ledger
from tests.frameworks.fates import everything_killed, two_deaths_and_two_joins
from tests.live.jobs import DEADLINE_S, Job
from tests.live.test_ddp import digest

pytest.importorskip("lightning", reason="frameworks are installed by `make test-frameworks`")

SCRIPTS = Path(__file__).parent / "scripts"
KINDS = ("lightning_classification", "lightning_language_model", "lightning_images", "lightning_skips")
CLOCKS = ("_last_time_checked", "_start_time")
"""In states of callbacks: what a clock says."""


@dataclass(frozen=True)
class Run:
    digest: str
    files: dict[str, bytes]
    """All but Lightning's checkpoints."""
    checkpoints: dict[str, Any]
    steps: list[Any]
    """Of the ledger."""


def words(kind: str, workers: int, output: Path, *more: str) -> tuple[str, ...]:
    options = ("--workers", str(workers), "--ranks", "4", "--checkpoint-every", "4 steps")
    return (*options, str(SCRIPTS / f"{kind}.py"), str(output), *more)


def ended(job: Job, output: Path) -> Run:
    """What a job has left that has ended well."""
    assert job.wait() == 0, job.output
    files = {path.relative_to(output): path for path in sorted(output.rglob("*")) if path.is_file()}
    own = {str(name): path for name, path in files.items() if path.suffix == ".ckpt"}
    rest = {str(name): path.read_bytes() for name, path in files.items() if path.suffix != ".ckpt"}
    directories = {str(path.relative_to(output)): b"" for path in output.rglob("*") if path.is_dir()}
    loaded = {name: torch.load(path, weights_only=False) for name, path in own.items()}
    return Run(digest(job), {**rest, **directories}, loaded, ledger.read(job.dir / "steps.jsonl"))


def same(run: Run, wanted: Run, output: Path, quiet: Path) -> None:
    assert run.digest == wanted.digest
    assert ledger.compare(run.steps, wanted.steps) is None
    assert run.files == wanted.files
    assert run.checkpoints.keys() == wanted.checkpoints.keys()
    for name, checkpoint in run.checkpoints.items():
        assert_equal(checkpoint, wanted.checkpoints[name], name, str(output), str(quiet))


def assert_equal(one: Any, other: Any, where: str, mine: str, theirs: str) -> None:
    """Deeply, also tensors; paths are those of the run's own directory."""
    if isinstance(one, str):
        assert isinstance(other, str)
        assert one.replace(mine, "") == other.replace(theirs, ""), where
    elif isinstance(one, dict):
        ours = {str(key).replace(mine, ""): value for key, value in one.items() if key not in CLOCKS}
        others = {str(key).replace(theirs, ""): value for key, value in other.items() if key not in CLOCKS}
        assert ours.keys() == others.keys(), where
        for key, value in ours.items():
            assert_equal(value, others[key], f"{where}: {key}", mine, theirs)
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_equal(a, b, f"{where}[{number}]", mine, theirs)
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    else:
        assert one == other, where


@functools.cache
def quiet(kind: str, home: Path) -> Run:
    """One worker that has all ranks, without a fault."""
    with Job(home, *words(kind, 1, home / kind), name=f"quiet-{kind}") as job:
        return ended(job, home / kind)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quiet")


@pytest.mark.parametrize("kind", KINDS)
def test_two_deaths_and_two_joins_leave_no_trace(kind: str, home: Path, tmp_path: Path) -> None:
    wanted, output = quiet(kind, home), tmp_path / "output"
    with Job(tmp_path, *words(kind, 3, output)) as job:
        two_deaths_and_two_joins(job, 3, 12)
        same(ended(job, output), wanted, output, home / kind)
        assert not job.events("script_failed"), job.output


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_when_everything_was_killed(kind: str, home: Path, tmp_path: Path) -> None:
    wanted, output = quiet(kind, home), tmp_path / "output"
    with Job(tmp_path, *words(kind, 2, output)) as job:
        everything_killed(job, 17)
    with Job(tmp_path, *words(kind, 3, output)) as job:
        job.pace(0)
        same(ended(job, output), wanted, output, home / kind)


def test_losses_are_those_of_torchrun(tmp_path: Path) -> None:
    """Without dropout, as random numbers are seeded otherwise. All samples are evaluated in whole batches of all ranks,
    or Lightning would count some of them twice."""
    kind = "lightning_language_model"
    plain = {"DROPOUT": "0", "PRECISION": "32-true", "EVALUATED": "48"}
    with Job(tmp_path, *words(kind, 2, tmp_path / "ours"), environment=plain) as job:
        ended(job, tmp_path / "ours")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    arguments = [str(SCRIPTS / f"{kind}.py"), str(tmp_path / "theirs"), "ddp"]
    variables = {**os.environ, **plain, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *arguments], env=variables, check=True, capture_output=True, timeout=DEADLINE_S)
    ours, theirs = (rows(tmp_path / name / "metrics.csv") for name in ("ours", "theirs"))
    assert [row.keys() for row in ours] == [row.keys() for row in theirs]
    assert sum("loss" in row for row in ours) == 20
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=1e-5), (mine, other)


def rows(file: Path) -> list[dict[str, float]]:
    with file.open(newline="") as text:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(text)]


def refused(tmp_path: Path, *arguments: str, ranks: int = 2) -> list[str]:
    """The errors that lightning_refused.py has printed, each of which says what to do instead."""
    options = ("--workers", "1", "--ranks", str(ranks), "--no-replace")
    with Job(tmp_path, *options, str(SCRIPTS / "lightning_refused.py"), *arguments) as job:
        job.wait()
        lines = [line for line in job.output.splitlines() if line.startswith("refused: ")]
    instead = (
        "write ",
        "leave it out",
        "use ",
        "look for",
        "give it one",
        "Return ",
        "Leave ",
        "let an error end",
        "give it batch",
    )
    for line in lines:
        assert any(words in line for words in instead), line
    return lines


def test_what_cannot_train_in_place_is_refused_with_what_to_write(tmp_path: Path) -> None:
    lines = refused(tmp_path)
    names = (
        *("strategy='fsdp'", "sync_batchnorm=True", "manual optimization", "manual optimization"),
        *("an IterableDataset", "GradientAccumulationScheduler", "StochasticWeightAveraging", "BackboneFinetuning"),
        *("ddp_comm_hook", "ddp_comm_hook", "strategy='Own'", "model_averaging_period"),
        *(
            "a CombinedLoader that gives several batches at once",
            "validation_step(dataloader_iter)",
            "no size of batches",
        ),
        *("Tuner.lr_find()", "val_check_interval as a time"),
        *("val_check_interval=3, accumulate_grad_batches=2", "val_check_interval=2, accumulate_grad_batches=3"),
    )
    assert len(lines) == len(names), lines
    for name, line in zip(names, lines, strict=True):
        assert name in line


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("gathers", "all_gather() in training_step()"),
        ("none", "training_step() returned None"),
        ("none batch", "gave None for a batch"),
        ("list", "a list or dictionary of training loaders"),
    ],
)
def test_what_is_seen_in_a_step_is_refused_and_so_is_a_fit_behind_it(kind: str, name: str, tmp_path: Path) -> None:
    cause, next_one = refused(tmp_path, kind, ranks=1 if kind == "none" else 2)
    assert name in cause
    assert "behind one that has ended with an error" in next_one
