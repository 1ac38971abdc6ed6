"""Links that are cut between three hosts, two replicas and three members of etcd, while a job trains on them.

Whatever is cut: no step is lost, nobody who was not cut off is started again, and the end has the quiet run's bits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from chaos_tests.cluster import Network, why_not
from tests.live.conftest import Quiet
from tests.live.fleet import Fleet, pids

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(why := why_not()), reason=why)]

NODES = ("a", "b", "c")
REPLICAS = ("r0", "r1")
ETCD = ("etcd0", "etcd1", "etcd2")
CONTROL_PLANE = (*REPLICAS, *ETCD)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network() as made:
        yield made


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, network: Network) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("partitions"), network, etcd=3, nodes=("a", "b")) as made:
        nobody = f"{network.outside.rpartition('.')[0]}.254"
        known = [f"{nobody}:7070", *made.client.replicas]
        made.node("c", "--rendezvous", ",".join(known))  # the first is on a machine that is gone
        made.await_nodes("c")
        yield made


@pytest.fixture(autouse=True)
def whole(network: Network) -> Iterator[None]:
    yield
    network.heal()


def test_what_is_cut_off_from_the_control_plane_alone_stays(fleet: Fleet, network: Network, quiet: Quiet) -> None:
    """First a node whose ring lives, then the member of etcd that all replicas ask, then a leader, from etcd."""
    fleet.pace(0.1)
    job = fleet.train("steered")
    before = fleet.await_members(job, "a.0.0", "b.0.0", "c.0.0")

    network.cut(["c"], CONTROL_PLANE)
    fleet.until("the node to look for a leader", lambda: fleet.events("no_leader", job=job, node="c"))
    fleet.await_more_steps(job, 20)
    assert pids(fleet.status(job)) == pids(before)
    network.heal()
    fleet.until("the node to be back", lambda: len(fleet.events("attending", job=job, node="c")) > 1)

    network.isolate(ETCD[0])
    fleet.await_more_steps(job, 5)
    before = fleet.until(
        "a leader over the other two", lambda: s if pids(s := fleet.status(job)) == pids(before) else None
    )
    network.heal()

    leader = fleet.leader_of(job)
    network.cut([leader], ETCD)
    led = fleet.until("another leader", lambda: s if (s := fleet.status(job)).get("term", 0) > before["term"] else None)
    led = fleet.until("its members", lambda: s if all(pids(s := fleet.status(job)).values()) else None)
    assert (led["generation"], pids(led)) == (before["generation"], pids(before))
    (deposed,) = fleet.events("deposed", job=job, term=before["term"])
    (leading,) = fleet.events("leading", job=job, term=led["term"])
    assert deposed["held_until_ns"] < leading["t_mono_ns"], "it has relied on a lease that another one had"
    network.heal()
    fleet.await_more_steps(job, 5)
    assert not fleet.events("member_lost", job=job)
    fleet.finish(job, quiet.digest, quiet.steps)


def test_a_member_of_etcd_that_reaches_no_other_one_holds_no_recovery_up(
    fleet: Fleet, network: Network, quiet: Quiet
) -> None:
    """Replicas reach it all the time; only from the others do they get an answer."""
    fleet.pace(0.1)
    job = fleet.train("severed")
    fleet.await_members(job, "a.0.0", "b.0.0", "c.0.0")
    member = ETCD[fleet.etcd.leader()]
    network.cut([member], [name for name in ETCD if name != member])
    fleet.kill_worker(job, "b.0.0")
    fleet.await_slots(job, "a.0", "b.0", "c.0", gone="b.0.0")
    fleet.await_more_steps(job, 5)
    network.heal()
    fleet.finish(job, quiet.digest, quiet.steps)


def test_a_minority_is_expelled_and_comes_back_and_a_link_between_two_is_found(
    fleet: Fleet, network: Network, quiet: Quiet
) -> None:
    fleet.pace(0.1)
    job = fleet.train("parted")
    before = fleet.await_members(job, "a.0.0", "b.0.0", "c.0.0")

    network.isolate("c")
    after = fleet.await_members(job, "a.0.0", "b.0.0")
    assert pids(after).items() < pids(before).items()
    network.heal()
    grown = fleet.await_slots(job, "a.0", "b.0", "c.0")
    assert fleet.events("ordered", job=job, worker_id="c.0.0", order="Fence")

    network.cut(["b"], ["c"], one_way=True)
    after = fleet.await_members(job, "a.0.0", "b.0.0")
    assert pids(after).items() < pids(grown).items()
    losses = fleet.events("committed", job=job, kind="loss")
    built = [line for line in losses if line["generation"] > grown["generation"]]
    assert len(built) == 3, "two builds of all three, and one without the youngest of those that were named"
    fleet.until("it to come again, in vain", lambda: fleet.events("newcomer_unreachable", job=job))
    fleet.await_more_steps(job, 5)
    network.heal()
    fleet.until("the youngest to be a member again", lambda: len(pids(fleet.status(job))) == 3)
    assert pids(fleet.status(job)).items() > pids(after).items()
    fleet.finish(job, quiet.digest, quiet.steps)


def test_doctor_names_the_nodes_between_which_a_link_is_cut(fleet: Fleet, network: Network) -> None:
    def ports() -> list[str]:
        found = json.loads(fleet.run("doctor", "--json").stdout)["findings"]
        return [f"{one['where']}: {one['said']} {one['advice']}" for one in found if one["about"] == "ports"]

    assert ports() == ["fleet: each node reaches all others where workers listen "]
    network.cut(["a"], ["c"])
    told = sorted(ports())
    assert len(told) == 2
    for line, (node, other) in zip(told, (("a", "c"), ("c", "a")), strict=True):
        assert line.startswith(
            f"node {node}: workers at {network.address(node)} are not reached from {other}; port "
        ), line
        assert f"let {other} through to TCP ports " in line


def test_of_two_halves_that_with_the_majority_of_etcd_goes_on(fleet: Fleet, network: Network, quiet: Quiet) -> None:
    fleet.pace(0.1)
    job = fleet.train("halved")
    before = fleet.await_members(job, "a.0.0", "b.0.0", "c.0.0")
    leader = fleet.leader_of(job)
    network.cut(["a", "b", leader, "etcd0"], ["c", *({*REPLICAS} - {leader}), "etcd1", "etcd2"])
    after = fleet.await_members(job, "c.0.0")
    assert pids(after).items() < pids(before).items()
    fleet.await_more_steps(job, 10)
    since_ns = fleet.events("committed", job=job, generation=after["generation"])[0]["t_mono_ns"]
    alone = [line for line in fleet.events("op_complete", job=job) if line["t_mono_ns"] > since_ns]
    assert {line["worker_id"] for line in alone} == {"c.0.0"}
    network.heal()
    fleet.await_slots(job, "a.0", "b.0", "c.0")
    fleet.finish(job, quiet.digest, quiet.steps)


def test_a_ring_that_no_leader_reaches_parks_before_any_leader_goes_on_without_it(
    fleet: Fleet, network: Network, quiet: Quiet
) -> None:
    fleet.pace(0.1)
    limits = {"control_silence_s": 4.0, "orphan_limit_s": 10.0, "orphan_margin_s": 20.0, "join_window_s": 100.0}
    job = fleet.train("orphaned", timing=limits)
    before = fleet.await_members(job, "a.0.0", "b.0.0", "c.0.0")
    network.cut(NODES, CONTROL_PLANE)
    fleet.until("the leader to miss them", lambda: fleet.status(job)["state"] == "quiescing")
    fleet.await_more_steps(job, 3)
    fleet.until("all to park", lambda: len({line["node"] for line in fleet.events("parked", job=job)}) == 3)
    parked = len(fleet.steps(job))
    assert fleet.status(job)["because"].startswith("no member of generation 1 has answered")
    network.heal()
    after = fleet.await_members(job, "a.0.0", "b.0.0", "c.0.0")
    assert pids(after) == pids(before)
    assert len(fleet.steps(job)) >= parked
    fleet.finish(job, quiet.digest, quiet.steps)
