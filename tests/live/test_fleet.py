"""Three nodes, two replicas, several jobs: real daemons, real kills, and the bits of the quiet run."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.checkpoints.storage import storage_at
from elastic.errors import ExitCode
from elastic.protocol.membership.partitions import end
from elastic.records import ledger
from elastic.records.resume import own
from tests.live.conftest import Quiet
from tests.live.fleet import Fleet, lives, pids
from tests.live.jobs import SCRIPTS, TRAINER

FOLLOWED = SCRIPTS / "followed.py"

NEVER_SILENT = {
    "evict_s": 300.0,
    **dict.fromkeys(("control_silence_s", "progress_s", "fence_grace_s", "orphan_margin_s"), 301.0),
}
"""Who is given up in such a job was not given up for silence."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("fleet")) as made:
        for name in ("a", "b", "c"):
            made.node(name, "--label", f"name={name}")
        made.await_nodes("a", "b", "c")
        yield made


def test_a_job_goes_on_without_a_node_and_without_the_leader_and_ends_with_the_quiet_bits(
    fleet: Fleet, quiet: Quiet
) -> None:
    fleet.pace(0.05)
    notice = fleet.home / "notice"
    job = fleet.train("train", timing=NEVER_SILENT)
    before = fleet.await_members(job, "a.0.0", "b.0.0", "c.0.0")

    with fleet.agreeing(job) as compared:
        fleet.end("c")
        after = fleet.await_members(job, "a.0.0", "b.0.0")
        assert [lost["because"] for lost in fleet.events("member_lost", worker_id="c.0.0")] == [end("c")]
        fleet.until("both commands", lambda: compared.get(after["generation"]))
        assert pids(after).items() < pids(before).items()

        leader = fleet.leader_of(job)
        fleet.end(leader)
        term = after["term"]
        led = fleet.until("another leader", lambda: s if (s := fleet.status(job)).get("term", 0) > term else None)
        led = fleet.until("its members", lambda: s if all(pids(s := fleet.status(job)).values()) else None)
        assert (led["generation"], pids(led)) == (after["generation"], pids(after))
        fleet.replica(leader)

        fleet.node("c", "--notices", f"file:{notice}")
        grown = fleet.await_slots(job, "a.0", "b.0", "c.0")
        fleet.until("both commands", lambda: compared.get(grown["generation"]))
        drained = fleet.run("drain", "--node", "b")
        assert (drained.returncode, drained.stderr) == (0, "")
        small = fleet.await_slots(job, "a.0", "c.0")
        fleet.until("both commands", lambda: compared.get(small["generation"]))
        assert pids(small).items() < pids(grown).items()

        temporary = notice.with_suffix(".tmp")
        temporary.write_text("60")
        temporary.rename(notice)
        last = fleet.await_slots(job, "a.0")
        fleet.until("both commands", lambda: compared.get(last["generation"]))
        assert pids(last).items() < pids(small).items()
    assert {line["worker_id"] for line in fleet.events("member_lost", job=job)}.isdisjoint(pids(grown)), "none was lost"

    fleet.finish(job, quiet.digest, quiet.steps)
    assert fleet.run("drain", "--node", "b", "--cancel").returncode == 0
    assert fleet.living() == [], "processes of a job that is over"


@pytest.mark.long
def test_what_follows_a_training_takes_its_time_and_the_next_job_does_not_wait_for_it(fleet: Fleet) -> None:
    begin, after = fleet.gates / "begin", fleet.gates / "after"
    begin.touch()
    after.touch()
    jobs = [fleet.train(name, script=FOLLOWED, workers=1, labels=["name=a"]) for name in ("one", "two")]
    fleet.until("the first to begin", (fleet.gates / "begin.a.0.0").exists)
    waits = "needs 1 free slot at once, and 0 of the 1 on 1 node with name=a are free"
    assert fleet.entry(jobs[1])["because"] == waits
    begin.unlink()
    children = []
    for job in jobs:
        ended, path = fleet.await_end(job), fleet.home / "a" / job / "result.json"
        fleet.until("its result on the node", path.exists)
        result = json.loads(path.read_bytes())
        assert (ended["exit_code"], result["exit_code"]) == (0, 0), ended["because"]
        assert ended["digest"] == result["digest"] != ""
        fleet.until("what follows", (fleet.gates / f"child.{job}").exists)
        children.append(int((fleet.gates / f"child.{job}").read_text()))
    workers = [line["pid"] for job in jobs for line in fleet.events("worker_started", job=job)]
    assert len(workers) == 2 and all(map(lives, [*workers, *children])), "none of them was hurried"
    after.unlink()
    assert fleet.living() == []
    fleet.until("their children to end with them", lambda: not any(map(lives, children)))


