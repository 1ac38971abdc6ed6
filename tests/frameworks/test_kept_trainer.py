"""Scripts with transformers.Trainer, unchanged, under `elastic run --restart --ranks N`: after kills and joins they
have written what they write under a quiet torchrun with N processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.frameworks.fates import WITHOUT_LOADERS
from tests.frameworks.test_hugging_face import OFFLINE, SCRIPTS, files, log_of
from tests.live.jobs import DEADLINE_S, ROOT, Job

RANKS = 4
ENVIRONMENT = {**OFFLINE, **WITHOUT_LOADERS}


def under_torchrun(kind: str, output: Path) -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [*words, str(SCRIPTS / f"{kind}.py"), str(output)]
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=3 * DEADLINE_S)


def kept(job: Job) -> int:
    """The newest step that all workers have kept; -1: not all have."""
    said = [re.search(r"step (\d+) kept", json.dumps(member)) for member in job.status()["members"]]
    return min((int(one[1]) if one else -1 for one in said), default=-1)


def kill_behind(job: Job, step: int, workers: int) -> None:
    """Kill a process of the script when that step is kept, and wait for a step of the round of all workers."""
    reached = job.until(f"step {step}", lambda: max(0, kept(job) - step + 1)) + step - 1
    victim = next(line for line in reversed(job.events("script_started")) if line["rank"] == step % RANKS)
    os.kill(victim["script"], signal.SIGKILL)
    first = job.await_event("kept_found", generation=victim["generation"] + 1)["step"]
    assert first >= reached
    job.until("a step with all workers", lambda: len(job.members()) == workers and kept(job) > first)


def trained(kind: str, home: Path) -> tuple[Path, Path]:
    """Where a quiet torchrun has written, and a job of three workers with two kills and joins."""
    quiet, output = home / "quiet", home / "output"
    under_torchrun(kind, quiet)
    words = ("--workers", "3", "--restart", "--ranks", str(RANKS), str(SCRIPTS / f"{kind}.py"), str(output))
    with Job(home, *words, environment=ENVIRONMENT) as job:
        job.pace(0.5)
        for step in (3, 14):
            kill_behind(job, step, workers=3)
        job.pace(0.0)
        assert job.wait() == 0, job.story()
    assert files(output) == files(quiet)
    assert log_of(output) == log_of(quiet)
    return quiet, output


@pytest.mark.parametrize("kind", ["hf_classification", "hf_language_model", "hf_early_stopping", "hf_sft"])
def test_kills_and_joins_leave_no_trace(kind: str, tmp_path: Path) -> None:
    quiet, output = trained(kind, tmp_path)
    weights = list(quiet.rglob("*.safetensors"))
    assert weights
    for one in weights:
        assert (output / one.relative_to(quiet)).read_bytes() == one.read_bytes(), one


def test_nor_do_they_where_trainer_shards_by_fsdp2(tmp_path: Path) -> None:
    quiet, output = trained("hf_fsdp", tmp_path)
    assert (output / "digest").read_text() == (quiet / "digest").read_text()
