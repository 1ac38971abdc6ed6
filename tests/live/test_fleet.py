"""Three nodes, two replicas, several jobs: real daemons, real kills, and the bits of the quiet run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elastic import ledger
from tests.live.conftest import Quiet
from tests.live.fleet import Fleet


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("fleet")) as made:
        for name in ("a", "b", "c"):
            made.node(name, "--label", f"name={name}")
        made.await_nodes("a", "b", "c")
        yield made


def pids(status: dict[str, list[dict[str, object]]]) -> dict[object, object]:
    return {member["worker_id"]: member["pid"] for member in status["members"]}


def test_a_job_goes_on_without_a_node_and_without_the_leader_and_ends_with_the_quiet_bits(
    fleet: Fleet, quiet: Quiet
) -> None:
    fleet.pace(0.05)
    job = fleet.submit("train")
    before = fleet.await_members(job, "a.0.0", "b.0.0", "c.0.0")

    fleet.kill(fleet.nodes["c"])
    after = fleet.await_members(job, "a.0.0", "b.0.0")
    assert pids(after).items() < pids(before).items()

    leader = fleet.leader_of(job)
    fleet.kill(fleet.replicas.pop(leader))
    led = fleet.until("another leader", lambda: s if (s := fleet.status(job)).get("term", 0) > after["term"] else None)
    led = fleet.until("its members", lambda: s if all(pids(s := fleet.status(job)).values()) else None)
    assert (led["generation"], pids(led)) == (after["generation"], pids(after))
    fleet.replica(leader)

    fleet.node("c")
    grown = fleet.await_members(job, "a.0.0", "b.0.0", "c.0.1")
    drained = fleet.run("drain", "--node", "b")
    assert (drained.returncode, drained.stderr) == (0, "")
    small = fleet.await_members(job, "a.0.0", "c.0.1")
    assert pids(small).items() < pids(grown).items()
    assert not fleet.events("member_lost", worker_id="b.0.0"), "a drained node is no loss"

    fleet.pace(0.0)
    ended = fleet.await_end(job)
    assert (ended["exit_code"], ended["digest"]) == (0, quiet.digest), ended["because"]
    assert ledger.compare(fleet.steps(job), quiet.steps) is None
    assert fleet.run("drain", "--node", "b", "--cancel").returncode == 0
    assert fleet.living() == [], "processes of a job that is over"
