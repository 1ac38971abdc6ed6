"""etcd is lost while jobs train, and comes back as of a backup: nobody is split, and nothing goes back in silence."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from chaos_tests.cluster import sturdy_binary
from elastic.checkpoints.series import Series
from elastic.checkpoints.storage import storage_at
from elastic.errors import ExitCode
from tests.live.conftest import Quiet
from tests.live.fleet import Fleet, pids

ETCDCTL = shutil.which("etcdctl", path=f"{sys.prefix}/etcd-client/usr/bin") or shutil.which("etcdctl")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        sturdy_binary() is None or ETCDCTL is None, reason="no etcd and etcdctl: `make test-live` has them"
    ),
]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path, etcd=1, nodes=("a", "b", "c")) as made:
        yield made


def etcdctl(*words: object) -> None:
    """With the protocol of version 3, which is not the default of all its versions."""
    assert ETCDCTL is not None
    subprocess.run([ETCDCTL, *map(str, words)], env={"ETCDCTL_API": "3"}, check=True, capture_output=True)


def back_up(fleet: Fleet) -> Path:
    backup = fleet.home / "etcd.db"
    etcdctl("--endpoints", fleet.etcd.endpoints[0], "snapshot", "save", backup)
    return backup


def lead_anew(fleet: Fleet, job: str) -> None:
    """Three times, so that the terms of the fleet and of the job are later than those of the backup."""
    for _ in range(3):
        before = fleet.until("who leads", lambda: fleet.status(job).get("term"))
        leader = fleet.leader_of(job)
        fleet.end(leader)
        fleet.until("another leader", partial(_is_later, fleet, job, before))
        fleet.replica(leader)


def _is_later(fleet: Fleet, job: str, term: int) -> bool:
    return int(fleet.status(job).get("term", 0)) > term


def restore(fleet: Fleet, backup: Path) -> None:
    """All that is newer is lost."""
    fleet.etcd.kill(0)
    data, peer = fleet.etcd.data(0), f"http://{fleet.etcd.endpoints[0].replace(':2379', ':2380')}"
    shutil.rmtree(data)
    member = ("--name", "etcd0", "--initial-cluster", f"etcd0={peer}", "--initial-advertise-peer-urls", peer)
    etcdctl("snapshot", "restore", backup, "--data-dir", data, *member)
    fleet.etcd.start(0)


def test_a_job_of_which_nothing_was_decided_since_the_backup_goes_on(fleet: Fleet, quiet: Quiet) -> None:
    fleet.pace(0.1)
    job = fleet.train("kept")
    before = fleet.await_members(job, "a.0.0", "b.0.0", "c.0.0")
    backup = back_up(fleet)
    lead_anew(fleet, job)
    seen = max(line["term"] for line in fleet.events("attending", job=job))
    restore(fleet, backup)
    fleet.until("a leader above all", partial(_is_later, fleet, job, seen))
    after = fleet.until("all members", lambda: s if all(pids(s := fleet.status(job)).values()) else None)
    assert pids(after) == pids(before) and after["generation"] == before["generation"]
    fleet.until("all nodes", lambda: all(node["up"] for node in fleet.client.overview()["nodes"]))
    fleet.kill_worker(job, "c.0.0")
    fleet.await_slots(job, "a.0", "b.0", "c.0", gone="c.0.0")
    fleet.finish(job, quiet.digest, quiet.steps)


def test_a_job_that_has_had_later_generations_ends_and_says_what_to_do(fleet: Fleet, quiet: Quiet) -> None:
    fleet.pace(0.1)
    job = fleet.train("lost", checkpoint_every="2 steps")
    fleet.await_members(job, "a.0.0", "b.0.0", "c.0.0")
    backup = back_up(fleet)
    fleet.kill_worker(job, "c.0.0")
    fleet.await_slots(job, "a.0", "b.0", "c.0", gone="c.0.0")
    lead_anew(fleet, job)
    restore(fleet, backup)
    ended = fleet.await_end(job)
    assert "etcd holds an older state than this job" in ended["because"]
    assert f"submitted again with --resume {job} it goes on from its newest checkpoint" in ended["because"]
    assert fleet.living() == [], "it trains on"
    newest, _ = Series(storage_at(str(fleet.home / "checkpoints" / job))).newest()
    again = fleet.train("lost", "--resume", job, checkpoint_every="2 steps")
    fleet.await_members(again, "a.0.0", "b.0.0", "c.0.0")
    assert newest is not None and fleet.steps(again)[0]["step"] == newest.name.step
    fleet.pace(0.0)
    assert fleet.await_end(again)["digest"] == quiet.digest


def test_a_job_that_the_backup_does_not_know_leaves_its_nodes_in_order(fleet: Fleet) -> None:
    fleet.pace(0.1)
    backup = back_up(fleet)
    job = fleet.train("unknown", checkpoint_every="off")
    fleet.await_members(job, "a.0.0", "b.0.0", "c.0.0")
    lead_anew(fleet, job)
    restore(fleet, backup)
    assert fleet.living() == [], "it trains on"
    assert fleet.client.overview()["jobs"] == []


def test_a_job_that_has_ended_since_the_backup_stays_ended(fleet: Fleet, quiet: Quiet) -> None:
    fleet.pace(0.1)
    job = fleet.train("over")
    fleet.await_members(job, "a.0.0", "b.0.0", "c.0.0")
    backup = back_up(fleet)
    fleet.finish(job, quiet.digest, quiet.steps)
    assert fleet.living() == []
    restore(fleet, backup)
    fleet.until("its end is told again", lambda: fleet.events("end_told_again", job=job))
    ended = fleet.await_end(job)
    assert (ended["exit_code"], ended["digest"]) == (0, quiet.digest)
    assert fleet.living() == []


def test_one_whose_end_no_replica_has_seen_ends_again_and_says_that_its_state_is_gone(
    fleet: Fleet, quiet: Quiet
) -> None:
    fleet.pace(0.1)
    job = fleet.train("over", checkpoint_every="off")
    fleet.await_members(job, "a.0.0", "b.0.0", "c.0.0")
    backup = back_up(fleet)
    fleet.finish(job, quiet.digest, quiet.steps)
    assert fleet.living() == []
    for replica in ("r0", "r1"):
        fleet.end(replica)
    restore(fleet, backup)
    for replica in ("r0", "r1"):
        fleet.replica(replica)
    fleet.until("it is placed again", lambda: fleet.events("job_agent_started", job=job, node="a")[1:])
    ended = fleet.await_end(job)
    assert ended["exit_code"] == ExitCode.STATE_LOST and "nothing is kept" in ended["because"]
    assert fleet.living() == []
