"""Training without waiting survives the owner of a piece, its mirror later, and its fastest and its slowest worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.asynchronous.ownership import order
from runtime.asynchronous.phase_notes import LOST, UPDATES
from tests.live.jobs import SCRIPTS, Job
from tests.live.scripts import unwaiting_job as shape

SCRIPT = SCRIPTS / "unwaiting.py"
WORKERS = 4
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


@pytest.mark.long
@pytest.mark.parametrize("kind", ["store", "gossip"])
def test_no_death_stops_the_others_and_what_is_lost_is_counted(kind: str, tmp_path: Path) -> None:
    with Job(tmp_path, "--workers", str(WORKERS), "--quiet", str(SCRIPT), kind) as job:
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
        assert job.wait() == 0
        steps = job.steps()
        assert sum(line["scalars"].get(LOST, 0.0) for line in steps) <= len(killed)
        updates = sum(line["scalars"].get(UPDATES, 0.0) for line in steps)
        assert updates >= shape.ROUNDS * shape.SHARDS - 3 * len(killed) - 1e-3
        assert len(job.events("update_lost")) <= len(killed)
        assert not job.events("pieces_fell_back")
        assert job.result["digest"]
        ends = {line["worker_id"]: line["because"] for line in job.events("worker_exited")}
        assert {worker for worker, because in ends.items() if "SIGKILL" in because} == set(killed)
        assert all(because == "exited with 0" for worker, because in ends.items() if worker not in killed)
        assert job.left_behind() == {}
