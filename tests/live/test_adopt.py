"""Scripts that `elastic adopt` has rewritten, run: beside what they were, by several workers, and examined."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from chaos_tests.support.processes import Command
from elastic import cli
from elastic.adopt.adoption import adopt
from tests.live.jobs import DEADLINE_S, ROOT, Job, run_alone

DDP_SCRIPTS = ROOT / "tests" / "ddp_scripts"
FUNCTIONS = DDP_SCRIPTS / "functions.py"
SCRIPTS = (ROOT / "docs" / "examples" / "train_ddp.py", DDP_SCRIPTS / "plain.py", DDP_SCRIPTS / "top_level.py")
NAP = {"NAP": "0.15"}
"""Seconds a step, so that there is time to kill somebody."""

PLAIN = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
x = torch.randn(96, 5)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).tanh()), batch_size=16)
model = torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = []
for epoch in range(2):
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print(f"epoch {epoch} step {i} of {len(losses)} loss {loss.item():.6f}")
"""


def adopted(home: Path, text: str, ranks: int) -> Path:
    found = adopt(text, ranks)
    assert found.refusals == ()
    path = home / "train.py"
    path.write_text(found.text)
    return path


def numbers(output: str) -> list[list[float]]:
    """Of each line that tells of an epoch."""
    return [[float(n) for n in re.findall(r"\d+\.?\d*", line)] for line in output.splitlines() if line[:6] == "epoch "]


@pytest.mark.parametrize(
    ("script", "lines"), [("functions.py", 42), pytest.param("top_level.py", 16, marks=pytest.mark.long)]
)
def test_it_prints_what_the_script_prints_under_torchrun(script: str, lines: int, tmp_path: Path) -> None:
    """Losses, means over the ranks, counts: all but for the last bits."""
    path = DDP_SCRIPTS / script
    here = numbers(run_alone(tmp_path, adopted(tmp_path, path.read_text(), ranks=2)))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(path)]
    there = Command(torchrun, tmp_path / "torchrun.out", environment={"OMP_NUM_THREADS": "1"}, cwd=tmp_path)
    try:
        there.process.wait(DEADLINE_S)
    finally:
        there.stop()
    wanted = numbers(there.output)
    assert len(here) == len(wanted) == lines, there.output
    for line, other in zip(here, wanted, strict=True):
        assert line == pytest.approx(other, rel=1e-4)


def test_a_script_of_one_process_prints_what_it_did(tmp_path: Path) -> None:
    (tmp_path / "before.py").write_text(PLAIN)
    wanted = numbers(run_alone(tmp_path, tmp_path / "before.py"))
    here = numbers(run_alone(tmp_path, adopted(tmp_path, PLAIN, ranks=4)))
    assert len(here) == len(wanted) == 12
    for line, other in zip(here, wanted, strict=True):
        assert line == pytest.approx(other, rel=1e-4)


def test_two_workers_of_which_one_is_killed_end_as_one_does(tmp_path: Path) -> None:
    script = str(adopted(tmp_path, FUNCTIONS.read_text(), ranks=4))
    with Job(tmp_path, "--workers", "1", script, name="quiet") as job:
        assert job.wait() == 0, job.output
        wanted, said = job.result["digest"], job.output.splitlines()
    with Job(tmp_path, "--workers", "2", script, environment=NAP) as job:
        for step in (3, 12):
            job.await_steps(step)
            job.send(job.await_world(2)[0])
        assert job.wait() == 0, job.output
        assert job.result["digest"] == wanted
        told = [line for line in job.output.splitlines() if line.startswith("epoch 2: ")]
        assert told and set(told) <= set(said)


@pytest.mark.parametrize(
    "script",
    [SCRIPTS[0], *(pytest.param(script, marks=pytest.mark.long) for script in SCRIPTS[1:])],
    ids=lambda s: s.stem,
)
def test_elastic_doctor_finds_it_exact(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = cli.main(["doctor", "--exact", str(adopted(tmp_path, script.read_text(), ranks=4))])
    assert (code, capsys.readouterr().out.splitlines()[-1]) == (0, "exact")
