"""What a replica shows: while it leads, when it does not any more, and when it leads again."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import pytest

from elastic.config import JobSpec
from elastic.metrics.follower import CLOSED_S
from elastic.metrics.job_fold import JobFold
from elastic.metrics.metric_registry import MetricRegistry
from elastic.metrics.replica import LOOK_S, ReplicaMetrics
from elastic.protocol import membership
from elastic.records.journal import Journal
from elastic.rendezvous.leader import JobLeader
from elastic.rendezvous.service import JobEntry
from tests.unit.elastic.metrics.test_job_fold import line, shown

OVERVIEW = {
    "jobs": [{"state": "waits"}, {"state": "placed"}, {"state": "placed"}],
    "nodes": [
        {"up": True, "slots": 4, "jobs": {"a": 3}, "because": ""},
        {"up": True, "slots": 4, "jobs": {}, "because": "is drained"},
        {"up": False, "slots": 0, "jobs": {"a": 1}, "because": "is away"},
    ],
}


class Lead:
    """What ReplicaMetrics reads of a JobLeader: its group, a real one."""

    def __init__(self) -> None:
        self.group = membership.Group(JobSpec(name="a", command=("x",), workers=5), seed="s")


def test_the_fleets_leader_shows_the_fleet_and_a_replica_that_leads_no_more_shows_none_of_it() -> None:
    registry = MetricRegistry()
    metrics = ReplicaMetrics(registry)
    metrics.show_fleet("r:1", OVERVIEW)
    seen = shown(registry)
    assert seen["elastic_fleet_leader", "r:1"] == 1
    jobs = {key[1]: value for key, value in seen.items() if key[0] == "elastic_fleet_jobs"}
    assert jobs == {"waits": 1, "placed": 2, "stopping": 0, "ended": 0}
    nodes = {key[1]: value for key, value in seen.items() if key[0] == "elastic_fleet_nodes"}
    assert nodes == {"up": 1, "leaving": 1, "away": 1}
    assert seen["elastic_fleet_slots", "taken"] == 3 and seen["elastic_fleet_slots", "free"] == 5
    metrics.show_fleet("r:1", None)
    assert {key: value for key, value in shown(registry).items() if key[0].startswith("elastic_fleet")} == {
        ("elastic_fleet_leader", "r:1"): 0
    }


def test_a_job_that_another_replica_leads_keeps_its_counts_here_and_nothing_else(tmp_path: Path) -> None:
    registry = MetricRegistry()
    metrics, fold = ReplicaMetrics(registry), JobFold(registry, "a", leader_only=True)
    with Journal(tmp_path / "j.jsonl", "a", "r", "n") as journal:
        leads = JobEntry(journal, leader=cast(JobLeader, Lead()))
        metrics.show_jobs({"a": leads})
        fold.see(line(1, "published", "", 2, kind="loss"))
        seen = shown(registry)
        assert seen["elastic_leader", "a"] == 1 and seen["elastic_job_members_wanted", "a"] == 5
        metrics.show_jobs({"a": JobEntry(journal)})
        seen = {key: value for key, value in shown(registry).items() if "a" in key}
        assert seen == {("elastic_leader", "a"): 0, ("elastic_recoveries_total", "a", "loss"): 1}
        metrics.show_jobs({"a": leads})
        fold.see(line(2, "published", "", 3, kind="loss"))
        assert shown(registry)["elastic_recoveries_total", "a", "loss"] == 2
        metrics.show_jobs({"a": JobEntry(journal, result={"generation": 3})})
        assert shown(registry)["elastic_job_state", "a", "closed"] == 1
        metrics.show_jobs({})
        assert ("elastic_leader", "a") not in shown(registry)


def test_a_job_that_is_over_is_forgotten_though_the_replica_still_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    registry = MetricRegistry()
    metrics = ReplicaMetrics(registry)
    with Journal(tmp_path / "j.jsonl", "a", "r", "n") as journal:
        leads = {"a": JobEntry(journal, result={"generation": 3})}
        metrics.show_jobs(leads)
        now_s += CLOSED_S
        metrics.show_jobs(leads)
        assert shown(registry)["elastic_job_state", "a", "closed"] == 1
        for _ in range(2):
            now_s += LOOK_S
            metrics.show_jobs(leads)
            assert not [key for key in shown(registry) if "a" in key]


async def test_a_look_that_fails_ends_no_replica_and_is_counted() -> None:
    registry = MetricRegistry()
    metrics = ReplicaMetrics(registry)
    assert metrics.problem.startswith("etcd has not given the fleet's documents")
    metrics.read(0.01)
    assert metrics.problem == ""
    looked = asyncio.Event()

    def overview() -> Any:
        looked.set()
        raise KeyError("nodes")

    watching = asyncio.create_task(metrics.watch("r:1", overview, {}))
    await asyncio.wait_for(looked.wait(), 60)
    await asyncio.sleep(0)
    assert not watching.done()
    watching.cancel()
    assert shown(registry)["elastic_metrics_failures_total",] == 1
