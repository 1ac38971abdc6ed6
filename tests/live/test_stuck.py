"""A worker that lives and gets nowhere is named, shows where its threads are, and is replaced.

One that is known to take its time is only named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.config import Timing
from elastic.embedded import EmbeddedEtcd
from tests.live.conftest import Quiet
from tests.live.spread import Spread

PROGRESS_S = 5.0


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
    job.await_members("a.0.0", "b.0.1")
    job.pace(0.0)
    assert (result := job.await_result())["exit_code"] == 0, result
    assert result["digest"] == quiet.digest
    assert [(line["step"], line["scalars"]) for line in job.steps()] == [
        (line["step"], line["scalars"]) for line in quiet.steps
    ]


def _for(job: Spread, seconds: float) -> list[str] | None:
    """What is said of those who hold the others up, once one has done so for that long."""
    said = list(job.status().get("held_up_by", {}).values())
    return said if any(float(how.split()[0]) >= seconds for how in said) else None
