"""A slow machine gets fewer shards, is named, and by policy changes places with a spare, and no bit changes."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from elastic.cli.job.status import status_text
from elastic.config import Stragglers, Timing
from elastic.store.embedded import EmbeddedEtcd
from tests.live.conftest import Quiet
from tests.live.spread import Spread
from tests.live.test_drain import assert_as_quiet

SLOW = "b.0.0"


def mixed(stack: ExitStack, home: Path, etcd: EmbeddedEtcd, name: str, **spec: Any) -> Spread:
    """A job on the nodes a and b; b takes ten times as long for a shard."""
    job = stack.enter_context(Spread(home, etcd, name, timing=Timing(uneven_s=1.0), **spec))
    job.pace(0.01)
    job.pace(0.1, SLOW)
    job.rendezvous()
    job.agent("a")
    job.agent("b")
    job.await_members("a.0.0", SLOW)
    return job


def entered(job: Spread, worker_id: str) -> set[int]:
    """Planned generations that this worker was in; a later one may come before one takes effect."""
    planned = {line["generation"] for line in job.events("committed", kind="planned")}
    return planned & {line["generation"] for line in job.events("entered", worker_id=worker_id)}


def shards(status: dict[str, Any]) -> dict[str, int]:
    return {member["worker_id"]: member["shards"] for member in status["members"]}


@pytest.mark.long
def test_shards_follow_speed_and_the_slow_worker_is_named(tmp_path: Path, etcd: EmbeddedEtcd, quiet: Quiet) -> None:
    with ExitStack() as stack:
        job = mixed(stack, tmp_path, etcd, "uneven")
        balanced = job.await_event("balanced")
        assert balanced["shards"]["a.0.0"] > balanced["shards"][SLOW] >= 1
        job.until("a generation with other shares", lambda: entered(job, "a.0.0") & entered(job, SLOW))
        status = job.until("its name", lambda: (s := job.status()).get("stragglers") and s)
        assert list(status["stragglers"]) == [SLOW]
        job.until("the newest shares", lambda: shards(job.status()) == job.events("balanced")[-1]["shards"])
        (told,) = (line for line in status_text(status).splitlines() if line.startswith("  straggler"))
        assert f"{SLOW}: a shard takes it " in told and " times as long as the others" in told
        job.pace(0.0, SLOW)
        assert_as_quiet(job, quiet)


@pytest.mark.long
def test_a_straggler_changes_places_with_a_spare(tmp_path: Path, etcd: EmbeddedEtcd, quiet: Quiet) -> None:
    with ExitStack() as stack:
        job = mixed(stack, tmp_path, etcd, "demoting", spares=1, stragglers=Stragglers.DEMOTE)
        demoted = job.await_event("demoted")
        assert demoted["worker_id"] == SLOW
        job.await_members("a.0.0", "a.1.0")
        swap = next(line for line in job.events("committed") if SLOW not in line["members"])
        assert (swap["kind"], swap["members"]) == ("planned", ["a.0.0", "a.1.0"]), "in one generation"
        job.await_event("worker_exited", worker_id=SLOW, because="exited with 0")
        job.until("its slot to keep the next spare", lambda: "b.0.1" in job.status().get("spares", ()))
        assert_as_quiet(job, quiet)
