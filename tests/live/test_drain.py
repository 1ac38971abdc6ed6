"""A node that has to go leaves between two steps: nothing is computed twice, nobody is lost, no bit changes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from elastic import cli
from elastic.checkpoints.series import Series
from elastic.checkpoints.storage import storage_at
from elastic.config import Timing
from elastic.errors import ExitCode
from elastic.store.embedded import EmbeddedEtcd
from tests.live.conftest import Quiet
from tests.live.jobs import DEADLINE_S, SCRIPTS, run_alone
from tests.live.spread import Spread, losses

pytestmark = pytest.mark.long


Make = Callable[..., Spread]


@pytest.fixture
def spread(tmp_path: Path, etcd: EmbeddedEtcd, request: pytest.FixtureRequest) -> Iterator[Make]:
    """A job over the nodes a and b, one worker each, that have applied a few steps and now take their time."""
    with ExitStack() as stack:

        def make(**spec: Any) -> Spread:
            name = f"job-{abs(hash(request.node.nodeid)) % 10**9}"
            job = stack.enter_context(Spread(tmp_path, etcd, name, **spec))
            job.pace(0.03)
            job.rendezvous()
            return job

        yield make


def both(job: Spread) -> None:
    """Its nodes come."""
    job.agent("a")
    job.agent("b")
    job.await_members("a.0.0", "b.0.0")


def assert_as_quiet(job: Spread, quiet: Quiet, lost: bool = False) -> None:
    """It ends quickly from here on. lost: whether a member was."""
    job.pace(0.0)
    result = job.await_result()
    assert (result["exit_code"], result["digest"]) == (0, quiet.digest)
    job.until("all steps on file", lambda: len(job.steps()) >= len(quiet.steps))
    assert [(line["step"], line["scalars"]) for line in job.steps()] == [
        (line["step"], line["scalars"]) for line in quiet.steps
    ]
    assert bool(losses(job)) == lost


def test_who_drains_does_not_wait_for_a_newcomer_that_still_copies(spread: Make, tmp_path: Path) -> None:
    job = spread(command=(sys.executable, str(SCRIPTS / "heavy.py")), max_workers=3)
    for gate in ("on", "load 1", "load 2"):
        (job.gates / gate).touch()
    both(job)
    job.agent("c")
    job.until("c copies", (job.gates / "load 1.c.0.0").exists)
    job.give_notice("b", 60.0)
    job.await_members("a.0.0")
    job.await_event("worker_exited", worker_id="b.0.0", because="exited with 0")
    assert job.events("joined") == []
    job.open("load 1")
    job.open("load 2")
    job.await_members("a.0.0", "c.0.0")
    job.open("on")
    digest = job.await_result()["digest"]
    assert run_alone(tmp_path, SCRIPTS / "heavy.py", str(len(job.steps()))).split()[-1] == digest
    assert losses(job) == []


def test_a_node_with_a_notice_leaves_and_returns_and_nothing_is_computed_twice(spread: Make, quiet: Quiet) -> None:
    job = spread()
    both(job)
    job.give_notice("a", 60.0)
    job.await_members("b.0.0")
    job.await_event("worker_exited", worker_id="a.0.0", because="exited with 0")
    job.await_event("node_empty", node="a")
    assert job.await_event("node_leaves", node="a")["because"] == f"{job.notice('a')} says so"
    assert len(job.events("worker_started", node="a")) == 1
    job.notice("a").unlink()
    job.await_members("b.0.0", "a.0.1")
    assert_as_quiet(job, quiet)


def test_an_operator_drains_a_node_and_takes_it_back(
    spread: Make, quiet: Quiet, capsys: pytest.CaptureFixture[str]
) -> None:
    job = spread()
    both(job)
    words = ["drain", "--job-dir", str(job.dir)]
    assert cli.main(words) == ExitCode.BAD_INPUT
    assert "name the node with --node; there are a, b" in " ".join(capsys.readouterr().err.split())
    assert cli.main([*words, "--node", "c"]) == ExitCode.BAD_INPUT
    assert "no agent of a node 'c'" in " ".join(capsys.readouterr().err.split())
    assert cli.main([*words, "--node", "b", "--budget", "90"]) == ExitCode.DONE
    assert capsys.readouterr().out == "node b is empty; the job goes on with 1 worker, on a\n"
    assert job.members() == ["a.0.0"]
    assert cli.main([*words, "--node", "b", "--cancel"]) == ExitCode.DONE
    job.await_members("a.0.0", "b.0.1")
    asked = job.events("drain_asked", node="b")
    assert [line["over"] for line in asked] == [False, True], "each by whom, and from where"
    known = {(line["caller"], line["peer"].rpartition(":")[0]) for line in asked}
    assert known == {("somebody without a certificate", "127.0.0.1")}
    assert_as_quiet(job, quiet)


def test_a_wish_to_leave_outlives_the_leader_that_heard_it(spread: Make, quiet: Quiet) -> None:
    job = spread()
    both(job)
    job.shut("shard", "a.0.0")
    leader = job.events("leading")[-1]["pid"]
    job.give_notice("b", 300.0)
    before = job.until("the leader to have heard it", lambda: s if (s := job.status()).get("draining") else None)
    os.kill(leader, signal.SIGKILL)
    job.rendezvous()
    job.until("another one", lambda: (s := job.status()).get("term", 0) > before["term"] and s.get("draining"))
    job.open("shard")
    job.await_members("a.0.0")
    assert_as_quiet(job, quiet)


def test_a_node_that_cannot_leave_in_time_is_lost_and_the_others_go_on(spread: Make, quiet: Quiet) -> None:
    job = spread()
    both(job)
    job.shut("shard", "a.0.0")
    job.give_notice("a", 2.0)
    job.await_event("node_late", node="a")
    job.await_event("worker_exited", worker_id="a.0.0", because="killed by SIGKILL")
    job.open("shard")
    job.await_members("b.0.0")
    assert_as_quiet(job, quiet, lost=True)
    assert job.events("member_lost", worker_id="a.0.0")
    assert len(job.events("worker_started", node="a")) == 1, "nobody starts on a node that has to go"


def test_an_agent_that_is_asked_to_stop_leaves_first(spread: Make, quiet: Quiet) -> None:
    job = spread()
    job.agent("a")
    stopped = job.agent("b", "--grace", "120")
    job.await_members("a.0.0", "b.0.0")
    stopped.send_signal(signal.SIGTERM)
    assert stopped.wait(DEADLINE_S) == ExitCode.TERMINATED
    job.await_members("a.0.0")
    assert_as_quiet(job, quiet)


def test_below_quorum_the_state_waits_in_memory_for_the_node_to_return(spread: Make, quiet: Quiet) -> None:
    job = spread(min_workers=2)
    both(job)
    job.give_notice("a", 60.0)
    paused = job.await_members("b.0.0", state="paused")
    assert "below quorum: 1 of at least 2 workers" in paused["because"]
    step = int(job.await_event("checkpoint_complete", worker_id="b.0.0")["step"])
    assert step >= paused["applied"], "what the job waits with is also on disk"
    job.notice("a").unlink()
    job.await_members("b.0.0", "a.0.1")
    assert_as_quiet(job, quiet)


def test_a_job_that_lost_its_quorum_gives_up_with_its_state_on_disk(spread: Make) -> None:
    job = spread(min_workers=2, timing=Timing(pause_limit_s=5.0))
    job.agent("a")
    lost = job.agent("b")
    job.await_members("a.0.0", "b.0.0")
    lost.kill()
    paused = job.await_members("a.0.0", state="paused")
    assert "below quorum: 1 of at least 2 workers" in paused["because"]
    result = job.await_result()
    assert result["exit_code"] == ExitCode.BELOW_QUORUM
    assert "nobody came for 5 s" in result["because"]
    found, _ = Series(storage_at(str(job.home / "checkpoints"))).newest()
    assert found is not None and found.name.step == len(job.steps()) > 0, "something would be done again"
