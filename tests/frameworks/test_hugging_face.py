"""Scripts with transformers.Trainer, unchanged: deaths, joins and resumed runs leave no trace in what they write."""

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
from tests.frameworks.fates import everything_killed, two_deaths_and_two_joins
from tests.live.jobs import DEADLINE_S, Job
from tests.live.test_ddp import digest

pytest.importorskip("transformers", reason="frameworks are installed by `make test-frameworks`")

SCRIPTS = Path(__file__).parent / "scripts"
KINDS = ("hf_classification", "hf_language_model", "hf_early_stopping", "hf_sft")
OFFLINE = {"HF_HUB_OFFLINE": "1"}
TIMES = ("runtime", "per_second")
"""In names of what Trainer logs: what a clock says."""


@dataclass(frozen=True)
class Run:
    digest: str
    log: list[dict[str, Any]]
    state: dict[str, Any]
    """Of trainer_state.json."""
    steps: list[Any]
    """Of the ledger."""


def words(kind: str, workers: int, output: Path) -> tuple[str, ...]:
    options = ("--workers", str(workers), "--ranks", "4", "--checkpoint-every", "4 steps")
    return (*options, str(SCRIPTS / f"{kind}.py"), str(output))


def ended(job: Job, output: Path) -> Run:
    """What a job has left that has ended well."""
    assert job.wait() == 0, job.output
    state = json.loads((output / "trainer_state.json").read_text())
    del state["log_history"]
    return Run(digest(job), log_of(output), state, ledger.read(job.dir / "steps.jsonl"))


def log_of(output: Path) -> list[dict[str, Any]]:
    """Without times."""
    rows = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return [{name: value for name, value in row.items() if not any(part in name for part in TIMES)} for row in rows]


def same(run: Run, wanted: Run, output: Path, quiet: Path) -> None:
    assert run.digest == wanted.digest
    assert run.log == wanted.log
    assert ledger.compare(run.steps, wanted.steps) is None
    own = {"best_model_checkpoint", "is_world_process_zero", "is_local_process_zero"}
    assert {k: v for k, v in run.state.items() if k not in own} == {
        k: v for k, v in wanted.state.items() if k not in own
    }
    assert files(output) == files(quiet)
    for weights in quiet.rglob("model.safetensors"):
        assert (output / weights.relative_to(quiet)).read_bytes() == weights.read_bytes()


def files(output: Path) -> set[str]:
    return {str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()}


@functools.cache
def quiet(kind: str, home: Path) -> Run:
    """One worker that has all ranks, without a fault."""
    with Job(home, *words(kind, 1, home / kind), name=f"quiet-{kind}", environment=OFFLINE) as job:
        return ended(job, home / kind)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quiet")


@pytest.mark.parametrize("kind", KINDS)
def test_two_deaths_and_two_joins_leave_no_trace(kind: str, home: Path, tmp_path: Path) -> None:
    wanted, output = quiet(kind, home), tmp_path / "output"
    with Job(tmp_path, *words(kind, 3, output), environment=OFFLINE) as job:
        two_deaths_and_two_joins(job, 3, 12)
        same(ended(job, output), wanted, output, home / kind)
        assert not job.events("script_failed"), job.output


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_when_everything_was_killed(kind: str, home: Path, tmp_path: Path) -> None:
    wanted, output = quiet(kind, home), tmp_path / "output"
    with Job(tmp_path, *words(kind, 2, output), environment=OFFLINE) as job:
        everything_killed(job, 17)
    with Job(tmp_path, *words(kind, 3, output), environment=OFFLINE) as job:
        job.pace(0)
        same(ended(job, output), wanted, output, home / kind)


@pytest.mark.parametrize("kind", ["hf_classification", "hf_language_model"])
def test_losses_and_metrics_are_those_of_torchrun(kind: str, tmp_path: Path) -> None:
    """Without dropout, as random numbers are seeded otherwise. All samples are evaluated in whole batches of all ranks,
    or Trainer would count some of them twice."""
    plain = {**OFFLINE, "DROPOUT": "0", "BF16": "0", "EVALUATED": "64"}
    with Job(tmp_path, *words(kind, 2, tmp_path / "ours"), environment=plain) as job:
        ours = ended(job, tmp_path / "ours")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    variables = {**os.environ, **plain, "OMP_NUM_THREADS": "1"}
    arguments = [str(SCRIPTS / f"{kind}.py"), str(tmp_path / "theirs")]
    subprocess.run([*command, *arguments], env=variables, check=True, capture_output=True, timeout=DEADLINE_S)
    theirs = log_of(tmp_path / "theirs")
    assert [row.keys() for row in ours.log] == [row.keys() for row in theirs]
    for mine, other in zip(ours.log, theirs, strict=True):
        # Of the steps since the last log, torchrun's Trainer counts the losses of rank 0 alone.
        assert mine.pop("train_loss", 0) == pytest.approx(other.pop("train_loss", 0), rel=1e-3)
        assert mine == pytest.approx(other, rel=1e-5), (mine, other)


def test_a_script_may_ask_for_its_ranks_itself(home: Path, tmp_path: Path) -> None:
    wanted, output = quiet("hf_classification", home), tmp_path / "output"
    script = str(SCRIPTS / "hf_enabled.py")
    with Job(tmp_path, "--workers", "2", script, str(output), environment=OFFLINE) as job:
        same(ended(job, output), wanted, output, home / "hf_classification")
