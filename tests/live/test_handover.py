"""Another program takes an agent's place: same process, same workers, and the bits of the quiet run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from chaos_tests.support.processes import descendants, kill_if_there
from elastic.agent.handover import UpgradeRequest, UpgradeRequestFiles, of_this_program
from elastic.agent.process.worker_process import facts
from elastic.records import ledger
from tests.live.conftest import Quiet
from tests.live.fleet import Fleet
from tests.live.jobs import DEADLINE_S, ROOT, TRAINER, Job


@pytest.mark.long
def test_a_training_goes_on_over_a_new_program_of_its_agent(tmp_path: Path, quiet: Quiet) -> None:
    with Job(tmp_path, "--workers", "2", "--quiet", str(TRAINER)) as job:
        job.pace(0.02)
        job.shut("end")
        job.await_world(2)
        place = UpgradeRequestFiles(job.dir, "local")
        running, before = place.running(), job.events("worker_started")
        assert running is not None and len(before) == 2

        request = of_this_program()
        place.ask(running, request)
        answer = job.until("the new program", lambda: place.answer(request))
        assert not answer["refused"]
        assert place.running() == running, "the same process"
        steps = len(job.steps())
        job.until("steps", lambda: len(job.steps()) > steps + 3)
        assert job.events("worker_started") == before, "no worker was started again"
        assert not job.events("worker_exited") and not job.events("member_lost")

        job.send("local.1.0")
        job.await_event("worker_dying", worker_id="local.1.0")  # by its lifeline, which the new program took over
        job.await_event("worker_started", worker_id="local.1.1")
        job.await_world(2)
        job.pace(0.0)
        job.open("end")
        assert job.wait() == 0, job.story()
        assert job.result["digest"] == quiet.digest
        assert ledger.compare(job.steps(), quiet.steps) is None
        assert job.left_behind() == {}


def copy_of_the_project(home: Path, before: str, after: str) -> Path:
    """Another version of it: with that change in elastic/version.py."""
    home.mkdir()
    for name in ("runtime", "chaos_tests", "tests"):
        (home / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "elastic", home / "elastic", ignore=shutil.ignore_patterns("__pycache__"))
    start = home / "elastic" / "version.py"
    text = start.read_text()
    assert before in text
    start.write_text(text.replace(before, after))
    return home


def upgrade(fleet: Fleet, node: str, program: Path) -> subprocess.CompletedProcess[str]:
    """`elastic agent --upgrade` of that program."""
    words = ("agent", "--upgrade", "--jobs-dir", str(fleet.home / node), "--node", node, "--json")
    return subprocess.run(
        [sys.executable, "-P", "-m", "elastic.cli", *words],
        env={**os.environ, "PYTHONPATH": str(program)},
        cwd=fleet.home,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


@pytest.mark.long
def test_a_training_goes_on_over_an_upgrade_of_its_node(tmp_path: Path, quiet: Quiet) -> None:
    newer = copy_of_the_project(tmp_path / "newer", '__version__ = "', '__version__ = "9.')
    with Fleet(tmp_path, replicas=1, nodes=("a", "b")) as fleet:
        fleet.pace(0.03)
        job = fleet.train("train", workers=2)
        before = fleet.await_members(job, "a.0.0", "b.0.0")
        known = UpgradeRequestFiles(fleet.home / "a", "a").running()
        assert known is not None and known.pid == fleet.nodes["a"].pid

        done = upgrade(fleet, "a", newer)
        assert done.returncode == 0, done.stderr
        told = {"node": "a", "pid": known.pid, "from": known.version, "to": f"9.{known.version}", "jobs": [job]}
        assert json.loads(done.stdout) == told
        assert {line["version"] for line in fleet.events("agent_took_over")} == {told["to"]}
        assert {line["caller"] for line in fleet.events("handover")} == {f"user {os.geteuid()}"}
        applied = before["applied"] + 5
        after = fleet.until("steps", lambda: s if (s := fleet.status(job)).get("applied", 0) > applied else None)
        pids = [{member["worker_id"]: member["pid"] for member in status["members"]} for status in (before, after)]
        assert pids[0] == pids[1], "no worker was started again"
        assert not fleet.events("worker_exited") and not fleet.events("expelled")

        os.kill(pids[1]["a.0.0"], signal.SIGKILL)
        fleet.await_slots(job, "a.0", "b.0", gone="a.0.0")
        fleet.pace(0.0)
        ended = fleet.await_end(job)
        assert (ended["exit_code"], ended["digest"]) == (0, quiet.digest), ended["because"]
        assert ledger.compare(fleet.steps(job), quiet.steps) is None
        assert fleet.living() == []
        assert fleet.end("a", signal.SIGTERM) == 128 + signal.SIGTERM


@pytest.mark.long
def test_a_program_that_cannot_take_over_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    older = copy_of_the_project(tmp_path / "older", '__version__ = "', '__version__ = "0.')
    reader = older / "elastic" / "agent" / "upgrade_state.py"
    reader.write_text(reader.read_text().replace("FORMAT = 1", "FORMAT = 0"))
    with Fleet(tmp_path, replicas=1, nodes=("a",)) as fleet:
        fleet.pace(0.03)
        job = fleet.train("train", workers=1)
        before = fleet.await_members(job, "a.0.0")
        refused = upgrade(fleet, "a", older)
        assert refused.returncode == 2
        said = " ".join(refused.stderr.split())
        assert f"{job}: the new program does not start, or cannot read" in said
        assert "the agent's state is of format 1, and this program reads 0" in said
        place, absent = (
            UpgradeRequestFiles(fleet.home / "a", "a"),
            UpgradeRequest(str(tmp_path / "absent" / "python"), "", "token"),
        )
        running = place.running()
        assert running is not None
        place.ask(running, absent)
        answer = fleet.until("the answer", lambda: place.answer(absent))
        assert "the new program does not start" in answer["refused"] and "No such file" in answer["refused"]
        steps = fleet.status(job)["applied"]
        after = fleet.until("steps", lambda: s if (s := fleet.status(job)).get("applied", 0) > steps + 3 else None)
        assert [member["pid"] for member in before["members"]] == [member["pid"] for member in after["members"]]
        assert fleet.end("a", signal.SIGTERM) == 128 + signal.SIGTERM


@pytest.mark.long
def test_the_agent_that_stands_by_is_of_the_newest_program_and_takes_over_when_an_agent_is_killed(
    tmp_path: Path, quiet: Quiet
) -> None:
    newer = copy_of_the_project(tmp_path / "newer", '__version__ = "', '__version__ = "9.')
    with Fleet(tmp_path, replicas=1, nodes=("a", "b")) as fleet:
        fleet.pace(0.5)
        job = fleet.train("train", workers=2)
        fleet.await_members(job, "a.0.0", "b.0.0")

        def standby(number: int) -> int:
            """The pid of the one that was started as that on node a; 0: it was not yet."""
            told = fleet.events("standby_started", node="a")
            return int(told[number]["pid"]) if len(told) > number else 0

        old = fleet.until("a standby", lambda: standby(0))
        assert upgrade(fleet, "a", newer).returncode == 0
        assert facts(old) is None, "that of the program before has gone"
        new = fleet.until("a standby of the new program", lambda: standby(1))
        assert fleet.events("standby_started", node="a")[1]["job"] == job

        agent = fleet.events("job_agent_started", node="a")[-1]["pid"]
        for pid in (agent, *descendants(agent)):
            kill_if_there(pid)
        fleet.await_slots(job, "a.0", "b.0", gone="a.0.0")
        assert [line["pid"] for line in fleet.events("standby_begins", node="a")] == [new]
        fleet.finish(job, quiet.digest, quiet.steps)
        assert fleet.living() == []
