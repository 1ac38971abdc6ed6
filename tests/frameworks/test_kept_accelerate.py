"""Scripts with a loop of their own over what accelerate prepares, unchanged, under `elastic run --restart --ranks N`:
after kills and joins they have written what they write under a quiet torchrun with N processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.frameworks.test_kept_trainer import ENVIRONMENT as KEPT
from tests.frameworks.test_kept_trainer import RANKS, kill_behind
from tests.frameworks.test_own_loops import KINDS, SCRIPTS
from tests.live.jobs import DEADLINE_S, ROOT, Job

ENVIRONMENT = {**KEPT, "ACCELERATE_USE_CPU": "true"}


def under_torchrun(kind: str, output: Path) -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [*words, str(SCRIPTS / f"{kind}.py"), str(output)]
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=3 * DEADLINE_S)


def written(output: Path) -> dict[str, bytes]:
    return {str(path.relative_to(output)): path.read_bytes() for path in output.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", [*(kind for kind in KINDS if kind.startswith("accelerate")), "accelerate_fsdp"])
def test_kills_and_joins_leave_no_trace(kind: str, tmp_path: Path) -> None:
    """In the first epoch, and later, where whole epochs with their evaluations are over."""
    quiet, output = tmp_path / "quiet", tmp_path / "output"
    under_torchrun(kind, quiet)
    words = ("--workers", "3", "--restart", "--ranks", str(RANKS), str(SCRIPTS / f"{kind}.py"), str(output))
    with Job(tmp_path, *words, environment=ENVIRONMENT) as job:
        job.pace(0.5)
        for step in (3, 16, 29):
            kill_behind(job, step, workers=3)
        job.pace(0.0)
        assert job.wait() == 0, job.story()
        assert not job.events("script_failed"), job.output
    mine, theirs = written(output), written(quiet)
    assert mine.keys() == theirs.keys()
    assert [name for name in theirs if mine[name] != theirs[name]] == []
