"""The page "from torchft": its script, with the line changed that it shows, survives deaths and loses no batch."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from elastic.records import ledger
from elastic.records.exactly_once import prove
from tests.live.jobs import ROOT, Job
from tests.live.test_ddp import digest

EXAMPLE = ROOT / "docs" / "examples" / "train_torchft.py"
STEPS = 36


def changed(home: Path) -> Path:
    """The example as the page changes it."""
    script = home / "train_elastic.py"
    (shown,) = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "torchft.md").read_text(), re.DOTALL)
    subprocess.run(["patch", "-o", script, EXAMPLE], input=shown, text=True, check=True, capture_output=True)
    return script


def words(script: Path, workers: int, pause: float = 0.0) -> tuple[str, ...]:
    options = ("--steps", str(STEPS), "--pause", str(pause))
    return ("--workers", str(workers), "--ranks", "4", str(script), *options)


def test_only_the_import_is_changed(tmp_path: Path) -> None:
    before, after = EXAMPLE.read_text().splitlines(), changed(tmp_path).read_text().splitlines()
    assert [(old, new) for old, new in zip(before, after, strict=True) if old != new] == [
        (line, line.replace("torchft", "elastic.torchft")) for line in before if line.startswith("from torchft import ")
    ]


def test_rank_0_and_another_worker_may_die_and_no_batch_is_missing(tmp_path: Path) -> None:
    script = changed(tmp_path)
    with Job(tmp_path, *words(script, 1), name="quiet") as job:
        assert job.wait() == 0, job.output
        wanted = digest(job)
    with Job(tmp_path, *words(script, 3, 0.15)) as job:
        for step in (3, 9):
            job.await_steps(step)
            job.send(str(job.status()["members"][0]["worker_id"]))
            job.until("full world", lambda: len(job.status()["members"]) == 3)
        assert job.wait() == 0, job.output
        assert digest(job) == wanted
        assert [line["step"] for line in job.steps()] == list(range(STEPS))
        epochs = prove(ledger.lines(job.dir / "steps.jsonl"))
        assert len(epochs) == 3 and all(epoch.proved for epoch in epochs)
