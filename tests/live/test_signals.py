"""Signals to every process of a job at once, as schedulers and service managers send them, are one to its command."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from chaos_tests.support.processes import command_line, living
from elastic.errors import ExitCode
from tests.live.jobs import ROOT, SCRIPTS, SLACK_S, Job, Line

pytestmark = pytest.mark.long

SCRIPT = str(SCRIPTS / "signalled.py")


def signal_all(job: Job, number: signal.Signals, seed: int) -> list[str]:
    """In a random order, and again to processes that came meanwhile. Returns the command lines of all."""
    rng, told = random.Random(seed), dict[int, str]()
    while new := sorted(living(job.command.mark) - told.keys()):
        rng.shuffle(new)
        for pid in new:
            told[pid] = command_line(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, number)
    return list(told.values())


def drawn() -> int:
    seed = int(os.environ.get("SEED", time.time_ns() % 10**6))
    print(f"\nSEED={seed}", flush=True)
    return seed


def ended_by_signal(job: Job) -> list[Line]:
    return [line for line in job.events("worker_exited") if line["because"].startswith("killed")]


@pytest.mark.parametrize("options", [(), ("--cold-start",), ("--ring", "mpi")], ids=["forked", "cold", "mpi"])
def test_sigterm_to_every_process_costs_no_step(options: tuple[str, ...], tmp_path: Path) -> None:
    words = ("--quiet", "--workers", "2", "--grace", "16", *options, SCRIPT)
    with Job(tmp_path, *words) as job:
        job.pace(0.05)
        job.await_steps(5)
        told = signal_all(job, signal.SIGTERM, drawn())
        for part in ("etcd", "elastic.rendezvous", "subreaper", "elastic.agent", *["prterun"] * ("mpi" in options)):
            assert any(part in line for line in told), part
        assert job.wait() == ExitCode.DRAINED
        assert ended_by_signal(job) == [] == job.events("member_lost")
        done = len(job.steps())
        assert job.held_at("sigterm") == {"local.0.0", "local.1.0"}
        assert job.left_behind() == {}
    with Job(tmp_path, *words) as again:
        again.pace(0.0)
        assert again.wait() == 0
        assert {line["step"] for line in again.events("state_restored")} == {done}, "no step is done again"
        assert [line["step"] for line in again.steps()] == list(range(400))
    with Job(tmp_path, *words, name="undisturbed") as undisturbed:
        assert undisturbed.wait() == 0
        assert undisturbed.result["digest"] == again.result["digest"]


def test_a_command_whose_reader_takes_nothing_stops_when_it_is_asked_to(tmp_path: Path) -> None:
    script = tmp_path / "prints.py"
    script.write_text(
        "import elastic, torch\n"
        "job = elastic.join(seed=0)\n"
        "model = torch.nn.Linear(4, 1)\n"
        "job.register(model=model)\n"
        "for step in job.steps(shards=2, total=100_000):\n"
        "    for _ in step:\n"
        "        model(torch.randn(4, 4)).sum().backward()\n"
        "    job.print('x' * 50_000)\n"
    )
    words = [sys.executable, "-m", "elastic.cli", "run", "--workers", "1", "--job-dir", str(tmp_path / "job")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [*words, str(script)], env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as command:
        ledger = tmp_path / "job" / "steps.jsonl"
        while command.poll() is None and not (ledger.exists() and len(ledger.read_text().splitlines()) > 20):
            time.sleep(0.05)
        command.send_signal(signal.SIGINT)
        assert command.wait(SLACK_S) == 130


@pytest.fixture
def terminal() -> Iterator[None]:
    """These tests may run under nohup, where a job does not end by SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 143), (signal.SIGTERM, 6)])
def test_a_signal_to_every_process_ends_as_one_to_the_command(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    said = []
    for name in ("command", "all"):
        with Job(tmp_path, "--quiet", "--workers", "2", SCRIPT, name=name) as job:
            job.pace(0.05)
            job.await_steps(5)
            if name == "command":
                job.command.process.send_signal(number)
            else:
                signal_all(job, number, drawn())
            assert job.wait() == code
            assert job.left_behind() == {}
            said.append(job.output.replace(str(job.dir), "DIR"))
    assert said[0] == said[1]


def test_sigterm_to_every_process_while_a_job_starts_costs_nothing_but_the_start(tmp_path: Path) -> None:
    """At moments from the first process to the first steps; the same command goes on each time."""
    rng = random.Random(drawn())
    words = ("--quiet", "--workers", "2", "--grace", "8", SCRIPT)
    codes = []
    for _ in range(6):
        with Job(tmp_path, *words) as job:
            job.pace(0.2)  # all six together do not come to the end
            time.sleep(rng.uniform(0.0, 10.0))  # the moment is what is tried
            signal_all(job, signal.SIGTERM, rng.randrange(2**32))
            codes.append(job.wait())
            assert codes[-1] in (ExitCode.DRAINED, ExitCode.TERMINATED, -signal.SIGTERM), job.output
            assert job.left_behind() == {}
    print(codes)
    with Job(tmp_path, *words) as last:
        last.pace(0.0)
        assert last.wait() == 0
        assert [line["step"] for line in last.steps()] == list(range(400))
