"""Nodes that die and come back at random moments, again and again, with replicas of the rendezvous killed now and then.

SEED=n in the environment repeats one order of moments, NODE_DEATHS=n does it as often (default 12).
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from chaos_tests.support.processes import descendants, kill_if_there
from tests.live.conftest import Quiet
from tests.live.fleet import Fleet, lives
from tests.soak.held import HeldResources, held

DEATHS = int(os.environ.get("NODE_DEATHS", "12"))
ROUNDS_A_JOB = 24
"""The script of the live tests waits for its end in step 140, and in more rounds than these it would come there."""
NODES = ("a", "b", "c")
AWAY_S = (0.0, 0.05, 0.5, 1.0, 3.0, 10.0)
FDS_SPARE = 8
"""Descriptors that a replica may hold more than at the beginning: a stream is opened before the old one is closed."""


class Deaths:
    """What is done to a fleet, round by round; each is told in a line."""

    def __init__(self, fleet: Fleet, job: str, dice: random.Random) -> None:
        self._fleet, self._job, self._dice = fleet, job, dice
        self.last_down = ""

    def members(self) -> int:
        return len(self._fleet.status(self._job)["members"])

    def _standing(self) -> list[str]:
        """Nodes with a member that lives: a leader that has just begun names those of the record, or nobody."""
        members = self._fleet.status(self._job)["members"]
        return sorted({one["worker_id"].partition(".")[0] for one in members if lives(one["pid"])})

    def round(self) -> str:
        """One node, or two of three, and how long they are away; now and then the leading replica besides."""
        fleet, dice = self._fleet, self._dice
        # At least one node that is a member already stays, as long as the job is not the last one's alone.
        spare = dice.choice(fleet.until("a member that lives", self._standing))
        victims = dice.sample(sorted(set(NODES) - {spare}), dice.choice((1, 1, 1, 2)))
        away_s = dice.choice(AWAY_S)
        how = dice.choice(("daemon", "daemon, then the rest", "the rest, then daemon"))
        for node in victims:
            self._end(node, how)
        leader = ""
        if dice.random() < 0.25:
            leader = dice.choice(sorted(fleet.replicas))
            fleet.end(leader)
        time.sleep(away_s)
        for node in victims:
            fleet.node(node)
        if leader:
            fleet.replica(leader)
        return f"{','.join(victims)} ({how}) away for {away_s:g} s{', and ' + leader if leader else ''}"

    def _end(self, node: str, how: str) -> None:
        below = descendants(self._fleet.nodes[node].pid)
        if how.startswith("daemon"):
            self._fleet.end(node)
        if how != "daemon":
            for pid in below:
                kill_if_there(pid)
        if how.startswith("the rest"):
            self._fleet.end(node)


@pytest.mark.long
def test_no_node_stays_away_however_it_died_and_whenever_it_returns(tmp_path: Path, quiet: Quiet) -> None:
    seed = int(os.environ.get("SEED", time.time_ns() % 10**6))
    print(f"\nSEED={seed}", flush=True)
    dice = random.Random(seed)
    with Fleet(tmp_path, replicas=2, nodes=NODES) as fleet:
        before: dict[tuple[str, int], HeldResources] = {}
        for first in range(0, DEATHS, ROUNDS_A_JOB):
            fleet.pace(0.3)
            job = fleet.train("returns")
            fleet.await_slots(job, "a.0", "b.0", "c.0")
            deaths = Deaths(fleet, job, dice)
            for number in range(first, min(first + ROUNDS_A_JOB, DEATHS)):
                said = deaths.round()
                fleet.await_nodes(*NODES)
                if dice.random() < 0.7:  # sometimes the next one comes before all are members again
                    fleet.await_slots(job, "a.0", "b.0", "c.0")
                print(f"{number + 1}/{DEATHS}: {said}", flush=True)
                for name, process in fleet.replicas.items():
                    before.setdefault((name, process.pid), held(process.pid))
            fleet.await_slots(job, "a.0", "b.0", "c.0")
            fleet.finish(job, quiet.digest, quiet.steps)
        for name, process in fleet.replicas.items():
            now = held(process.pid)
            assert now.since(before[name, process.pid]).fds <= FDS_SPARE, f"{name} has kept something of what is gone"
        assert fleet.events("standby_begins"), "agents were started before the leader asked for them"
        assert not fleet.events("node_refused"), "each return is that of a daemon whose predecessor is gone"
        assert fleet.living() == []
