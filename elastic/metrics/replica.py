"""What a replica of a fleet knows without files: the jobs that it leads, and the fleet while it leads that."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from elastic.metrics.follower import CLOSED_S
from elastic.metrics.job_fold import show_status
from elastic.metrics.metric_registry import MetricRegistry
from elastic.protocol import membership
from elastic.rendezvous.service import JobEntry

LOOK_S = 2.0
"""From one look at the fleet to the next, on the replica's own event loop."""

RECENT_S = 10.0
"""A replica that has not read the documents for so long is not ready."""

JOB_STATES = ("waits", "placed", "stopping", "ended")
OF_LEADER = ("elastic_fleet_jobs", "elastic_fleet_nodes", "elastic_fleet_slots")

Overview = Callable[[], Mapping[str, Any] | None]
"""What `elastic jobs --json` shows; None while this replica does not lead the fleet."""


class ReplicaMetrics:
    def __init__(self, registry: MetricRegistry) -> None:
        self._registry = registry
        self._known: set[str] = set()
        self._closed_s: dict[str, float] = {}
        """Job that is over -> when that was seen first."""
        self._read_s = float("-inf")
        self.url = ""
        """Where it is served."""

    def read(self, seconds: float) -> None:
        """etcd has given all documents within that time."""
        self._read_s = time.monotonic()
        self._registry.observe("elastic_etcd_seconds", seconds)

    @property
    def problem(self) -> str:
        """Why the replica is not ready, or ""."""
        read = time.monotonic() - self._read_s <= RECENT_S
        return "" if read else f"etcd has not given the fleet's documents within {RECENT_S:g} s"

    async def watch(self, replica: str, overview: Overview, leads: Mapping[str, JobEntry]) -> None:
        """Show what there is, again and again. Never returns."""
        while True:
            try:
                self.show_fleet(replica, overview())
                self.show_jobs(leads)
            except Exception:  # whatever it is: the replica must not end with it
                self._registry.add("elastic_metrics_failures_total", 1)
            await asyncio.sleep(LOOK_S)

    def show_fleet(self, replica: str, overview: Mapping[str, Any] | None) -> None:
        self._registry.put("elastic_fleet_leader", overview is not None, replica)
        if overview is None:
            for name in OF_LEADER:
                self._registry.clear(name)
            return
        jobs = Counter(job["state"] for job in overview["jobs"])
        for state in JOB_STATES:
            self._registry.put("elastic_fleet_jobs", jobs[state], state)
        up = [node for node in overview["nodes"] if node["up"]]
        leaving = sum(bool(node["because"]) for node in up)
        nodes = {"up": len(up) - leaving, "leaving": leaving, "away": len(overview["nodes"]) - len(up)}
        for state, count in nodes.items():
            self._registry.put("elastic_fleet_nodes", count, state)
        taken = sum(sum(node["jobs"].values()) for node in up)
        self._registry.put("elastic_fleet_slots", taken, "taken")
        self._registry.put("elastic_fleet_slots", max(0, sum(node["slots"] for node in up) - taken), "free")

    def show_jobs(self, leads: Mapping[str, JobEntry]) -> None:
        """A job that another replica leads has only `elastic_leader` here, which is 0, and what was counted before. One
        that is over for CLOSED_S has nothing, though the replica still knows it."""
        now_s = time.monotonic()
        over = [job for job, entry in leads.items() if entry.result is not None]
        self._closed_s = {job: self._closed_s.get(job, now_s) for job in over}
        leads = {job: entry for job, entry in leads.items() if now_s - self._closed_s.get(job, now_s) <= CLOSED_S}
        for job in self._known - leads.keys():
            self._registry.forget(job, counters=False)
        self._known = set(leads)
        for job, entry in leads.items():
            if entry.result is not None:
                closed = {"state": "closed", "members": (), "generation": entry.result["generation"]}
                show_status(self._registry, job, closed)
            elif entry.leader is not None:
                status = membership.status(entry.leader.group)
                show_status(self._registry, job, status)
                if status["applied"]:
                    self._registry.put("elastic_job_step", int(str(status["applied"])) - 1, job)
            else:
                self._registry.forget(job, counters=False)
                self._registry.put("elastic_leader", 0, job)
