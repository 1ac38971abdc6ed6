"""Scripts with loops of their own over what accelerate or Fabric prepares, unchanged: deaths, joins and resumed runs
leave no trace in what they write."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elastic.records import ledger
from tests.frameworks.fates import WITHOUT_LOADERS, everything_killed, two_deaths_and_two_joins
from tests.live.jobs import DEADLINE_S, Job
from tests.live.test_ddp import digest

for framework in ("accelerate", "lightning"):
    pytest.importorskip(framework, reason="frameworks are installed by `make test-frameworks`")

SCRIPTS = Path(__file__).parent / "scripts"
KINDS = (
    "accelerate_classification",
    "accelerate_language_model",
    "accelerate_images",
    "accelerate_phases",
    "fabric_images",
)
OFFLINE = {"HF_HUB_OFFLINE": "1"}
PLAIN = {**OFFLINE, "DROPOUT": "0", "BF16": "0"}
"""Without dropout, as random numbers are seeded otherwise than by torchrun."""


@dataclass(frozen=True)
class Run:
    digest: str
    files: dict[str, str]
    """Path -> text of a file of records, or the empty text."""
    steps: list[Any]
    """Of the ledger."""


def words(kind: str, workers: int, output: Path) -> tuple[str, ...]:
    options = ("--workers", str(workers), "--ranks", "4", "--checkpoint-every", "4 steps")
    return (*options, str(SCRIPTS / f"{kind}.py"), str(output))


def files(output: Path) -> dict[str, str]:
    """But for the states of random generators, of which each worker writes its own."""
    return {
        str(path.relative_to(output)): path.read_text() if "json" in path.suffix else ""
        for path in output.rglob("*")
        if path.is_file() and "random_states" not in path.name
    }


def ended(job: Job, output: Path) -> Run:
    """What a job has left that has ended well."""
    assert job.wait() == 0, job.output
    return Run(digest(job), files(output), ledger.read(job.dir / "steps.jsonl"))


def same(run: Run, wanted: Run) -> None:
    assert run.digest == wanted.digest
    assert run.files == wanted.files
    assert ledger.compare(run.steps, wanted.steps) is None


@functools.cache
def quiet(kind: str, home: Path) -> Run:
    """One worker that has all ranks, without a fault."""
    with Job(home, *words(kind, 1, home / kind), name=f"quiet-{kind}", environment=OFFLINE) as job:
        return ended(job, home / kind)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quiet-accelerate")


@pytest.mark.parametrize("kind", KINDS)
def test_two_deaths_and_two_joins_leave_no_trace(kind: str, home: Path, tmp_path: Path) -> None:
    wanted, output = quiet(kind, home), tmp_path / "output"
    with Job(tmp_path, *words(kind, 3, output), environment=OFFLINE) as job:
        two_deaths_and_two_joins(job, 3, 16)  # in the first epoch and in the second one
        same(ended(job, output), wanted)
        assert not job.events("script_failed"), job.output


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_when_everything_was_killed(kind: str, home: Path, tmp_path: Path) -> None:
    wanted, output = quiet(kind, home), tmp_path / "output"
    with Job(tmp_path, *words(kind, 2, output), environment=OFFLINE) as job:
        everything_killed(job, 17)
    with Job(tmp_path, *words(kind, 3, output), environment=OFFLINE) as job:
        job.pace(0)
        same(ended(job, output), wanted)


@pytest.mark.parametrize("kind", ["accelerate_classification", "accelerate_language_model"])
def test_metrics_are_those_of_torchrun(kind: str, tmp_path: Path) -> None:
    with Job(tmp_path, *words(kind, 2, tmp_path / "ours"), environment=PLAIN) as job:
        ended(job, tmp_path / "ours")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    variables = {**os.environ, **PLAIN, **WITHOUT_LOADERS, "OMP_NUM_THREADS": "1"}
    arguments = [str(SCRIPTS / f"{kind}.py"), str(tmp_path / "theirs")]
    subprocess.run([*command, *arguments], env=variables, check=True, capture_output=True, timeout=DEADLINE_S)
    ours, theirs = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("ours", "theirs")
    )
    for mine, other in zip(ours, theirs, strict=True):
        for name, value in other.items():
            assert mine[name] == pytest.approx(value, rel=1e-6), (mine, other)
