"""Twenty kills at random moments leave no trace but the time they took; test_chaos.py kills a few in `make test`."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from elastic.records import ledger
from tests.live.conftest import Quiet
from tests.live.jobs import TRAINER, Job

KILLS = 20
WORKERS = 4
PACE_S = 0.12
"""Per shard: 4 workers take a quarter of a second for a step, and the job outlasts the kills."""


class Killer:
    """Kills members, and leaves one of those that hold the state alive."""

    def __init__(self, job: Job, seed: int) -> None:
        self.random = random.Random(seed)
        self.killed: list[str] = []
        self._job = job

    def holders(self) -> list[str]:
        """Members that were not killed, in rank order."""
        members = self._job.status()["members"]
        return [m["worker_id"] for m in members if m["applied"] and m["worker_id"] not in self.killed]

    def kill(self, most: int = 1, rank: int | None = None) -> int:
        """Kill up to so many members at once; returns how many it were."""
        holders = self.holders()
        spare = self.random.choice(holders) if rank is None else holders[-1]
        able = [worker for worker in holders if worker != spare]
        chosen = self.random.sample(able, min(most, len(able))) if rank is None else able[rank : rank + 1]
        for worker in chosen:
            self._job.send(worker)
            self.killed.append(worker)
        return len(chosen)

    def round(self) -> str:
        """One fault; returns its name. Begins in a world of at least two, after a step since the last one."""
        job, steps = self._job, len(self._job.steps())
        job.until("a step since the last kill", lambda: len(job.steps()) > steps)
        job.until("two members", lambda: len(self.holders()) > 1)
        time.sleep(self.random.uniform(0, 0.4))
        match self.random.choice(("one", "one", "rank 0", "two at once", "again while it recovers")):
            case "rank 0":
                return f"rank 0: {self.kill(rank=0)}"
            case "two at once":
                job.until("three members", lambda: len(self.holders()) > 2)
                return f"two at once: {self.kill(2)}"
            case "again while it recovers":
                job.until("three members", lambda: len(self.holders()) > 2)
                first = self.kill()
                time.sleep(self.random.uniform(0, 0.1))
                return f"again while it recovers: {first + self.kill()}"
        return f"one: {self.kill()}"


@pytest.mark.long
def test_twenty_kills_at_random_moments_end_in_the_bits_of_the_quiet_run(quiet: Quiet, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    with Job(tmp_path, "--workers", str(WORKERS), "--quiet", str(TRAINER)) as job:
        job.pace(PACE_S)
        job.shut("end")
        job.await_world(WORKERS)
        killer = Killer(job, seed)
        while len(killer.killed) < KILLS:
            print(f"step {len(job.steps())}:", killer.round())
        job.finish()
        assert job.result["digest"] == quiet.digest
        assert ledger.compare(quiet.steps, job.steps()) is None
        assert [line["step"] for line in job.steps()] == list(range(len(quiet.steps)))
        for epoch in range(7):
            shards = [shard for line in job.steps() if line["epoch"] == epoch for shard in line["samples"]]
            assert sorted(sample for shard in shards for sample in shard) == list(range(320)), f"epoch {epoch}"
        ends = {line["worker_id"]: line["because"] for line in job.events("worker_exited")}
        members = {line["worker_id"] for line in job.events("entered")}
        assert {worker for worker, because in ends.items() if "SIGKILL" in because} == set(killer.killed)
        survivors = members - set(killer.killed)
        assert {ends[worker] for worker in survivors} == {"exited with 0"}, "a survivor was restarted"
        assert any(worker.rpartition(".")[2] != "0" for worker in members), "no replacement became a member"
        assert job.left_behind() == {}
