"""`elastic run` and `elastic status` with real workers: what a person at the terminal sees, and what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from chaos_tests.harness.processes import Command, await_exits, living
from elastic import cli, journal, ledger
from elastic.errors import ElasticError, ExitCode
from elastic.status import job_status

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).parent / "scripts" / "mlp.py"
ENVIRONMENT = {"PYTHONPATH": str(ROOT)}
DEADLINE_S = 100.0
STOPPED_WITHIN_S = 5.0
SLACK_S = 3.0
"""On a loaded machine, beside what is promised on an idle one."""

LONG = ("--epochs", "1000", "--pause-s", "0.02")

T = TypeVar("T")


class Run:
    """One `elastic run` of a script in its own directory."""

    def __init__(self, home: Path, *words: str, name: str = "job") -> None:
        self.dir = home / name
        command = [sys.executable, "-m", "elastic.cli", "run", "--job-dir", str(self.dir), *words]
        self.command = Command(command, home / f"{name}.out", environment=ENVIRONMENT, cwd=home)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.command.stop()

    @property
    def output(self) -> str:
        return self.command.output

    def wait(self) -> int:
        try:
            return self.command.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {DEADLINE_S} s:\n{self.output}")

    def until(self, what: str, reached: Callable[[], T | None]) -> T:
        until_s = time.monotonic() + DEADLINE_S
        while not (value := reached()):
            assert self.command.process.poll() is None, f"ended before {what}:\n{self.output}"
            assert time.monotonic() < until_s, f"not reached: {what}\n{self.output}"
            time.sleep(0.02)
        return value

    def steps(self) -> list[dict[str, Any]]:
        path = self.dir / "steps.jsonl"
        return ledger.read(path) if path.exists() else []

    def await_steps(self, count: int) -> None:
        self.until(f"{count} steps", lambda: len(self.steps()) >= count)

    def pid_of(self, module: str) -> int:
        """The process of a service of this run."""
        for pid in living(self.command.mark):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if module.encode() in words:
                return pid
        raise AssertionError(f"no process of {module}")

    def members(self) -> list[dict[str, Any]]:
        try:
            return list(job_status(self.dir)["members"])
        except ElasticError:
            return []

    def left_behind(self) -> set[int]:
        return await_exits(living(self.command.mark), within_s=SLACK_S)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run to which nothing happened, for comparison."""
    with Run(tmp_path_factory.mktemp("quiet"), str(SCRIPT)) as run:
        assert run.wait() == 0, run.output
        yield run


def test_a_quiet_run_ends_with_a_summary_and_complete_records(quiet: Run) -> None:
    result = json.loads((quiet.dir / "result.json").read_bytes())
    steps = quiet.steps()
    merged = [json.loads(text) for text in (quiet.dir / "journal.jsonl").read_text().splitlines()]
    times = [line["t_mono_ns"] for line in merged]
    assert [line["step"] for line in steps] == list(range(40))
    assert sorted(sample for line in steps[:20] for shard in line["samples"] for sample in shard) == list(range(640))
    assert times == sorted(times)
    assert {"job_ended", "op_complete", "worker_exited"} <= {line["event"] for line in merged}
    assert f"digest {result['digest']}" in quiet.output
    assert quiet.output.count("epoch 1 loss") == 1, "only the leader's output is shown"
    assert "40 steps, 1280 samples" in quiet.output
    assert {"local.0.0.log", "local.1.0.log"} <= {path.name for path in (quiet.dir / "logs").iterdir()}
    assert quiet.left_behind() == set()


def test_the_script_alone_has_the_same_bits(quiet: Run, tmp_path: Path) -> None:
    environment = {**os.environ, **ENVIRONMENT}
    alone = subprocess.run(
        [sys.executable, str(SCRIPT)],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    shown = [line for line in quiet.output.splitlines() if not line.startswith("elastic:")]
    assert alone.stdout.splitlines() == shown


def test_status_of_the_ended_job(quiet: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--job-dir", str(quiet.dir), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["state"], document["applied"], document["exit_code"]) == ("closed", 40, 0)


def test_a_killed_worker_and_a_killed_leader_change_nothing(quiet: Run, tmp_path: Path) -> None:
    """SIGKILL of a worker, then of the rendezvous service: same digest, same ledger, the survivor keeps its process."""
    with Run(tmp_path, str(SCRIPT), "--pause-s", "0.01") as run:
        run.await_steps(5)
        members = run.until("two members", lambda: run.members() if len(run.members()) == 2 else None)
        os.kill(members[1]["pid"], signal.SIGKILL)
        run.until("a step without it", lambda: run.steps()[-1]["world_size"] == 1 or len(run.steps()) >= 30)
        os.kill(run.pid_of("elastic.rendezvous"), signal.SIGKILL)
        assert run.wait() == 0, run.output
        assert ledger.compare(quiet.steps(), run.steps()) is None
        ends = [json.loads((one.dir / "result.json").read_bytes()) for one in (quiet, run)]
        assert ends[0]["digest"] == ends[1]["digest"]
        assert "elastic: 1 recovery, median" in run.output
        assert "rendezvous service ended (SIGKILL)" in run.output
        survivor = {line["pid"] for line in journal.read(journal.journal_path(run.dir, members[0]["worker_id"]))}
        assert survivor == {members[0]["pid"]}
        assert run.left_behind() == set()


def test_status_while_it_runs_and_a_second_command_on_its_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Run(tmp_path, str(SCRIPT), *LONG) as run:
        run.await_steps(2)
        assert cli.main(["status", "--job-dir", str(run.dir), "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert {"job", "state", "generation", "because", "applied", "members"} <= set(document)
        assert (document["job"], document["state"], document["generation"]) == ("mlp", "running", 1)
        assert [(member["rank"], member["worker_id"]) for member in document["members"]] == [
            (0, "local.0.0"),
            (1, "local.1.0"),
        ]
        assert {"worker_id", "node", "pid", "rank", "applied"} <= set(document["members"][0])
        assert cli.main(["run", "--job-dir", str(run.dir), "--fresh", str(SCRIPT)]) == ExitCode.BAD_INPUT
        assert "in use by a live job" in " ".join(capsys.readouterr().err.split())
        assert run.command.process.poll() is None


def test_an_interrupted_job_is_gone_within_five_seconds(tmp_path: Path) -> None:
    with Run(tmp_path, str(SCRIPT), *LONG) as run:
        run.await_steps(2)
        began_s = time.monotonic()
        run.command.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.output
        assert time.monotonic() - began_s < STOPPED_WITHIN_S + SLACK_S
        assert "stopped by SIGINT" in run.output
        assert run.left_behind() == set()
        assert (run.dir / "journal.jsonl").exists()


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
    environment = {**os.environ, **ENVIRONMENT, "COLOUR": "blue"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["event"], summary["steps"], summary["exit_code"]) == ("summary", 2, 0)
    assert summary["job_dir"] == str(tmp_path / "elastic-jobs" / "train-1")
    assert f"{tmp_path} blue -- -x" in done.stderr
    assert "are idle" in done.stderr, "more workers than shards are allowed, and said"
