"""The dashboard of a job of 1000 members with 10,000 steps. Its ledger is a file; no leader tells of its members.

python -m tests.browser.programs.large_job DIR
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic.config import JobSpec
from elastic.observability.dashboard import server
from elastic.observability.dashboard.app import Dashboard
from elastic.observability.dashboard.directory_source import DirectorySource
from elastic.observability.dashboard.feeds import JobFeed
from elastic.records.journal import Journal, journal_path
from elastic.wire import codec

MEMBERS, STEPS = 1000, 10_000


class LargeJob(DirectorySource):
    asked = 0

    def status(self) -> Mapping[str, Any]:
        """The members move on at every question, as they do in a job that trains."""
        self.asked += 1
        members = [
            {
                "worker_id": f"node-{rank // 8}.{rank % 8}.0",
                "node": f"node-{rank // 8}",
                "pid": 1000 + rank,
                "rank": rank,
                "applied": STEPS + self.asked,
                "phase": f"shard {rank} in pass 0 of step {STEPS + self.asked}",
                "shards": 1,
                "shard_ms": 10 + rank / 100,
            }
            for rank in range(MEMBERS)
        ]
        state = {"state": "running", "because": "all are there", "generation": 3, "wanted": MEMBERS}
        return {"job": "large", "restart": False, "members": members, **state}


def write(job_dir: Path) -> None:
    (job_dir / "logs").mkdir(parents=True)
    (job_dir / "job.json").write_bytes(codec.to_json(JobSpec(name="large", command=("x",), workers=MEMBERS)))
    with Journal(journal_path(job_dir, "leader"), "large", "leader", "n") as journal:
        for number in range(3):
            ids = [f"node-{rank // 8}.{rank % 8}.0" for rank in range(MEMBERS - 40 * (number == 1))]
            journal.write("committed", number + 1, kind=("form", "loss", "planned")[number], members=ids)
        for number in range(5000):
            journal.write("worker_started", worker_id=f"node-{number}.0.0")
    with (job_dir / "steps.jsonl").open("w") as ledger:
        for step in range(STEPS):
            loss = 5 * math.exp(-step / 2000) + 0.3 * math.sin(step / 7)
            ledger.write(json.dumps({"step": step, "scalars": {"loss": loss}, "samples": [[step]]}) + "\n")


def main() -> None:
    job_dir = Path(sys.argv[1])
    write(job_dir)
    feed = JobFeed(LargeJob(job_dir, None), 0.2, leader_only=False)
    server.serve(
        server.listen("0"),
        lambda access: Dashboard(access, feed, None, "large"),
        feed.run,
        lambda address: print(f"dashboard at {address}", flush=True),
    )


if __name__ == "__main__":
    main()
