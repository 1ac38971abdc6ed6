"""What a torchrun script reads of its environment, on several nodes: no two workers are the same rank, and one is 0."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from elastic.store.embedded import EmbeddedEtcd
from tests.live.spread import Spread
from tests.live.test_ddp import SCRIPTS

pytestmark = pytest.mark.long


class Seen:
    """What the script in tests/ddp_scripts/environment.py has written down."""

    def __init__(self, job: Spread, out: Path) -> None:
        self._job, self._out = job, out

    def of(self, worker_id: str) -> dict[str, int]:
        path = self._out / f"{worker_id}.json"
        self._job.until(f"the environment of {worker_id}", path.exists)
        found: dict[str, int] = json.loads(path.read_text())
        return found

    def saved(self) -> dict[int, list[str]]:
        """Epoch -> the workers that have saved it."""
        found: dict[int, list[str]] = {}
        for path in sorted(self._out.glob("*.pt")):
            epoch, worker = path.stem.split(".", 1)
            found.setdefault(int(epoch), []).append(worker)
        return found

    def await_saved_by(self, worker_id: str) -> None:
        done = [worker_id]
        self._job.until(f"an epoch that {worker_id} saves", lambda: done in self.saved().values())


def test_ranks_of_the_environment_are_distinct_on_all_nodes_and_rank_0_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, end = tmp_path / "out", tmp_path / "end"
    out.mkdir()
    for name, value in {"OUT": str(out), "END": str(end), "NAP": "0.03"}.items():
        monkeypatch.setenv(name, value)
    command = (sys.executable, str(SCRIPTS / "environment.py"))
    with (
        EmbeddedEtcd() as etcd,
        Spread(tmp_path, etcd, "ranked", command=command, ranks=8, workers=3, max_workers=4) as job,
    ):
        seen = Seen(job, out)
        job.rendezvous()
        job.agent("a", slots=2)
        second = job.agent("b")
        job.await_slots("a.0", "a.1", "b.0")
        constant = {"WORLD_SIZE": 8, "LOCAL_WORLD_SIZE": 8, "GROUP_WORLD_SIZE": 2}
        assert seen.of("a.0.0") == {"RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0, **constant}
        assert seen.of("a.1.0") == {"RANK": 1, "LOCAL_RANK": 1, "GROUP_RANK": 0, **constant}
        assert seen.of("b.0.0") == {"RANK": 2, "LOCAL_RANK": 0, "GROUP_RANK": 1, **constant}
        seen.await_saved_by("a.0.0")

        job.kill("a.0.0")
        job.await_slots("a.1", "b.0", "a.0")
        successor = job.members()[2]
        assert seen.of(successor)["RANK"] == 0
        seen.await_saved_by(successor)

        job.agent("c")
        job.await_slots("a.1", "b.0", "a.0", "c.0")
        third = job.members()[3]
        assert seen.of(third) == {"RANK": 3, "LOCAL_RANK": 0, "GROUP_RANK": 2, **constant, "GROUP_WORLD_SIZE": 3}

        second.kill()  # and with it the worker of node b; another node takes its place
        job.agent("d")
        job.until("a worker of node d", lambda: any(worker.startswith("d.") for worker in job.members()) or None)
        fourth = next(worker for worker in job.members() if worker.startswith("d."))
        assert seen.of(fourth)["RANK"] == 2

        end.touch()
        assert job.await_result()["exit_code"] == 0
        saved = seen.saved()
        twice = {epoch: workers for epoch, workers in saved.items() if len(workers) > 1}
        assert not twice, "an epoch that two workers saved"
        assert {worker for workers in saved.values() for worker in workers} >= {"a.0.0", successor}
        assert max(saved) == max(line["epoch"] for line in job.steps()), "rank 0 has saved the last epoch"
