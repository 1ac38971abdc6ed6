"""What workers did is told although they are killed or get nowhere: `elastic trace` and `elastic story --flight`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.live.jobs import ROOT, Job

SCRIPT = """
import os, time, torch, elastic
job = elastic.join()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
job.register(model=model, optimizer=optimizer)
for step in job.steps(shards=6, total=100000):
    for shard in step:
        model(torch.randn(8, 4)).square().mean().backward()
        while os.path.exists(f"hold-{job.worker_id}"):
            time.sleep(0.02)
    time.sleep(0.02)
    optimizer.step()
    optimizer.zero_grad()
    if os.path.exists("end"):
        job.stop("the test has seen enough")
"""


def elastic(*words: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "elastic.cli", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.long
def test_a_death_and_a_worker_that_gets_nowhere_are_told(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with Job(tmp_path, "--workers", "3", "train.py") as job:
        job.await_steps(5)
        founders = job.members()
        lost = founders[0]
        job.send(lost)
        (late,) = job.until("its replacement", lambda: set(job.members()) - set(founders))
        job.await_event("entered", worker_id=late)  # before that it computes a shard for nothing, which is no operation
        (job.dir.parent / f"hold-{late}").touch()

        def awaited() -> list[Any]:
            told = json.loads(elastic("story", "--flight", "--job-dir", str(job.dir), "--json"))["workers"]
            return [worker for worker in told if worker["awaited"]]

        (found,) = job.until("the one that is waited for", lambda: [it for it in awaited() if it["since_s"] > 0.5])
        assert (found["worker_id"], found["pid"]) == (late, job.workers()[late])
        assert found["said"].startswith("computes shard ")
        assert (found["rank"], job.members()[found["rank"]]) == (2, late)
        held = json.loads(elastic("trace", "--job-dir", str(job.dir)))["traceEvents"]
        place = {"generation": found["generation"], "operation": found["operation"]}
        (shown,) = [event for event in held if event.get("cat") == "awaited"]
        assert shown["name"] == f"rank 2 ({late}) {found['said']}"
        assert (shown["ph"], shown["args"]) == ("B", {**place, "rank": 2})
        working = [event for event in held if event["ph"] == "B" and event["cat"] in ("computes", "waits", "exchange")]
        assert [event["args"] for event in working if "waits_for" not in event["args"]] == [
            {**place, "rank": 2, "awaited": True}
        ]
        assert [event["args"]["waits_for"] for event in working if "waits_for" in event["args"]] == 2 * [
            [f"rank 2 ({late})"]
        ]
        (job.dir.parent / f"hold-{late}").unlink()
        job.await_steps(len(job.steps()) + 3)
        (job.dir.parent / "end").touch()
        assert job.wait() == 0, job.output
        trace = json.loads(elastic("trace", "--job-dir", str(job.dir)))["traceEvents"]
    (recovery,) = [event for event in trace if event.get("cat") == "recovery"]
    assert recovery["args"]["lost"] == [lost]
    tracks = {event["args"]["name"]: event["tid"] for event in trace if event["name"] == "thread_name"}
    last = [event for event in trace if event["ph"] == "X" and event["tid"] == tracks[lost]][-1]
    assert last["ts"] < recovery["ts"] + recovery["dur"], "what the killed worker noted last is kept"
    assert not [event for event in trace if event["ph"] == "B"], "the job is over"
    computed = [event for event in trace if event.get("cat") == "computes" and event["ts"] > recovery["ts"]]
    assert {event["tid"] for event in computed} >= {tracks[worker] for worker in tracks if worker.count(".") == 2} - {
        tracks[lost]
    }
    assert max(event["dur"] for event in computed) > 500_000, "the shard in which the test has held a worker"
    assert {event["cat"] for event in trace if event["ph"] == "X"} >= {
        "generation",
        "waits",
        "exchange",
        "script",
        "copy",
    }