@pytest.mark.long
def test_a_job_on_one_node_trains_with_exactly_as_many_as_are_asked_for(quiet: Quiet, tmp_path: Path) -> None:
    """It keeps the slots there; who is too many waits in one, and takes its place again."""
    with Fleet(tmp_path, replicas=1) as fleet:
        fleet.node("d", "--slots", "3")
        fleet.await_nodes("d")
        fleet.pace(0.2)
        job = fleet.train("exactly")
        before = fleet.await_members(job, "d.0.0", "d.1.0", "d.2.0")
        assert fleet.run("scale", job, "2").returncode == 0
        small = fleet.await_members(job, "d.0.0", "d.1.0")
        assert pids(small).items() < pids(before).items()
        fleet.until("the third to wait", lambda: fleet.status(job).get("spares") == ["d.2.1"])
        assert not fleet.events("member_lost", job=job), "nothing was interrupted"
        assert fleet.run("scale", job, "3").returncode == 0
        fleet.pace(0.05)
        fleet.until("three members", lambda: len(fleet.status(job)["members"]) == 3)
        fleet.finish(job, quiet.digest, quiet.steps)


@pytest.mark.long
def test_a_job_that_is_made_smaller_and_larger_while_it_trains_ends_with_the_quiet_bits(
    fleet: Fleet, quiet: Quiet
) -> None:
    fleet.pace(0.05)
    job = fleet.train("resized")
    before = fleet.await_members(job, "a.0.0", "b.0.0", "c.0.0")
    assert fleet.run("scale", job, "2").returncode == 0
    small = fleet.until("two members", lambda: s if len((s := fleet.status(job))["members"]) == 2 else None)
    assert pids(small).items() < pids(before).items()
    assert fleet.run("scale", "resized", "3").returncode == 0
    large = fleet.until("three members", lambda: s if len((s := fleet.status(job))["members"]) == 3 else None)
    assert pids(small).items() < pids(large).items()
    assert fleet.run("scale", job, "4").returncode == ExitCode.BAD_INPUT
    generation = large["generation"]
    told = fleet.run("story", str(generation), "--job", job)
    assert f"generation {generation} (planned) is durable" in told.stdout, told.stderr
    seen = fleet.run("top", "--looks", "2", "--every", "0.5", "--json")
    assert [one["job"] for one in json.loads(seen.stdout.splitlines()[-1])["jobs"]][:1] == [job], seen.stderr
    found = json.loads(fleet.run("doctor", "--json").stdout)["findings"]
    assert {finding["where"] for finding in found if finding["about"] == "node"} == {"a", "b", "c"}
    fleet.finish(job, quiet.digest, quiet.steps)
    lost = {line["worker_id"] for line in fleet.events("member_lost", job=job)}
    assert lost.isdisjoint({*pids(before), *pids(large)}), "only one whose epoch ended before it was in gives way"


@pytest.mark.long
def test_jobs_wait_in_order_share_the_fleet_and_go_on_where_they_were_stopped(fleet: Fleet, quiet: Quiet) -> None:
    fleet.pace(0.05)
    first = fleet.train("first", workers=1, labels=["name=a"])
    fleet.await_members(first, "a.0.0")
    large = fleet.train("large", workers=3, min_workers=3)
    fleet.until("the fleet to look", lambda: fleet.entry(large)["because"].startswith("needs"))
    assert fleet.status(large)["because"] == "needs 3 free slots at once, and 2 of the 3 on 3 nodes are free"

    stopped = fleet.run("stop", "large")
    assert "stopped before it began: asked for by `elastic stop`" in stopped.stdout, stopped.stderr
    assert fleet.entry(large)["exit_code"] == ExitCode.TERMINATED
    small = fleet.train("small", workers=1)
    fleet.await_members(small, "b.0.0")
    assert fleet.status(first)["state"] == "running", "both run side by side"

    assert fleet.run("stop", first).returncode == 0
    assert fleet.entry(first)["exit_code"] == ExitCode.DRAINED, fleet.entry(first)["because"]
    again = fleet.train("first", "--resume", first, workers=2)
    fleet.await_members(again, "a.0.0", "c.0.0")
    fleet.pace(0.0)
    for job in (again, small):
        ended = fleet.await_end(job)
        assert (ended["exit_code"], ended["digest"]) == (0, quiet.digest), ended["because"]
    assert ledger.compare(fleet.steps(first, again), quiet.steps) is None, "no step is missing, and none is another one"
    both = {line["step"] for line in fleet.steps(first)} & {line["step"] for line in fleet.steps(again)}
    assert both == set(), "no step was done again"
    logs = fleet.run("logs", "--job", again, "a.0.0")
    assert f"digest {quiet.digest}" in logs.stdout, logs.stderr
    assert f"{large}" in fleet.run("jobs").stdout


