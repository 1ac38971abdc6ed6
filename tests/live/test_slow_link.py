"""A link that is so slow that one exchange takes a minute, and loses packets besides, is no dead link."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from chaos_tests.cluster import Network, Roughness, why_not
from tests.live.fleet import Fleet
from tests.live.jobs import SCRIPTS, run_alone

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(why := why_not()), reason=why)]

HEAVY = SCRIPTS / "heavy.py"
STEPS, FLOATS, KBIT_S = "4", "2000000", 1100
"""An exchange is 8 MB in each direction, and with what is lost and sent again takes more than 60 s; a step has two."""
EXCHANGE_S = 8 * 4 * int(FLOATS) / (1000 * KBIT_S)
STEP_AT_MOST_S = 900.0
EVICT_S = 9.0
"""The cable is full, and 2 % of all packets are lost: an agent that has lost its stream may need more than the default
2.5 s to open another one, and no step tells meanwhile that the ring lives."""


def test_an_exchange_of_a_minute_over_a_narrow_and_lossy_cable_finishes_with_the_bits_of_one_worker(
    tmp_path: Path,
) -> None:
    """Beats of agents, their streams to the leader and its own share that cable, and stay up or come back."""
    alone = run_alone(tmp_path, HEAVY, STEPS, FLOATS).split()[-1]
    with Network() as network, Fleet(tmp_path, network, nodes=("a", "b")) as fleet:
        fleet.pace(5.0)
        command = ["python", str(HEAVY), STEPS, FLOATS]
        environment = {"LIVE_GATES": str(fleet.gates), "OMP_NUM_THREADS": "1"}
        job = fleet.submit(
            name="wide",
            command=command,
            env=environment,
            workers=2,
            min_workers=2,
            timing={"evict_s": EVICT_S},
            checkpoint_dir=str(tmp_path / "checkpoints"),
        )
        fleet.await_members(job, "a.0.0", "b.0.0")
        network.narrow("a", KBIT_S)
        network.roughen("a", Roughness(lost=0.02))
        fleet.pace(0.0)
        began_s = time.monotonic()
        fleet.await_more_steps(job, 1, STEP_AT_MOST_S)
        assert time.monotonic() - began_s > EXCHANGE_S, "the cable was not narrow"
        network.heal()
        ended = fleet.await_end(job)
        assert (ended["exit_code"], ended["digest"]) == (0, alone), ended["because"]
        assert not fleet.events("member_lost", job=job)
        assert not fleet.events("ring_aborted", job=job), "nobody has taken it for a cut link"
        assert len(fleet.steps(job)) == int(STEPS)


ROUND_BYTES = 9 * 4 * 262_912
"""What a round of counted_rounds.py sums with AdamW and 4 replicas. Two workers each send as much."""
CABLE_KBIT_S = 10_000


def test_rounds_of_replicas_that_fill_a_cable_of_10_mbit_s_expel_nobody(tmp_path: Path) -> None:
    """Beats, orders and the transfer share the cable, which is full for longer than evict_s in each round; the timing
    is the default one."""
    with Network() as network, Fleet(tmp_path, network, nodes=("a", "b")) as fleet:
        network.narrow("a", CABLE_KBIT_S)
        network.roughen("a", Roughness(delay_s=0.02))
        job = fleet.submit(
            name="replicas",
            command=["python", str(SCRIPTS / "counted_rounds.py"), "3", "1", "own"],
            env={"LIVE_GATES": str(fleet.gates), "OMP_NUM_THREADS": "1"},
            workers=2,
            min_workers=2,
            checkpoint_dir=str(tmp_path / "checkpoints"),
        )
        fleet.await_members(job, "a.0.0", "b.0.0")
        began_s = time.monotonic()
        ended = fleet.await_end(job)
        took_s = time.monotonic() - began_s
        assert ended["exit_code"] == 0, ended["because"]
        assert took_s > 2 * 8 * ROUND_BYTES / (1000 * CABLE_KBIT_S), "the cable was not narrow"
        assert not fleet.events("member_lost", job=job)
        assert not fleet.events("ring_aborted", job=job), "nobody has taken it for a cut link"
