"""`elastic run` and `elastic status` with real workers: what a person at the terminal sees, and what is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic import cli
from tests.live.jobs import DEADLINE_S, ROOT, SCRIPTS, Job, run_alone

SCRIPT = SCRIPTS / "mlp.py"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A run to which nothing happened."""
    with Job(tmp_path_factory.mktemp("plain"), str(SCRIPT)) as job:
        assert job.wait() == 0
        yield job


def test_a_quiet_run_ends_with_a_summary_and_complete_records(plain: Job) -> None:
    steps = plain.steps()
    merged = [json.loads(text) for text in (plain.dir / "journal.jsonl").read_text().splitlines()]
    times = [line["t_mono_ns"] for line in merged]
    assert [line["step"] for line in steps] == list(range(40))
    assert sorted(sample for line in steps[:20] for shard in line["samples"] for sample in shard) == list(range(640))
    assert times == sorted(times)
    assert {"job_ended", "op_complete", "worker_exited"} <= {line["event"] for line in merged}
    assert f"digest {plain.result['digest']}" in plain.output
    assert plain.output.count("epoch 1 loss") == 1, "only the leader's output is shown"
    assert "40 steps, 1280 samples" in plain.output
    assert {"local.0.0.log", "local.1.0.log"} <= {path.name for path in (plain.dir / "logs").iterdir()}
    assert plain.left_behind() == {}


@pytest.mark.long
def test_the_script_alone_has_the_same_bits(plain: Job, tmp_path: Path) -> None:
    shown = [line for line in plain.output.splitlines() if not line.startswith("elastic:")]
    assert run_alone(tmp_path, SCRIPT).splitlines() == shown


def test_status_of_the_ended_job(plain: Job, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--job-dir", str(plain.dir), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["state"], document["applied"], document["exit_code"]) == ("closed", 40, 0)


@pytest.mark.long
def test_a_module_runs_in_the_commands_directory_and_environment_with_json_on_stdout(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(
        "import os, sys, torch, elastic\n"
        "job = elastic.join()\n"
        "model = torch.nn.Linear(2, 1)\n"
        "job.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "for step in job.steps(shards=1, total=2):\n"
        "    for _ in step:\n"
        "        loss = model(torch.randn(4, 2)).square().mean()\n"
        "        loss.backward()\n"
        "job.print(os.getcwd(), os.environ['COLOUR'], *sys.argv[1:])\n"
    )
    command = [
        sys.executable,
        "-m",
        "elastic.cli",
        "run",
        "--json",
        "--workers",
        "3",
        "-m",
        "package.train",
        "--",
        "-x",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLOUR": "blue"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["event"], summary["steps"], summary["exit_code"]) == ("summary", 2, 0)
    assert summary["job_dir"] == str(tmp_path / "elastic-jobs" / "train-1")
    assert f"{tmp_path} blue -- -x" in done.stderr
    assert "are idle" in done.stderr, "more workers than shards are allowed, and said"
