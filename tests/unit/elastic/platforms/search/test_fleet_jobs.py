"""What a search sees of the jobs of a fleet: all that they have logged, also where a node answers late."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from elastic.config import JobSpec
from elastic.fleet.client import FleetClient, Log
from elastic.platforms.search import fleet_jobs
from elastic.platforms.search.decisions import JobState
from elastic.platforms.search.fleet_jobs import FleetJobs

SPEC = JobSpec(name="t", command=("python",), workers=1, checkpoint_dir="/shared")


class Fleet:
    """One job on one node. A node that is not up, or is busy, does not answer."""

    def __init__(self) -> None:
        self.state, self.up, self.busy, self.ledger = "placed", True, False, b""

    def overview(self) -> dict[str, Any]:
        ended = {"exit_code": 0, "because": "all members have finished", "slots": {}}
        job = {"job": "study-t0-1", "state": self.state, "because": "", "slots": {"a": 1}}
        return {"jobs": [job | (ended if self.state == "ended" else {})], "nodes": [{"node": "a", "up": self.up}]}

    def log(self, job: str, node: str, log: str, offset: int) -> Log:
        if self.busy or not self.up:
            return Log(b"", offset, -1, away=True)
        return Log(self.ledger[offset:], len(self.ledger), len(self.ledger))

    def step(self, step: int, loss: float) -> None:
        self.ledger += json.dumps({"step": step, "samples": [], "scalars": {"loss": loss}}).encode() + b"\n"


@pytest.mark.parametrize("how", ["up", "busy"])
def test_the_last_value_of_a_job_that_is_over_is_waited_for(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_jobs, "OVERVIEW_S", -1.0)
    fleet = Fleet()
    jobs = FleetJobs(cast(FleetClient, fleet), SPEC, "study", "loss")
    fleet.step(0, 2.0)
    assert jobs.look(0).values == {0: 2.0}
    fleet.step(1, 1.0)
    fleet.state = "ended"
    setattr(fleet, how, how == "busy")
    seen = jobs.look(0)
    assert (seen.state, seen.values) == (JobState.RUNS, {0: 2.0}) and "a does not say yet" in seen.because
    setattr(fleet, how, how == "up")
    seen = jobs.look(0)
    assert (seen.state, seen.values) == (JobState.ENDED, {0: 2.0, 1: 1.0})


def test_a_node_that_does_not_come_back_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_jobs, "OVERVIEW_S", -1.0)
    monkeypatch.setattr(fleet_jobs, "AWAY_S", 0.0)
    fleet = Fleet()
    jobs = FleetJobs(cast(FleetClient, fleet), SPEC, "study", "loss")
    fleet.step(0, 2.0)
    assert jobs.look(0).state is JobState.RUNS
    fleet.state, fleet.up = "ended", False
    seen = jobs.look(0)
    assert (seen.state, seen.values) == (JobState.ENDED, {0: 2.0})
