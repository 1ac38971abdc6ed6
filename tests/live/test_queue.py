"""The queue of a fleet with real daemons: who is preempted leaves in order, waits again, ends with the quiet bits."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.errors import ExitCode
from elastic.records import ledger
from tests.live.conftest import Quiet
from tests.live.fleet import Fleet, pids

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

AWAITED_S = 240.0
"""A new leader preempts nobody for 30 s."""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path) as made:
        for name in ("a", "b", "c"):
            made.node(name)
        made.await_nodes("a", "b", "c")
        yield made


def entries(fleet: Fleet) -> dict[str, dict[str, Any]]:
    """Job -> its entry; a job that was preempted has one too."""
    return {job["job"]: job for job in fleet.client.overview()["jobs"]}


def end_of(fleet: Fleet, job: str) -> dict[str, Any]:
    """Its entry, when it is over. A busy machine may be without a leader for a moment."""
    return fleet.until(
        f"the end of {job}", lambda: seen if (seen := fleet.status(job))["state"] == "ended" else None, AWAITED_S
    )


def test_a_preempted_job_goes_on_from_its_last_step_though_the_leader_dies_meanwhile(
    fleet: Fleet, quiet: Quiet
) -> None:
    fleet.pace(0.05)
    low = fleet.train("low", min_workers=3)
    fleet.await_members(low, "a.0.0", "b.0.0", "c.0.0")
    high = fleet.train("high", "--priority", "5", workers=2, min_workers=2)
    fleet.until("the preemption", lambda: fleet.events("preempted", job=low), AWAITED_S)
    leader = fleet.client.overview()["leader"]
    fleet.end(next(name for name in fleet.replicas if fleet.address(name) == leader))
    fleet.until("members of the other", lambda: len(fleet.status(high)["members"]) == 2)

    (again,) = {line["goes_on_as"] for line in fleet.events("waits_again", job=low)}
    fleet.until("its place", lambda: entries(fleet)[again]["place"] == 1)
    told = entries(fleet)
    assert told[low]["because"] == f"preempted for {high}; goes on as {again}"
    assert told[low]["exit_code"] == ExitCode.DRAINED
    assert told[again]["state"] == "waits"
    shown = fleet.run("jobs").stdout
    assert "3 workers, place 1 in the queue: needs 3 free slots at once, and 1 of the 3 on 3 nodes are free" in shown
    assert fleet.entry("low")["job"] == again

    fleet.pace(0.0)
    for job in (high, again):
        ended = end_of(fleet, job)
        assert (ended["exit_code"], ended["digest"]) == (0, quiet.digest), ended["because"]
    assert ledger.compare(fleet.steps(low, again), quiet.steps) is None, "no step is missing, and none is another one"
    both = {line["step"] for line in fleet.steps(low)} & {line["step"] for line in fleet.steps(again)}
    assert both == set(), "no step was done again"
    waited = fleet.run("jobs", "--wait", low, "--json")
    assert waited.returncode == 0 and f'"job": "{again}"' in waited.stdout
    assert fleet.living() == []


def test_a_job_is_made_smaller_before_any_is_preempted_and_grows_again(fleet: Fleet, quiet: Quiet) -> None:
    fleet.pace(0.05)
    low = fleet.train("low", min_workers=1)
    before = fleet.await_members(low, "a.0.0", "b.0.0", "c.0.0")
    high = fleet.train("high", "--priority", "5", workers=1)
    fleet.until("the other job", lambda: fleet.status(high)["members"], AWAITED_S)
    (place,) = entries(fleet)[high]["slots"]
    small = fleet.await_slots(low, *(f"{node}.0" for node in "abc" if node != place))
    assert pids(small).items() < pids(before).items(), "who stays is not started again"
    assert fleet.run("stop", high).returncode == 0
    grown = fleet.await_slots(low, "a.0", "b.0", "c.0")
    assert pids(small).items() < pids(grown).items()
    lost = {line["worker_id"] for line in fleet.events("member_lost", job=low)}
    assert not fleet.events("preempted") and not lost & pids(before).keys(), "a newcomer may give way to another one"
    fleet.finish(low, quiet.digest, quiet.steps)


def test_one_that_does_not_leave_in_time_is_ended_and_waits_again(fleet: Fleet, quiet: Quiet) -> None:
    fleet.pace(0.05)
    low = fleet.train("low", min_workers=3, checkpoint_every="5 steps")
    fleet.await_members(low, "a.0.0", "b.0.0", "c.0.0")
    fleet.until("a checkpoint", lambda: fleet.events("pointer_moved", job=low))
    fleet.pace(1000.0)
    high = fleet.train("high", "--priority", "5", workers=2, min_workers=2)
    fleet.until("the preemption", lambda: fleet.events("preempted", job=low), AWAITED_S)
    fleet.end("c", signal.SIGKILL)  # and a node of it is lost meanwhile
    fleet.until("its end", lambda: entries(fleet)[low]["state"] == "ended", AWAITED_S)
    assert entries(fleet)[low]["exit_code"] in (ExitCode.TERMINATED, ExitCode.STATE_LOST)
    fleet.node("c")
    (again,) = {line["goes_on_as"] for line in fleet.events("waits_again", job=low)}
    fleet.pace(0.0)
    for job in (high, again):
        ended = end_of(fleet, job)
        assert (ended["exit_code"], ended["digest"]) == (0, quiet.digest), ended["because"]
    assert min(line["step"] for line in fleet.steps(again)) > 0, "it went on from a checkpoint"


def test_a_small_job_runs_while_a_large_one_waits_and_makes_room_for_it(fleet: Fleet, quiet: Quiet) -> None:
    fleet.pace(0.05)
    first = fleet.train("first", workers=1)
    fleet.until("the first", lambda: fleet.status(first)["members"])
    large = fleet.train("large", min_workers=3)
    small = fleet.train("small", workers=1)
    fleet.until("the small one", lambda: fleet.status(small)["members"], AWAITED_S)
    lacks = "needs 3 free slots at once, and 1 of the 3 on 3 nodes are free"
    fleet.until("why the large one waits", lambda: entries(fleet)[large]["because"] == lacks)
    assert fleet.run("stop", first).returncode == 0
    fleet.until("the large one", lambda: len(fleet.status(large)["members"]) == 3, AWAITED_S)
    assert [line["because"] for line in fleet.events("preempted", job=small)] == [f"preempted for {large}"]
    fleet.pace(0.0)
    for job in (large, "small"):  # as which it goes on
        ended = end_of(fleet, job)
        assert (ended["exit_code"], ended["digest"]) == (0, quiet.digest), ended["because"]


def test_a_job_that_lost_a_node_gets_one_of_a_job_behind_it(fleet: Fleet, quiet: Quiet) -> None:
    fleet.pace(0.05)
    high = fleet.train("high", "--priority", "5", workers=2, min_workers=2)
    fleet.until("members", lambda: len(fleet.status(high)["members"]) == 2)
    low = fleet.train("low", workers=1)
    fleet.until("the other job", lambda: fleet.status(low)["members"])
    lost = min(entries(fleet)[high]["slots"])
    fleet.end(lost, signal.SIGKILL)
    fleet.until("the preemption", lambda: fleet.events("preempted", job=low), AWAITED_S)
    fleet.until("all members", lambda: len(fleet.status(high)["members"]) == 2, AWAITED_S)
    assert lost not in entries(fleet)[high]["slots"]
    fleet.node(lost)
    fleet.pace(0.0)
    for job in (high, "low"):
        ended = end_of(fleet, job)
        assert (ended["exit_code"], ended["digest"]) == (0, quiet.digest), ended["because"]
