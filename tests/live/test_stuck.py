"""A worker that lives and gets nowhere is named, shows where its threads are, and is replaced.

One that is known to take its time is only named."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic.config import Timing
from elastic.store.embedded import EmbeddedEtcd
from tests.live.conftest import Quiet
from tests.live.jobs import TRAINER, Job
from tests.live.spread import Spread

pytestmark = pytest.mark.long

PROGRESS_S = 5.0
BEFORE = "step 10"
"""Behind the first snapshot."""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Spread]:
    timing = Timing(progress_s=PROGRESS_S, fence_grace_s=3.0)
    with EmbeddedEtcd() as etcd, Spread(tmp_path, etcd, "stuck", timing=timing) as job:
        job.pace(0.02)
        job.rendezvous()
        job.agent("a")
        job.agent("b")
        job.await_members("a.0.0", "b.0.0")
        yield job


def test_who_gets_nowhere_in_a_shard_is_replaced_and_who_evaluates_is_waited_for(job: Spread, quiet: Quiet) -> None:
    job.shut("evaluate", "a.0.0")
    job.until("it is named", lambda: job.status().get("held_up_by"))
    (named,) = job.until("it takes longer than a shard may", lambda: _for(job, 1.2 * PROGRESS_S))
    assert "in job.evaluate" in named and "others wait for it" in named
    job.open("evaluate")
    assert job.events("stuck") == []

    job.shut("shard", "b.0.0")
    stuck = job.await_event("stuck")
    assert stuck["worker_id"] == "b.0.0" and "in pass 0 of step" in stuck["because"]
    job.await_event("expelled", worker_id="b.0.0")
    job.await_event("worker_exited", worker_id="b.0.0", because="killed by SIGKILL")
    (log,) = job.home.glob("*/logs/b.0.0.log")
    assert 'gates.py", line' in log.read_text()
    job.open("shard")
    job.await_slots("a.0", "b.0")
    job.pace(0.0)
    assert (result := job.await_result())["exit_code"] == 0, result
    assert result["digest"] == quiet.digest
    assert [(line["step"], line["scalars"]) for line in job.steps()] == [
        (line["step"], line["scalars"]) for line in quiet.steps
    ]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_job_in_which_nobody_gets_on_goes_on_from_what_is_kept(workers: int, quiet: Quiet, tmp_path: Path) -> None:
    """Nobody waits for anybody, so nobody can be compared with the others."""
    with _held(tmp_path, workers, "shard") as job:
        named = job.until("they are named", lambda: job.status().get("held_up_by"))
        assert set(named) == _first(workers)
        assert all("in pass 0 of step" in how and "and nobody gets on" in how for how in named.values())
        _check_goes_on(job, workers, quiet)


@pytest.mark.parametrize("workers", [1, 2])
def test_so_does_one_in_which_all_hold_the_interpreter(workers: int, quiet: Quiet, tmp_path: Path) -> None:
    """Nobody beats, and nobody answers when all are asked to leave their ring."""
    with _held(tmp_path, workers, "interpreter") as job:
        _check_goes_on(job, workers, quiet)


def test_so_does_one_in_which_all_hang_in_an_evaluation(quiet: Quiet, tmp_path: Path) -> None:
    with _held(tmp_path, 2, "evaluate") as job:
        _check_goes_on(job, 2, quiet)


@contextmanager
def _held(home: Path, workers: int, gate: str) -> Iterator[Job]:
    """Its first workers wait at that gate for what does not come; those that replace them pass it."""
    options = ("--workers", str(workers), "--hang-limit", "30", "--snapshot-every", "5 steps")
    with Job(home, *options, str(TRAINER)) as job:
        # All come to the gate in one step: a worker that had computed its shards would wait for one that is held.
        job.shut(BEFORE)
        job.until("all are there", lambda: _first(workers) <= job.held_at(BEFORE))
        job.await_event("snapshot_complete")
        temporary = job.gates / f"{gate}.tmp"
        temporary.write_text(" ".join(_first(workers)))
        temporary.rename(job.gates / gate)
        job.open(BEFORE)
        job.until("all are held", lambda: _first(workers) <= job.held_at(gate))
        yield job


def _first(workers: int) -> set[str]:
    return {f"local.{slot}.0" for slot in range(workers)}


def _check_goes_on(job: Job, workers: int, quiet: Quiet) -> None:
    job.until("they are given up", lambda: {line["worker_id"] for line in job.events("stuck")} >= _first(workers))
    job.until("it goes on", lambda: "goes on from step" in job.output)
    job.pace(0.0)
    assert job.wait() == 0
    assert job.result["digest"] == quiet.digest
    assert re.search(r"every copy of the state is lost after \d+ applied steps: local\.\d\.0.* \(stuck: ", job.output)
    for worker_id in _first(workers):
        assert 'gates.py", line' in (job.dir / "logs" / f"{worker_id}.log").read_text()
    assert job.left_behind() == {}


def _for(job: Spread, seconds: float) -> list[str] | None:
    """What is said of those who hold the others up, once one has done so for that long."""
    said = list(job.status().get("held_up_by", {}).values())
    return said if any(float(how.split()[0]) >= seconds for how in said) else None
