"""Rounds with a quorum: a slow worker, a dead one and a newcomer hold nobody up; and if all that have an outer state
die while a newcomer has none, the job goes on from what is kept."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from chaos_tests.cluster import Network, Roughness, why_not
from tests.live.fleet import Fleet
from tests.live.jobs import DEADLINE_S, ROOT, SCRIPTS, Job, Line

pytestmark = pytest.mark.long
REPLICAS = SCRIPTS / "replicas.py"
INNER_STEPS = 4
PACE_S, SLOW_S = 0.05, 1.5
"""Of an inner step. A slow replica would take all others six seconds a round."""
CABLE_KBIT_S, FAULTS = 10_000, 8


def rounds(job: Job) -> list[dict[str, float]]:
    return [line["scalars"] for line in job.steps()]


def asked(job: Job) -> Line:
    """What `elastic status --json` prints."""
    command = [sys.executable, "-m", "elastic.cli", "status", "--json", "--job-dir", str(job.dir)]
    done = subprocess.run(command, capture_output=True, check=True, timeout=DEADLINE_S, cwd=ROOT)
    document: Line = json.loads(done.stdout)
    return document


def in_order(lines: list[Line]) -> bool:
    return [line["step"] for line in lines] == list(range(len(lines)))


@pytest.mark.parametrize("words", [("quorum",), ("quorum", "delayed")], ids=" ".join)
def test_a_slow_worker_a_dead_one_and_a_newcomer_hold_nobody_up(words: tuple[str, ...], tmp_path: Path) -> None:
    """Delayed, differences leave while further inner steps are made."""
    with Job(tmp_path, "--workers", "3", "--overlap", "on", "--quiet", str(REPLICAS), *words) as job:
        job.pace(PACE_S)
        job.shut("end")
        members = job.await_world(3)
        (job.gates / f"pace.{members[2]}").write_text(str(SLOW_S))
        job.until("a late replica", lambda: [one for one in rounds(job) if one["elastic.late"]])
        job.await_steps(len(job.steps()) + 3)
        for one in rounds(job)[-2:]:
            assert (one["elastic.replicas"], one["elastic.late"], one["elastic.lost"]) == (3, 1, 0)
            assert 2 * INNER_STEPS < one["elastic.inner_steps"] < 3 * INNER_STEPS
        outer = asked(job)["outer"]
        assert outer["late"] == 1 and outer["drift"] > 0
        assert not job.events("member_lost") and not job.events("expelled"), "nobody is expelled for being late"

        job.send(members[0])
        job.until("a lost replica", lambda: [one for one in rounds(job) if one["elastic.lost"] == 1])
        job.until("a newcomer is a member", lambda: set(job.await_world(3)) - set(members))
        joined = len(job.steps())
        job.await_steps(joined + 3)
        assert rounds(job)[-1]["elastic.replicas"] == 3, "the newcomer is a replica"

        (job.gates / f"pace.{members[2]}").unlink()
        job.finish()
        assert in_order(job.steps())
        assert all(one["moved"] > 0 for one in rounds(job)), "nobody began with fresh weights"


def test_a_fresh_newcomer_never_becomes_the_state_of_the_job(tmp_path: Path) -> None:
    """The published failure: the only member with an outer state is killed while the other one is fresh."""
    options = ("--workers", "2", "--checkpoint-every", "2 steps", "--quiet", str(REPLICAS), "quorum")
    with Job(tmp_path, *options) as job:
        job.pace(PACE_S)
        job.shut("end")
        members = job.await_world(2)
        job.await_steps(8)
        job.await_event("checkpoint_complete")
        job.shut("loop")
        job.send(members[1])
        (fresh,) = job.await_held("loop")
        assert fresh not in members
        seen = len(job.steps())
        job.send(members[0])
        job.await_event("worker_exited", worker_id=members[0])
        job.open("loop")
        job.until("the job goes on", lambda: len(job.steps()) > seen + 4 or None)
        job.pace(0)
        job.open("end")
        assert job.wait(2 * DEADLINE_S) == 0, job.story()
        assert (job.dir / "resumes.jsonl").exists(), "it says from where it has gone on"
        assert in_order(job.steps())
        moved = [one["moved"] for one in rounds(job)]
        assert min(moved[5:]) > 0.5 * moved[4], "the weights are those of the job"


@pytest.mark.skipif(bool(why := why_not()), reason=why)
def test_a_storm_over_narrow_cables_stops_nobody(tmp_path: Path) -> None:
    """Three nodes behind cables of 10 Mbit/s and 20 ms. Whenever three workers have made two rounds, one of them is
    killed."""
    dice = random.Random(49)
    options = {"every": 10, "steps": 2000, "replicas": 3, "batch-size": 12, "quorum": 2, "grace": 1, "eval-every": 2000}
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with Network() as network, Fleet(tmp_path, network, nodes=("a", "b", "c")) as fleet:
        for node in ("a", "b", "c"):
            network.narrow(node, CABLE_KBIT_S)
            network.roughen(node, Roughness(delay_s=0.02))
        job = fleet.submit(
            name="storm",
            command=["python", str(ROOT / "docs" / "examples" / "train_diloco.py"), *arguments],
            env={"OMP_NUM_THREADS": "1"},
            workers=3,
            min_workers=1,
            checkpoint_dir=str(tmp_path / "checkpoints"),
        )
        killed = []
        for _ in range(FAULTS):
            status = fleet.await_slots(job, "a.0", "b.0", "c.0")
            fleet.await_more_steps(job, 2)
            killed.append(dice.choice([member["worker_id"] for member in status["members"]]))
            fleet.kill_worker(job, killed[-1])
            fleet.until("it is noted", lambda: fleet.events("member_lost", job=job, worker_id=killed[-1]))
        ended = fleet.await_end(job, 4 * DEADLINE_S)
        assert ended["exit_code"] == 0, ended["because"]
        lost = {line["worker_id"] for line in fleet.events("member_lost", job=job)}
        assert lost == set(killed), "nobody else was given up"
        assert not fleet.events("state_lost", job=job)
        lines = fleet.steps(job)
        assert in_order(lines) and len(lines) == 200
        scalars = [line["scalars"] for line in lines]
        assert sum(one["elastic.lost"] for one in scalars) >= 1
        assert all(one["elastic.replicas"] + one["elastic.lost"] >= 2 for one in scalars)
        assert scalars[-1]["loss"] < scalars[0]["loss"] - 0.5, "it learns"