@pytest.mark.long
def test_an_agent_that_is_asked_to_end_leaves_its_jobs_first(fleet: Fleet, quiet: Quiet) -> None:
    fleet.pace(0.05)
    job = fleet.train("leaving", workers=3)
    before = fleet.await_members(job, "a.0.0", "b.0.0", "c.0.0")
    assert fleet.end("b", signal.SIGTERM) == 128 + signal.SIGTERM
    after = fleet.await_members(job, "a.0.0", "c.0.0")
    assert pids(after).items() < pids(before).items()
    assert not fleet.events("member_lost", worker_id="b.0.0", job=job)
    fleet.pace(0.0)
    ended = fleet.await_end(job)
    assert (ended["exit_code"], ended["digest"]) == (0, quiet.digest), ended["because"]


def test_a_job_that_cannot_be_started_says_so_and_can_be_stopped(fleet: Fleet, tmp_path: Path) -> None:
    job = fleet.train("nowhere", workers=1, directory=str(tmp_path / "absent"))
    trouble = fleet.until("the trouble", lambda: fleet.entry(job)["troubles"])
    assert "cannot be started here" in trouble[0]["because"] and "absent" in trouble[0]["because"]
    assert fleet.run("stop", job).returncode == 0
    assert fleet.entry(job)["exit_code"] == ExitCode.TERMINATED


@pytest.mark.long
def test_a_node_that_cannot_start_a_worker_ends_no_job_that_trains(
    quiet: Quiet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "trainer"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(program.parent), os.environ["PATH"]]))
    with Fleet(tmp_path, replicas=1) as fleet:
        (fleet.gates / "end").touch()
        fleet.pace(0.05)
        fleet.node("a")
        fleet.await_nodes("a")
        job = fleet.submit(
            name="train",
            command=["trainer", str(TRAINER)],
            workers=2,
            min_workers=1,
            checkpoint_dir=str(tmp_path / "checkpoints"),
            env={"LIVE_GATES": str(fleet.gates), "OMP_NUM_THREADS": "1"},
            timing={"join_window_s": 1.0},
        )
        fleet.await_slots(job, "a.0")
        program.unlink()  # the next node does not have it
        fleet.node("b")
        fleet.until("it is given up", lambda: fleet.events("slot_given_up", slot="b.0"))
        fleet.await_more_steps(job, 3)
        said = fleet.run("status", job).stdout.splitlines()[-1]
        assert said.startswith("trouble: slot b.0 gets no worker any more: the worker cannot be started: "), said
        assert "trainer" in said
        fleet.finish(job, quiet.digest, quiet.steps)


@pytest.mark.long
def test_a_job_waits_for_a_checkpoint_directory_that_cannot_be_used_and_ends_at_one_that_is_anothers(
    fleet: Fleet, quiet: Quiet, tmp_path: Path
) -> None:
    fleet.pace(0.0)
    for who in ("nobodys", "anothers"):
        directory = tmp_path / who
        directory.touch()
        job = fleet.train(who, workers=2, checkpoint_dir=str(directory))
        trouble = fleet.until("the trouble", lambda job=job: fleet.entry(job)["troubles"])  # type: ignore[misc]
        assert f"{directory}/{job} cannot be used: Not a directory" in trouble[0]["because"]
        directory.unlink()
        if who == "anothers":
            own(storage_at(f"{directory}/{job}"), "other-1", "beef")
            ended = fleet.await_end(job)
            assert ended["exit_code"] == ExitCode.BAD_INPUT
            assert f"{directory}/{job} holds the checkpoints of another job, other-1 (beef); give" in ended["because"]
        else:
            fleet.finish(job, quiet.digest, quiet.steps)
