"""elastic.keep where each node is a host of its own: what one has kept is on the next one when its cable is cut."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from chaos_tests.cluster import Network, why_not
from elastic.store.embedded import EmbeddedEtcd
from tests.live.spread import Spread
from tests.live.test_kept import SCRIPT, STEPS, Rounds, alone
from tests.live.test_kept_nodes import lose, memory
from tests.live.test_kept_replicas import BOTH, parts_on

__all__ = ["memory"]
pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(why := why_not()), reason=why)]


def test_a_node_is_cut_off_and_comes_back(tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is whole, and nobody can read it: the others go on from the mirror, and it reads from them later."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    files = tmp_path / "files"
    files.mkdir()
    command = (sys.executable, str(SCRIPT), str(files), str(STEPS))
    with ExitStack() as stack:
        network, etcd = stack.enter_context(Network()), stack.enter_context(EmbeddedEtcd())
        job = stack.enter_context(
            Spread(tmp_path, etcd, "cut", network, command=command, restart=True, workers=3, memory=memory)
        )
        job.rendezvous()
        for node in ("a", "b", "c"):
            job.agent(node)
        rounds = Rounds(job.until, files)
        rounds.open(0, 1, 2, 3)
        first = rounds.await_step(4, world=3)
        network.isolate("c")
        second = job.until("a round of two nodes", lambda: rounds.begun_after(first, 2))
        assert all(begun >= 2 for _, _, begun in rounds.started(second).values()), "at most two steps are done again"
        rounds.open(4)
        rounds.await_step(5, world=2)
        network.heal()
        third = job.until("a round of three nodes", lambda: rounds.begun_after(second, 3))
        assert all(begun >= 4 for _, _, begun in rounds.started(third).values())
        rounds.open(*range(5, STEPS))
        assert job.await_result()["exit_code"] == 0
    assert (files / "digest").read_text() == alone(STEPS)


def test_a_replica_is_cut_off_and_comes_back_and_then_the_other_one_is_lost(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts, each with a replica of two shards: nothing is sent while both are there. The one that comes back has
    an old step, and copies the newest one before its scripts start."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("REPLICAS", "2")
    files = tmp_path / "files"
    files.mkdir()
    command = (sys.executable, str(SCRIPT), str(files), str(STEPS))
    with ExitStack() as stack:
        network, etcd = stack.enter_context(Network()), stack.enter_context(EmbeddedEtcd())
        job = stack.enter_context(
            Spread(tmp_path, etcd, "mesh", network, command=command, restart=True, workers=4, memory=memory)
        )
        job.rendezvous()
        agents = {node: job.agent(node, slots=2) for node in ("a", "b")}
        rounds = Rounds(job.until, files)
        rounds.open(0, 1, 2, 3)
        first = rounds.await_step(4, world=4)
        assert {node: parts_on(memory / node) for node in agents} == dict.fromkeys(agents, BOTH)
        network.isolate("b")
        second = job.until("a round of one replica", lambda: rounds.begun_after(first, 2))
        assert {begun for _, _, begun in rounds.started(second).values()} <= {3, 4}, "at most one step is done again"
        rounds.open(4)
        rounds.await_step(5, world=2)
        network.heal()
        third = job.until("a round of both replicas", lambda: rounds.begun_after(second, 4))
        assert {begun for _, _, begun in rounds.started(third).values()} == {5}
        lose("a", agents["a"], memory)
        fourth = job.until("a round of the replica that had come back", lambda: rounds.begun_after(third, 2))
        assert {begun for _, _, begun in rounds.started(fourth).values()} == {5}, "it had copied that step"
        rounds.open(*range(5, STEPS))
        assert job.await_result()["exit_code"] == 0
        assert job.events("kept_thin") == [] and job.events("kept_incomplete") == []
        assert [line["step"] for line in job.steps()] == list(range(STEPS))
    assert (files / "digest").read_text() == alone(STEPS)
