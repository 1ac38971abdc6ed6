"""Training without waiting survives the owner of a piece, its mirror later, and its fastest and its slowest worker."""

from __future__ import annotations

import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from elastic.protocol.local_phase import LOST
from elastic.store.embedded import EmbeddedEtcd
from runtime.asynchronous.ownership import order
from tests.live.jobs import SCRIPTS, Job
from tests.live.scripts import unwaiting_job as shape
from tests.live.spread import Spread

SCRIPT = SCRIPTS / "unwaiting.py"
WORKERS, ROUNDS, KILLS = 4, 150, 12
FAST_S, PACE_S, SLOW_S = 0.01, 0.03, 0.3


def inner(job: Job) -> list[tuple[int, str]]:
    """(phase, worker) of each inner step so far."""
    path = job.dir / "inner.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(phase), worker) for phase, worker, _ in (line.split() for line in lines if line.count(" ") == 2)]


def goes_on(job: Job, among: set[str]) -> None:
    """Each of these workers makes inner steps from now on."""
    before = len(inner(job))
    job.until(f"inner steps of {among}", lambda: among <= {worker for _, worker in inner(job)[before:]})


def trains(job: Job) -> None:
    """Somebody makes an inner step from now on."""
    before = len(inner(job))
    job.until("inner steps", lambda: len(inner(job)) > before)


def kill(job: Job, worker: str) -> None:
    """The others go on: those that live now make inner steps before a new worker comes."""
    living = set(job.members()) - {worker}
    job.shut("newcomer")
    job.send(worker)
    job.until(f"a generation without {worker}", lambda: worker not in job.members())
    goes_on(job, living)
    job.open("newcomer")
    job.until(f"a world of {WORKERS} that trains", lambda: len(set(job.members())) == WORKERS)
    goes_on(job, set(job.members()))


def counted(job: Job, rounds: int, gone: list[str]) -> None:
    """The job has ended as it should, and says what it has lost."""
    assert job.wait() == 0
    steps = job.steps()
    assert sum(line["scalars"].get(LOST, 0.0) for line in steps) <= len(gone)
    made = Counter(line.split()[2] for line in (job.dir / "inner.txt").read_text().splitlines())
    assert made.keys() == set(map(str, range(rounds * shape.EVERY)))
    assert min(made.values()) >= shape.SHARDS, "a unit was not trained"
    assert {line["of"] for line in job.events("update_lost")} <= set(gone)
    assert not job.events("pieces_fell_back")
    assert job.result["digest"]
    ends = {line["worker_id"]: line["because"] for line in job.events("worker_exited")}
    assert {worker for worker, because in ends.items() if because != "exited with 0"} == set(gone)
    assert job.left_behind() == {}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["store", "gossip"])
def test_no_death_stops_the_others_and_what_is_lost_is_counted(kind: str, tmp_path: Path) -> None:
    with Job(tmp_path, "--workers", str(WORKERS), "--quiet", str(SCRIPT), kind, str(ROUNDS)) as job:
        job.pace(PACE_S)
        job.until("all workers train", lambda: len({worker for _, worker in inner(job)}) == WORKERS)
        owner, mirror, fastest, slowest = order(0, job.members())
        (job.gates / f"pace.{slowest}").write_text(str(SLOW_S))
        goes_on(job, set(job.members()))
        (job.gates / f"pace.{fastest}").write_text(str(FAST_S))
        killed = [owner, mirror, fastest, slowest]
        for victim in killed:
            kill(job, victim)
        job.pace(0)
        counted(job, ROUNDS, killed)


def test_a_store_loses_the_owner_of_a_piece(tmp_path: Path) -> None:
    with Job(tmp_path, "--workers", "2", "--quiet", str(SCRIPT), "store", "30") as job:
        job.pace(PACE_S)
        job.until("both workers train", lambda: len({worker for _, worker in inner(job)}) == 2)
        owner, other = order(0, job.members())
        job.shut("newcomer")
        job.send(owner)
        job.until("a generation of one", lambda: job.members() == [other])
        goes_on(job, {other})
        job.open("newcomer")
        job.pace(0)
        counted(job, 30, [owner])


@pytest.mark.long
@pytest.mark.parametrize("kind", ["store", "gossip"])
def test_nobody_waits_for_a_worker_that_is_frozen(kind: str, tmp_path: Path) -> None:
    """It owns and mirrors pieces, and is a partner; the others go on when it is expelled, before a new one comes."""
    with Job(tmp_path, "--workers", "3", "--quiet", str(SCRIPT), kind, "80") as job:
        job.pace(PACE_S)
        job.until("all workers train", lambda: len({worker for _, worker in inner(job)}) == 3)
        job.shut("newcomer")
        frozen, *others = job.members()
        job.send(frozen, signal.SIGSTOP)
        job.until(f"a generation without {frozen}", lambda: frozen not in job.members())
        goes_on(job, set(others))
        job.open("newcomer")
        job.until("three members again", lambda: len(job.members()) == 3)
        job.pace(0)
        counted(job, 80, [frozen])


@pytest.mark.long
def test_a_node_that_leaves_as_planned_and_one_that_comes_lose_nothing(tmp_path: Path) -> None:
    command = (sys.executable, str(SCRIPT), "store", "100", "1.0")
    with EmbeddedEtcd() as etcd, Spread(tmp_path, etcd, "unwaiting", command=command) as job:
        job.pace(PACE_S)
        job.rendezvous()
        for node in "ab":
            job.agent(node)
        job.await_members("a.0.0", "b.0.0")
        job.until("both train", lambda: all((tmp_path / node / "inner.txt").exists() for node in "ab"))
        job.give_notice("a", 60.0)
        job.await_members("b.0.0")
        job.agent("c")
        job.await_members("b.0.0", "c.0.0")
        job.pace(0)
        assert job.await_result()["exit_code"] == 0
        lines = [line for node in "abc" for line in (tmp_path / node / "inner.txt").read_text().splitlines()]
        made = Counter(int(line.split()[2]) for line in lines)
        assert made.keys() == set(range(100 * shape.EVERY))
        assert min(made.values()) == shape.SHARDS and made.total() <= 100 * shape.SHARDS * shape.EVERY + shape.EVERY
        assert not job.events("pieces_fell_back")
        assert sum(line["scalars"].get(LOST, 0.0) for line in job.steps()) <= 1.0, "the unit that it was at"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["store", "gossip"])
def test_kills_at_random_moments_of_short_phases(kind: str, tmp_path: Path) -> None:
    """They meet exchanges, the sums between phases, and joins."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    drawn = random.Random(seed)
    with Job(tmp_path, "--workers", "3", "--quiet", str(SCRIPT), kind, "2000", "0.3") as job:
        job.pace(0.005)
        killed: list[str] = []
        while len(killed) < KILLS:
            job.until("three members", lambda: len(set(job.members()) - {*killed}) == 3)
            trains(job)
            time.sleep(drawn.uniform(0, 0.5))
            killed.append(drawn.choice(sorted(set(job.members()) - {*killed})))
            job.send(killed[-1])
            job.until("a death", lambda: killed[-1] not in job.members())
        (job.dir / "enough").touch()
        assert job.wait() == 0
        assert not job.events("pieces_fell_back")
        assert sum(line["scalars"].get(LOST, 0.0) for line in job.steps()) <= KILLS
        assert job.left_behind() == {}
