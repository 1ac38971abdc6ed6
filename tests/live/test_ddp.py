"""Torchrun scripts, unchanged, under `elastic run --ranks`: real processes, real kills, the bits of the quiet run."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from chaos_tests.support.processes import Command, kill_if_there, living
from elastic.records import ledger
from elastic.records.events import story
from elastic.records.exactly_once import prove
from elastic.records.journal import read_all
from tests.live.jobs import DEADLINE_S, ROOT, Job, run_alone

EXAMPLE = ROOT / "docs" / "examples" / "train_ddp.py"
SCRIPTS = ROOT / "tests" / "ddp_scripts"
RANKS = "4"
NAP = {"NAP": "0.15"}
"""Seconds a batch, so that there is time to break something."""


def digest(job: Job) -> str:
    result = json.loads((job.dir / "result.json").read_text())
    assert result["exit_code"] == 0, job.output
    found: str = result["digest"]
    return found


def quiet(home: Path, script: str, *arguments: str) -> str:
    """The digest of one worker that has all ranks."""
    with Job(home, "--workers", "1", "--ranks", RANKS, str(SCRIPTS / script), *arguments, name="quiet") as job:
        assert job.wait() == 0, job.output
        return digest(job)


def test_a_script_survives_the_loss_of_rank_0_and_of_its_successor(tmp_path: Path) -> None:
    wanted = quiet(tmp_path, "plain.py", "4")
    words = ("--workers", "3", "--ranks", RANKS, str(SCRIPTS / "plain.py"), "4")
    with Job(tmp_path, *words, environment=NAP) as job:
        for step in (3, 9):
            job.await_steps(step)
            status = job.status()
            assert status["level"].startswith("in place, 4 ranks")
            job.send(str(status["members"][0]["worker_id"]))
            job.until("full world", lambda: len(job.status()["members"]) == 3)
        assert job.wait() == 0, job.output
        assert digest(job) == wanted
        assert [line["step"] for line in job.steps()] == list(range(28))
        level = "in place, 4 ranks: the ranks of a lost worker go to the others, and no bit changes"
        assert f"elastic: {level}" in job.output
        assert any(level in moment.because for moment in story.of_generation(read_all(job.dir), 1))
        epochs = prove(ledger.lines(job.dir / "steps.jsonl"))
        assert [epoch.order for epoch in epochs] == ["sampler"] * 4
        assert all(epoch.proved for epoch in epochs)


@pytest.mark.parametrize(
    "script",
    [
        "trainer.py",
        "evaluated.py",
        "spawned.py",
        "endless.py",
        "accumulation.py",
        "reduced.py",
        "ungraded.py",
        "probe.py",
    ],
)
@pytest.mark.long
def test_each_script_survives_a_death(script: str, tmp_path: Path) -> None:
    wanted = quiet(tmp_path, script, "4")
    snapshot = {"SNAPSHOT": str(tmp_path / "snapshot.pt")} if script == "trainer.py" else {}
    words = ("--workers", "3", "--ranks", RANKS, str(SCRIPTS / script), "4")
    with Job(tmp_path, *words, environment=NAP | snapshot) as job:
        job.await_steps(3)
        job.send(str(job.status()["members"][1]["worker_id"]))
        assert job.wait() == 0, job.output
        assert digest(job) == wanted


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "workers", "every"),
    [
        ("endless.py", "1", "6 steps"),  # from the beginning of an epoch
        ("endless.py", "3", "4 steps"),
        ("endless.py", "4", "6 steps"),
        ("trainer.py", "2", "5 steps"),
        ("evaluated.py", "2", "5 steps"),
        ("evaluated.py", "1", "4 steps"),  # behind an evaluation
        ("accumulation.py", "2", "5 steps"),
        ("reduced.py", "1", "6 steps"),
        ("ungraded.py", "2", "5 steps"),
        ("early.py", "1", "3 steps"),
        ("early.py", "3", "5 steps"),
    ],
)
def test_a_script_goes_on_from_a_checkpoint(script: str, workers: str, every: str, tmp_path: Path) -> None:
    wanted = quiet(tmp_path, script, "4")
    environment = {"SNAPSHOT": str(tmp_path / "snapshot.pt")} if script == "trainer.py" else {}
    words = ("--ranks", RANKS, "--workers", workers, "--checkpoint-every", every, str(SCRIPTS / script), "4")
    with Job(tmp_path, *words, environment=NAP | environment) as job:
        job.await_steps(6 if script == "early.py" else 8)
        job.command.process.send_signal(signal.SIGINT)
        job.wait()
    with Job(tmp_path, *words, environment=environment) as job:
        assert job.wait() == 0, job.output
        assert "it goes on from step" in job.output
        assert digest(job) == wanted


@pytest.mark.long
def test_a_script_that_goes_on_behind_its_own_snapshot_finds_a_checkpoint_of_then(tmp_path: Path) -> None:
    """All its processes are killed in the second epoch, before a checkpoint is due."""
    wanted = quiet(tmp_path, "trainer.py", "4")
    environment = {"SNAPSHOT": str(tmp_path / "snapshot.pt"), "AHEAD": "1"}
    every = ("--checkpoint-every", "1000 steps", "--snapshot-every", "off")
    words = ("--ranks", RANKS, "--workers", "2", *every, str(SCRIPTS / "trainer.py"), "4")
    with Job(tmp_path, *words, environment=NAP | environment) as job:
        job.await_steps(6)
        job.until(
            "a checkpoint of step 4", lambda: any(line["step"] == 4 for line in job.events("checkpoint_complete"))
        )
        for pid in living(job.command.mark):
            kill_if_there(pid)
        job.wait()
    with Job(tmp_path, *words, environment=environment) as job:
        assert job.wait() == 0, job.output
        assert "it goes on from step 4" in job.output
        assert digest(job) == wanted


@pytest.mark.long
def test_a_loop_that_draws_its_own_batches_survives_a_death(tmp_path: Path) -> None:
    """It says in the file how many ranks it has."""
    script = str(SCRIPTS / "drawn.py")
    with Job(tmp_path, "--workers", "1", script, "4", name="quiet") as job:
        assert job.wait() == 0, job.output
        wanted = digest(job)
    with Job(tmp_path, "--workers", "3", script, "4", environment=NAP) as job:
        job.await_steps(3)
        job.send(str(job.status()["members"][0]["worker_id"]))
        assert job.wait() == 0, job.output
        assert digest(job) == wanted
        assert len(job.steps()) == 21


@pytest.mark.long
def test_without_ranks_a_torchrun_script_is_told_what_to_write(tmp_path: Path) -> None:
    with Job(tmp_path, "--max-restarts", "0", str(SCRIPTS / "plain.py")) as job:
        assert job.wait() != 0
        assert "`elastic run --ranks N ...`" in job.output or "`elastic run --ranks N ...`" in logs(job)


def logs(job: Job) -> str:
    return "".join(path.read_text() for path in sorted((job.dir / "logs").glob("*.log")))


@pytest.mark.long
def test_losses_are_those_of_torchrun_but_for_the_last_bits(tmp_path: Path) -> None:
    """DistributedDataParallel divides before it adds, and gloo adds in another order: close, and not equal."""
    script = [str(EXAMPLE), "--epochs", "2", "--log-every", "1"]
    with Job(tmp_path, "--workers", "1", "--ranks", "2", *script) as job:
        assert job.wait() == 0, job.output
        here = losses(job.output)
    there = under_torchrun(tmp_path, 2, *script)
    assert len(here) == len(there) == 64
    assert here[:50] == pytest.approx(there[:50], rel=1e-5)


@pytest.mark.long
def test_with_the_diff_of_the_page_the_losses_are_those_of_torchrun_in_the_same_order(tmp_path: Path) -> None:
    before, after = tmp_path / "before.py", with_job_steps(tmp_path)
    in_order(EXAMPLE, "rank=rank)", "rank=rank, shuffle=False)", before)
    in_order(after, "shuffle=True", "shuffle=False", after)
    words = ("--epochs", "2", "--log-every", "1")
    here = losses(run_alone(tmp_path, after, *words))
    there = under_torchrun(tmp_path, 4, str(before), *words)
    assert len(here) == len(there) == 32
    assert here == pytest.approx(there, rel=1e-5)


@pytest.mark.long
def test_with_the_diff_of_the_page_the_example_survives_a_death(tmp_path: Path) -> None:
    script = str(with_job_steps(tmp_path))
    with Job(tmp_path, "--workers", "1", script, name="quiet") as job:
        assert job.wait() == 0, job.output
        wanted = digest(job)
    with Job(tmp_path, "--workers", "3", script, "--pause", "0.1") as job:
        job.await_steps(3)
        job.send(str(job.status()["members"][0]["worker_id"]))
        assert job.wait() == 0, job.output
        assert digest(job) == wanted


def with_job_steps(home: Path) -> Path:
    """The example, changed as docs/ddp.md shows."""
    script = home / "train_steps.py"
    (shown,) = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "ddp.md").read_text(), re.DOTALL)
    subprocess.run(["patch", "-o", script, EXAMPLE], input=shown, text=True, check=True, capture_output=True)
    return script


def in_order(script: Path, shuffled: str, plain: str, to: Path) -> None:
    text = script.read_text()
    assert text.count(shuffled) == 1
    to.write_text(text.replace(shuffled, plain))


def under_torchrun(home: Path, ranks: int, *script: str) -> list[float]:
    """The losses that it prints."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *script]
    run = Command(torchrun, home / "torchrun.out", environment={"OMP_NUM_THREADS": "1"}, cwd=home)
    try:
        run.process.wait(DEADLINE_S)  # its status may be that of an abort of torch behind the script's last line
    finally:
        run.stop()
    found = losses(run.output)
    assert found, run.output
    return found


def losses(output: str) -> list[float]:
    return [float(line.rpartition(" ")[2]) for line in output.splitlines() if line.startswith("epoch ")]
