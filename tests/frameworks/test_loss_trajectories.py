"""The losses of 50 steps, as the frameworks' own DDP with four processes gave them once, without a fault; here three
workers have the four ranks, and two of them die.

`python -m tests.frameworks.test_loss_trajectories` captures them anew, into loss_trajectories.json.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.frameworks.events import shown
from tests.frameworks.fates import two_deaths_and_two_joins
from tests.frameworks.test_hugging_face import OFFLINE, SCRIPTS, log_of, words
from tests.live.jobs import DEADLINE_S, Job

GOLDEN = Path(__file__).with_name("loss_trajectories.json")
STEPS = 50
PLAIN = {
    **OFFLINE, "DROPOUT": "0", "BF16": "0", "PRECISION": "32-true", "STEPS": str(STEPS), "LOG_EVERY": "1",
    "REPORT_TO": "tensorboard",
}  # fmt: skip
"""Without dropout, as random numbers are seeded otherwise."""
TOLERANCE = 1e-5
"""Relative. Another processor rounds otherwise, and each step adds to it: with torch's kernels for any processor
(ATEN_CPU_CAPABILITY=default) instead of those for AVX-512 the losses differ by 1.4e-7 at most."""


def of_trainer(output: Path) -> list[float]:
    return [row["loss"] for row in log_of(output) if "loss" in row]


def of_lightning(output: Path) -> list[float]:
    with (output / "metrics.csv").open(newline="") as text:
        return [float(row["loss"]) for row in csv.DictReader(text) if row["loss"]]


def of_accelerate(output: Path) -> list[float]:
    return [value for _, value in shown(output)["events: loss"]]


KINDS: dict[str, Callable[[Path], list[float]]] = {
    "hf_language_model": of_trainer,
    "lightning_language_model": of_lightning,
    "accelerate_language_model": of_accelerate,
}


@pytest.mark.parametrize("kind", KINDS)
def test_two_deaths_leave_the_losses_of_plain_ddp(kind: str, tmp_path: Path) -> None:
    for package in ("tensorboard", "transformers", "lightning"):
        pytest.importorskip(package, reason="frameworks are installed by `make test-frameworks`")
    wanted, output = json.loads(GOLDEN.read_text())[kind], tmp_path / "output"
    with Job(tmp_path, *words(kind, 3, output), environment=PLAIN) as job:
        two_deaths_and_two_joins(job, 3, 20)
        assert job.wait() == 0, job.output
    losses = KINDS[kind](output)
    assert len(losses) == len(wanted) == STEPS
    assert losses == pytest.approx(wanted, rel=TOLERANCE)


def captured(kind: str, home: Path) -> list[float]:
    """By torchrun with four processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    arguments = [str(SCRIPTS / f"{kind}.py"), str(home / kind), *(["ddp"] if kind.startswith("lightning") else [])]
    variables = {**os.environ, **PLAIN, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *arguments], env=variables, check=True, timeout=DEADLINE_S)
    return KINDS[kind](home / kind)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        curves = {kind: captured(kind, Path(directory)) for kind in KINDS}
    GOLDEN.write_text(json.dumps(curves, indent=1) + "\n")
