"""`python train.py` without an agent: what the process prints and how it exits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.checkpoints.series import Series
from elastic.checkpoints.storage import storage_at

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
START_S = 100.0

HEAD = """
import elastic, torch, sys
job = elastic.join()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.register(model=model, optimizer=optimizer)
"""


def run(script: str, directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    (directory / "train.py").write_text(HEAD + script)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("ELASTIC_") and k != "WORLD_SIZE"}
    return subprocess.run(
        [sys.executable, "train.py"],
        cwd=directory,
        env={**clean, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )


def test_a_plain_script_trains_and_exits_with_0(tmp_path: Path) -> None:
    """Without `with` and without close(): the exit handler does it."""
    script = """
for step in job.steps(shards=4, total=3):
    for shard in step:
        loss = model(torch.randn(2, 4)).square().mean()
        loss.backward()
        step.log(loss=loss)
    optimizer.step()
    optimizer.zero_grad()
    job.save("last")
print("digest", job.digest())
"""
    runs = [run(script, tmp_path) for _ in range(2)]
    assert [(done.returncode, done.stderr) for done in runs] == [(0, ""), (0, "")]
    assert runs[0].stdout == runs[1].stdout
    found, skipped = Series(storage_at(str(tmp_path / "checkpoints")), "last").newest()
    assert found is not None and found.name.step == 2 and skipped == []


def test_an_exception_exits_with_1_and_one_traceback(tmp_path: Path) -> None:
    script = """
for step in job.steps(shards=4, total=3):
    for shard in step:
        raise KeyError("nothing here")
"""
    done = run(script, tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "KeyError: 'nothing here'" in done.stderr


def test_a_mistake_that_only_the_end_reveals_exits_with_1(tmp_path: Path) -> None:
    """The script breaks out of both loops and then has no error of its own."""
    script = """
for step in job.steps(shards=4, total=3):
    for shard in step:
        model(torch.randn(2, 4)).mean().backward()
        break
    break
print("the end")
"""
    done = run(script, tmp_path)
    assert (done.returncode, done.stdout) == (1, "the end\n")
    assert "NoGradient" in done.stderr and "step.skip()" in done.stderr


def test_another_launcher_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    done = run("print('trained')", tmp_path, WORLD_SIZE="4")
    assert (done.returncode, done.stdout) == (1, "")
    assert "NotUnderElastic" in done.stderr and "elastic run --workers 4" in done.stderr
