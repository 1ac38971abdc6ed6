"""Scripts with transformers.Trainer, unchanged, under `elastic run --restart --ranks N`: what they write is what they write
under a quiet torchrun with N processes, after kills and joins."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.frameworks.test_hugging_face import OFFLINE, SCRIPTS, files, log_of
from tests.live.jobs import DEADLINE_S, ROOT, Job

RANKS = 4


def under_torchrun(kind: str, output: Path) -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    environment = {**os.environ, **OFFLINE, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [*words, str(SCRIPTS / f"{kind}.py"), str(output)]
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=DEADLINE_S)


def kept(job: Job) -> int:
    """The newest step that all workers have kept; -1: not all have."""
    said = [re.search(r"step (\d+) kept", json.dumps(member)) for member in job.status()["members"]]
    return min((int(one[1]) if one else -1 for one in said), default=-1)


@pytest.mark.parametrize("kind", ["hf_classification", "hf_language_model", "hf_early_stopping", "hf_sft"])
def test_kills_and_joins_leave_no_trace(kind: str, tmp_path: Path) -> None:
    quiet, output = tmp_path / "quiet", tmp_path / "output"
    under_torchrun(kind, quiet)
    words = ("--workers", "2", "--restart", "--ranks", str(RANKS), str(SCRIPTS / f"{kind}.py"), str(output))
    with Job(tmp_path, *words, environment=OFFLINE) as job:
        job.pace(0.5)
        for step in (3, 14):
            reached = job.until(f"step {step}", lambda step=step: kept(job) >= step and kept(job))  # type: ignore[misc]
            started = job.events("script_started")
            rank = next(line for line in reversed(started) if line["rank"] == step % RANKS)
            os.kill(rank["script"], signal.SIGKILL)
            found = job.await_event("kept_found", generation=rank["generation"] + 1)
            assert found["step"] >= reached
            job.until("a new round", lambda: len(job.members()) == 2 and kept(job) > found["step"])
        job.pace(0.0)
        assert job.wait() == 0, job.story()
    assert (output / "model.safetensors").read_bytes() == (quiet / "model.safetensors").read_bytes()
    assert log_of(output) == log_of(quiet)
    assert files(output) == files(quiet)
