"""What is slow for a while is not dead: processes that are stopped for a second now and then, and a narrow cable.

SEED=n in the environment repeats one order of moments, PATIENCE_S=n does it for so long (default 60 s).
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from chaos_tests.cluster import Network, why_not
from tests.live.conftest import Quiet
from tests.live.fleet import Fleet

SECONDS = float(os.environ.get("PATIENCE_S", "60"))
NODES = ("a", "b", "c")
PACE_S = SECONDS / 300
"""Of a shard: the trainer has two for each worker in a step, and waits at its end after some 140 steps."""

STOPPED_S = 1.0
KBIT_S = 4000
"""A step's gradients of the trainer are some kilobytes; beats, streams and a ring's build share the cable."""

pytestmark = pytest.mark.long


def drawn() -> random.Random:
    seed = int(os.environ.get("SEED", time.time_ns() % 10**6))
    print(f"\nSEED={seed}", flush=True)
    return random.Random(seed)


def begin(fleet: Fleet) -> str:
    fleet.pace(PACE_S)
    job = fleet.train("patient")
    fleet.await_slots(job, *(f"{node}.0" for node in NODES))
    return job


def check(fleet: Fleet, job: str, quiet: Quiet) -> None:
    """Nobody was taken for dead, and the processes are those of the beginning."""
    assert [fleet.events(event, job=job) for event in ("member_lost", "expelled", "worker_exited")] == [[], [], []]
    assert len(fleet.events("worker_started", job=job)) == len(NODES)
    fleet.finish(job, quiet.digest, quiet.steps)


def test_agents_daemons_and_replicas_that_stand_still_for_a_second_lose_nobody(tmp_path: Path, quiet: Quiet) -> None:
    dice, counts = drawn(), dict[str, int]()
    with Fleet(tmp_path, replicas=2, nodes=NODES) as fleet:
        job = begin(fleet)
        end_s = time.monotonic() + SECONDS
        while time.monotonic() < end_s:
            node = dice.choice(NODES)
            what, pid = dice.choice(
                [
                    ("agent", fleet.agent_of(job, node)),
                    ("daemon", fleet.nodes[node].pid),
                    ("replica", fleet.replicas[dice.choice(sorted(fleet.replicas))].pid),
                ]
            )
            os.kill(pid, signal.SIGSTOP)
            time.sleep(STOPPED_S)  # the fault itself
            os.kill(pid, signal.SIGCONT)
            counts[what] = counts.get(what, 0) + 1
            time.sleep(dice.uniform(0.2, 2.0))
        print(f"stopped for {STOPPED_S:g} s: {counts}; steps: {len(fleet.steps(job))}")
        check(fleet, job, quiet)


@pytest.mark.skipif(bool(why := why_not()), reason=why)
def test_a_narrow_cable_loses_nobody(tmp_path: Path, quiet: Quiet) -> None:
    dice = drawn()
    with Network() as network, Fleet(tmp_path, network, nodes=NODES) as fleet:
        job = begin(fleet)
        node = dice.choice(NODES)
        network.narrow(node, KBIT_S)
        before = len(fleet.steps(job))
        time.sleep(SECONDS)  # the fault itself
        steps = len(fleet.steps(job)) - before
        print(f"{KBIT_S} kbit/s to and from {node}: {steps} steps")
        network.heal()
        assert steps > 0
        check(fleet, job, quiet)
