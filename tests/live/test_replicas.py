"""job.steps(outer=...): kills in the middle of a round, newcomers, and a job that goes on from its checkpoint leave the
bits of one worker."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from elastic.records import exactly_once, ledger
from runtime.outer.traffic import sent_bytes, summed_bytes
from tests.bench.sent import read
from tests.live.jobs import DEADLINE_S, SCRIPTS, Job

pytestmark = pytest.mark.long
REPLICAS = SCRIPTS / "replicas.py"
KINDS = {"diloco": (), "streaming": ("--overlap", "on"), "unsaid": ("--outer", "diloco:H=4")}
"""What the script is told -> options of the command. One that says nothing of replicas has the bits of `diloco`."""
PACE_S = 0.05
"""Of an inner step: a kill comes in the middle of a replica's round."""


@pytest.mark.parametrize("kind", KINDS)
def test_kills_newcomers_and_a_resume_leave_the_bits_of_one_worker(kind: str, tmp_path: Path) -> None:
    line = "diloco" if kind == "unsaid" else kind
    with Job(tmp_path, "--workers", "1", "--quiet", str(REPLICAS), line, name="alone") as job:
        assert job.wait() == 0, job.story()
        digest, steps = job.result["digest"], job.steps()

    options = (*KINDS[kind], "--checkpoint-every", "4 steps", "--quiet", str(REPLICAS), kind)
    with Job(tmp_path, "--workers", "3", *options) as job:
        job.pace(PACE_S)
        job.shut("end")
        members = job.await_world(3)
        job.await_steps(5)
        time.sleep(2.5 * PACE_S)
        job.send(members[0])
        job.until("a newcomer is a member", lambda: set(job.await_world(3)) - set(members))
        job.await_steps(12)
        job.command.process.kill()
        job.wait()
        job.pace(0)
        job.open("end")
    with Job(tmp_path, "--workers", "2", *options) as job:
        assert job.wait(2 * DEADLINE_S) == 0, job.story()
        assert (job.dir / "resumes.jsonl").exists()
        assert json.loads((job.dir / "result.json").read_bytes())["digest"] == digest
        assert ledger.compare(steps, job.steps()) is None
        assert all(epoch.proved for epoch in exactly_once.prove(job.steps()))


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize(
    ("every", "fragments", "moments", "row"),
    [(3, 1, "reset", 0), (3, 1, "own", 2), (3, 1, "mean", 2), (4, 2, "own", 3)],
    ids=["reset moments", "own moments", "mean moments", "fragments"],
)
def test_a_round_sends_the_bytes_of_the_formula(
    workers: int, every: int, fragments: int, moments: str, row: int, tmp_path: Path
) -> None:
    """row: numbers that belong to a replica, for each parameter: those of AdamW, and its own parameters."""
    words = ("--workers", str(workers), "--quiet", str(SCRIPTS / "counted_rounds.py"))
    with Job(tmp_path, *words, str(every), str(fragments), moments) as job:
        assert job.wait() == 0, job.story()
        said = [json.loads(path.read_bytes()) for path in job.gates.glob("*.json")]
        sent = [count for _, count in read(job.gates).values()]
    (parameters,) = {one["parameters"] for one in said}
    summed = sum(said[0]["summed"])
    rows = 1 if moments == "mean" else 4
    planned = len(said[0]["summed"]) * summed_bytes(4 * parameters // fragments, 4 * row * parameters, rows)
    assert summed == pytest.approx(planned, rel=0.01)
    assert max(sent) == pytest.approx(sent_bytes(summed, 4, workers), rel=0.01)


@pytest.mark.parametrize(("compression", "width"), [("bf16", 2.0), ("int8", 256 / 252)])
def test_rounded_differences_take_their_share_of_the_bytes_and_rows_take_all(
    compression: str, width: float, tmp_path: Path
) -> None:
    """width: bytes of an element."""
    words = ("--workers", "2", "--compression", compression, "--quiet", str(SCRIPTS / "counted_rounds.py"))
    with Job(tmp_path, *words, "4", "2", "own") as job:
        assert job.wait() == 0, job.story()
        said = [json.loads(path.read_bytes()) for path in job.gates.glob("*.json")]
        sent = [count for _, count in read(job.gates).values()]
    (parameters,) = {one["parameters"] for one in said}
    rounds = len(said[0]["summed"])
    planned = rounds * summed_bytes(width * parameters / 2, 4 * 3 * parameters, 4)
    assert max(sent) == pytest.approx(sent_bytes(planned, 4, 2), rel=0.01)
