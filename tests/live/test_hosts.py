"""A job over three hosts with addresses of their own: nothing of it may count on 127.0.0.1, which none of them has."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos_tests.harness.cluster import Network, why_not
from elastic import ledger
from tests.live.conftest import Quiet
from tests.live.fleet import Fleet

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(why := why_not()), reason=why)]


def test_a_job_over_three_hosts_goes_on_without_the_one_that_is_unplugged_and_takes_it_back(
    tmp_path: Path, quiet: Quiet
) -> None:
    with (
        Network() as there,
        Fleet(tmp_path, there, nodes=("a", "b", "c"), ask_first=[f"{there.nobody}:7070"]) as fleet,
    ):
        fleet.pace(0.05)
        job = fleet.train("train", workers=3)
        before = fleet.await_members(job, "a.0.0", "b.0.0", "c.0.0")
        there.isolate("c")
        after = fleet.await_members(job, "a.0.0", "b.0.0")
        pids = {member["worker_id"]: member["pid"] for member in before["members"]}
        assert all(pids[member["worker_id"]] == member["pid"] for member in after["members"])
        there.heal()
        fleet.await_members(job, "a.0.0", "b.0.0", "c.0.1")
        fleet.pace(0.0)
        ended = fleet.await_end(job)
        assert (ended["exit_code"], ended["digest"]) == (0, quiet.digest), ended["because"]
        assert ledger.compare(fleet.steps(job), quiet.steps) is None
