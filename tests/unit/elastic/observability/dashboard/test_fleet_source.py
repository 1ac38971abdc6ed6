"""The jobs of a fleet, as their pages follow them."""

from __future__ import annotations

from typing import Any, cast

from elastic.errors import ElasticError
from elastic.fleet.client import FleetClient, Log
from elastic.observability.dashboard.fleet_source import RemoteJob
from elastic.observability.dashboard.job_history import JobHistory


def test_a_node_that_did_not_answer_is_asked_again_whether_it_had_workers_of_the_job() -> None:
    """Of an ended job only the nodes themselves know it."""
    asked: list[str] = []

    class Client:
        replicas = ()

        def overview(self) -> dict[str, Any]:
            ended = {"job": "j-1", "state": "ended", "exit_code": 0}
            return {"jobs": [ended], "nodes": [{"node": node, "up": True} for node in ("raises", "away", "has")]}

        def log(self, job: str, node: str, log: str, offset: int) -> Log:
            assert job == "j-1"
            if log:
                return Log(b"", 0, 0)
            asked.append(node)
            if node == "raises" and asked.count(node) == 1:
                raise ElasticError("nobody answers")
            away = node == "away" and asked.count(node) == 1
            return Log(b"" if away else b"journal/agent-x", 0, 0, away=away)

    source = RemoteJob(cast(FleetClient, Client()), "j-1", may_act=False)
    for _ in range(3):
        source.poll(JobHistory(leader_only=True))
    assert sorted(asked) == ["away", "away", "has", "raises", "raises"]
    assert source._nodes == {"raises", "away", "has"}
