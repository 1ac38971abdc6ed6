"""Torchrun scripts, unchanged, under `elastic run --ranks`: real processes, real kills, the bits of the quiet run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic.records import ledger
from elastic.records.exactly_once import prove
from tests.live.jobs import ROOT, Job

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
            job.send(str(job.status()["members"][0]["worker_id"]))
            job.until("full world", lambda: len(job.status()["members"]) == 3)
        assert job.wait() == 0, job.output
        assert digest(job) == wanted
        assert [line["step"] for line in job.steps()] == list(range(28))
        assert "4 ranks in place, computed by 3 workers" in job.output
        epochs = prove(ledger.lines(job.dir / "steps.jsonl"))
        assert [epoch.order for epoch in epochs] == ["sampler"] * 4
        assert all(epoch.proved for epoch in epochs)


@pytest.mark.parametrize("script", ["trainer.py", "evaluated.py", "spawned.py", "endless.py", "accumulation.py"])
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


def test_without_ranks_a_torchrun_script_is_told_what_to_write(tmp_path: Path) -> None:
    with Job(tmp_path, "--max-restarts", "0", str(SCRIPTS / "plain.py")) as job:
        assert job.wait() != 0
        assert "`elastic run --ranks N ...`" in job.output or "`elastic run --ranks N ...`" in logs(job)


def logs(job: Job) -> str:
    return "".join(path.read_text() for path in sorted((job.dir / "logs").glob("*.log")))
