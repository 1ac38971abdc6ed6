"""Scripts with Lightning, unchanged, and one with accelerate, under `elastic run --restart --ranks N`: after kills and
joins they have written what they write under a quiet torchrun with N processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.frameworks.test_kept_trainer import RANKS, kill_behind
from tests.frameworks.test_lightning import SCRIPTS, assert_equal
from tests.live.jobs import DEADLINE_S, ROOT, Job


def under_torchrun(kind: str, output: Path) -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [*words, str(SCRIPTS / f"{kind}.py"), str(output), "ddp"]
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=3 * DEADLINE_S)


def written(output: Path) -> dict[str, Any]:
    """Each file by its path: its bytes, or what is in a checkpoint."""
    return {
        str(path.relative_to(output)): torch.load(path, weights_only=False)
        if path.suffix == ".ckpt"
        else path.read_bytes()
        for path in sorted(output.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("kind", ["lightning_classification", "lightning_language_model"])
def test_kills_and_joins_leave_no_trace(kind: str, tmp_path: Path) -> None:
    quiet, output = tmp_path / "quiet", tmp_path / "output"
    under_torchrun(kind, quiet)
    words = ("--workers", "3", "--restart", "--ranks", str(RANKS), str(SCRIPTS / f"{kind}.py"), str(output), "ddp")
    with Job(tmp_path, *words) as job:
        job.pace(0.5)
        for step in (3, 14):
            kill_behind(job, step, workers=3)
        job.pace(0.0)
        assert job.wait() == 0, job.story()
    mine, theirs = written(output), written(quiet)
    assert mine.keys() == theirs.keys()
    for name, content in theirs.items():
        assert_equal(mine[name], content, name, str(output), str(quiet))


def test_a_loop_over_what_accelerate_prepares_is_kept_by_three_lines(tmp_path: Path) -> None:
    quiet, output = tmp_path / "quiet", tmp_path / "output"
    under_torchrun("accelerate_kept", quiet)
    words = ("--workers", "3", "--restart", "--ranks", str(RANKS), str(SCRIPTS / "accelerate_kept.py"), str(output))
    with Job(tmp_path, *words) as job:
        job.pace(0.5)
        for step in (3, 9):
            kill_behind(job, step, workers=3)
        job.pace(0.0)
        assert job.wait() == 0, job.story()
    assert (output / "digest").read_text() == (quiet / "digest").read_text()
