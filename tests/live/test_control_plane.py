"""What decides is killed, stopped, and taken away part by part, and all of it at once, while a job trains.

The job does not notice; what it needs decided meanwhile waits for whoever decides.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos_tests.cluster import sturdy_binary
from tests.live.conftest import Quiet
from tests.live.fleet import Fleet, Line, pids

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(sturdy_binary() is None, reason="no etcd here that survives being killed; `make etcd`"),
]

AWAY_S = 60.0


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("control"), etcd=3, nodes=("a", "b", "c")) as made:
        yield made


def await_successor(fleet: Fleet, job: str, before: Line) -> Line:
    """A later leader that knows all members again."""

    def led() -> Line | None:
        status = fleet.status(job)
        return status if status.get("term", 0) > before["term"] and all(pids(status).values()) else None

    return fleet.until("another leader", led)


def test_replicas_that_go_in_order_or_are_killed_and_members_of_etcd(fleet: Fleet, quiet: Quiet) -> None:
    fleet.pace(0.1)
    job = fleet.train("led")
    first = fleet.await_members(job, "a.0.0", "b.0.0", "c.0.0")
    before, in_time = first, 0
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        leader = fleet.leader_of(job)
        fleet.end(leader, number)
        after = await_successor(fleet, job, before)
        for resigned in fleet.events("resigned", job=job, term=before["term"]):
            (leading,) = fleet.events("leading", job=job, term=after["term"])
            in_time += leading["t_mono_ns"] < resigned["held_until_ns"]
        fleet.replica(leader)
        before = after
    assert in_time, "whoever resigns lets its successor wait for the lease to run out"

    led_by = fleet.etcd.leader()
    for member in (led_by, (led_by + 1) % 3):
        fleet.etcd.kill(member)
        fleet.await_more_steps(job, 3)
        assert fleet.entry(job)["state"] == "placed"
        fleet.etcd.start(member)
        fleet.etcd.wait_healthy()
    fleet.etcd.compact()

    fleet.until("who leads now", lambda: pids(fleet.status(job)) == pids(first))
    assert fleet.status(job)["generation"] == first["generation"]
    assert not fleet.events("member_lost", job=job)
    fleet.finish(job, quiet.digest, quiet.steps)


def test_all_of_etcd_is_away_for_a_minute_and_a_loss_meanwhile_waits_for_it(fleet: Fleet, quiet: Quiet) -> None:
    fleet.pace(0.25)
    job = fleet.train("alone")
    before = fleet.await_members(job, "a.0.0", "b.0.0", "c.0.0")
    fleet.etcd.kill(0, 1, 2)
    for _ in range(4):
        fleet.await_more_steps(job, round(AWAY_S / 4 / 1.0))
    fleet.kill_worker(job, "c.0.0")
    fleet.until("its end", lambda: fleet.events("worker_exited", job=job, worker_id="c.0.0"))
    stands = len(fleet.steps(job)) + 1
    fleet.until("its successor", lambda: fleet.events("worker_started", job=job, worker_id="c.0.1"))
    assert len(fleet.steps(job)) <= stands, "the step in which it died may have been reduced, and no other one"
    for number in range(3):
        fleet.etcd.start(number)
    after = fleet.until("a generation without it", lambda: s if (s := fleet.status(job))["generation"] > 1 else None)
    assert "c.0.0" not in pids(after)
    grown = fleet.await_slots(job, "a.0", "b.0", "c.0")
    assert {worker: pid for worker, pid in pids(before).items() if worker != "c.0.0"}.items() < pids(grown).items()
    fleet.finish(job, quiet.digest, quiet.steps)


def test_workers_die_with_the_agent_of_their_job_and_the_others_go_on(fleet: Fleet, quiet: Quiet) -> None:
    fleet.pace(0.1)
    job = fleet.train("agentless")
    before = fleet.await_members(job, "a.0.0", "b.0.0", "c.0.0")
    os.kill(fleet.agent_of(job, "b"), signal.SIGKILL)
    fleet.until("its worker to be gone", lambda: not Path(f"/proc/{pids(before)['b.0.0']}").exists())
    after = fleet.await_slots(job, "a.0", "b.0", "c.0", gone="b.0.0")
    assert {pids(after)[worker] for worker in ("a.0.0", "c.0.0")} < set(pids(before).values())
    fleet.finish(job, quiet.digest, quiet.steps)
