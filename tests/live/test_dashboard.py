"""The dashboard beside a real job, and that of a real fleet behind certificates."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from chaos_tests.support.processes import Command
from elastic.security import certificate_authority
from elastic.security.roles import Role
from tests.live.dashboard_page import Following, PageClient, address_in
from tests.live.fleet import Fleet
from tests.live.jobs import DEADLINE_S, ROOT, TRAINER, Job

pytestmark = pytest.mark.long


def cli(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "elastic.cli", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def test_a_kill_by_the_page_is_survived_and_told_and_the_page_sees_the_end(tmp_path: Path) -> None:
    with Job(tmp_path, "--workers", "2", "--dashboard", str(TRAINER)) as job:
        job.shut("end")
        page = PageClient(job.until("its address", lambda: address_in(job.output)))
        assert page.session["mode"] == "job" and page.session["job"] == job.dir.name
        first, second = job.await_world(2)
        document = job.until("steps on the page", lambda: d if (d := page.job())["steps"]["at"] else None)
        after = f"{document['boot']}-{document['number']}"
        with Following(page, after) as one, Following(page, after) as other:
            assert page.post(f"{page.path()}/actions", action="kill", worker="local.9.0")[0] == 409
            status, stacks = page.post(f"{page.path()}/actions", action="stacks", worker=first)
            assert status == 200 and "most recent call first" in stacks["said"]
            status, said = page.post(f"{page.path()}/actions", action="kill", worker=second)
            assert (status, said) == (200, {"said": f"the agent of {second} kills it"})
            job.until("the loss", one.has("member_lost", second))
            job.until("the newcomer", one.has("joined"))
            job.until("the recovery", lambda: one.of("recovery"))
            assert one.of("recovery")[0]["lost"] == [second]
            third = next(worker for event, worker in one.moments() if event == "joined")
            told = cli("stacks", third, "--job-dir", str(job.dir), "--json")
            assert "most recent call first" in json.loads(told.stdout)["stacks"], told.stderr
            killed = cli("kill", third, "--job-dir", str(job.dir))
            assert killed.returncode == 0, killed.stderr
            job.until("the second loss", one.has("member_lost", third))
            job.await_world(2)
            wrong = cli("kill", third, "--job-dir", str(job.dir))
            assert wrong.returncode == 2 and first in wrong.stderr

            def sizes() -> list[int]:
                return [entry["members"] for entry in page.job()["generations"]]

            # The page is a look behind the leader whom await_world has asked. A newcomer that has not copied the state
            # when an epoch ends is planned out again, which is one more generation without it.
            job.until("both losses and joins on the page", lambda: sizes().count(1) >= 2 and sizes()[-1] == 2)
            assert sizes()[0] == 2
            document = page.job()
            assert document["summary"]["time"]["goodput"] > 0
            log = page.get(f"{page.path()}/workers/{second}/log")
            assert log["size"] == (job.dir / "logs" / f"{second}.log").stat().st_size
            job.open("end")
            assert job.wait() == 0
            for following in (one, other):
                following.wait()
                assert following.events[-1][1] == "end"
                state = following.of("state")[-1]
                assert state["status"]["state"] == "closed" and state["status"]["digest"] == job.result["digest"]
            assert one.moments() == other.moments()
            numbers = [int(at.split("-")[1]) for at, _, _ in one.events if at]
            begin = int(after.split("-")[1]) + 1
            assert numbers == list(range(begin, begin + len(numbers)))
        assert job.left_behind() == {}


def test_the_death_of_the_dashboard_ends_nothing_and_one_that_comes_later_knows_the_same(tmp_path: Path) -> None:
    alike = tmp_path / "uvicorn.py"  # a file of the user, in the directory where the command is given
    alike.write_text("raise RuntimeError('not the package')")
    with Job(tmp_path, "--workers", "2", "--dashboard", str(TRAINER)) as job:
        job.shut("end")
        assert job.until("its address, or why not", lambda: re.search("dashboard .*", job.output))
        assert address_in(job.output), job.output
        alike.unlink()
        _, second = job.await_world(2)
        os.kill(job.pid_of("elastic.observability.dashboard"), signal.SIGKILL)
        job.send(second)
        job.await_event("joined")
        job.open("end")
        assert job.wait() == 0
        assert job.left_behind() == {}
    environment = {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "elastic.cli", "dashboard", "--job-dir", str(job.dir), "--listen", "0"]
    with Command(words, tmp_path / "later.out", environment=environment, cwd=tmp_path) as command:
        page = PageClient(job_until(command))
        document = page.job()
        while document.get("status", {}).get("state") != "closed" or not document["recoveries"]:
            document = page.job()
        assert document["recoveries"][0]["lost"] == [second] and len(document["steps"]["at"]) == len(job.steps())
        assert page.post(f"{page.path()}/actions", action="stop")[0] == 409
        command.process.send_signal(signal.SIGINT)
        assert command.process.wait(DEADLINE_S) == 0


def test_training_goes_on_without_a_dashboard_that_hangs_or_fails_at_its_start(tmp_path: Path) -> None:
    for name, does, said in (
        ("hangs", "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); time.sleep(3600)", "did not listen within"),
        ("fails", "os._exit(3)", "has ended; see logs/dashboard.log"),
    ):
        site = tmp_path / name
        site.mkdir()
        words = "import os, signal, sys, time\nif 'elastic.observability.dashboard' in sys.orig_argv:\n    " + does
        (site / "sitecustomize.py").write_text(words)
        with Job(tmp_path, "--workers", "1", "--dashboard", str(TRAINER), name=f"job-{name}", site=site) as job:
            assert job.wait() == 0
            assert f"there is no dashboard: it {said}" in job.output and "Training goes on" in job.output
            assert job.left_behind() == {}


def job_until(command: Command) -> str:
    """The address that a dashboard of its own prints."""
    while (address := address_in(command.output)) is None:
        assert command.process.poll() is None, command.output
    return address


def test_the_page_of_a_fleet_acts_with_an_operators_certificate_only(tmp_path: Path) -> None:
    with Fleet(tmp_path, replicas=1, nodes=("a", "b"), certs=True) as fleet:
        name = fleet.train("small", workers=2, min_workers=1, max_workers=3)
        fleet.until("a world that trains", lambda: fleet.status(name)["state"] == "running")
        operator, viewer = fleet.home / "certs" / "ann", fleet.home / "certs" / "vic"
        certificate_authority.Authority(fleet.home / "certs" / "ca").issue("vic", [Role.VIEWER], viewer)
        pages = {}
        commands = []
        try:
            for certs in (operator, viewer):
                words = [sys.executable, "-m", "elastic.cli", "dashboard", "--listen", "0", "--certs", str(certs)]
                words += ["--rendezvous", ",".join(fleet.client.replicas)]
                commands.append(
                    Command(words, tmp_path / f"{certs.name}.out", environment={"PYTHONPATH": str(ROOT)}, cwd=tmp_path)
                )
                pages[certs] = PageClient(job_until(commands[-1]))
            act, see = pages[operator], pages[viewer]
            assert (act.session["may_act"], see.session["may_act"]) == (True, False)
            overview = fleet.until("the overview", lambda: o if (o := see.get("/api/fleet")).get("jobs") else None)
            assert [job["job"] for job in overview["jobs"]] == [name]
            document = fleet.until("its status", lambda: d if (d := see.job(name)).get("status") else None)
            assert document["actions"] == [] and document["status"]["state"] == "running"
            fleet.until("its steps", lambda: see.job(name)["steps"]["at"])
            worker = document["status"]["members"][0]["worker_id"]
            for asked in ({"action": "kill", "worker": worker}, {"action": "stop"}, {"action": "scale", "workers": 1}):
                assert see.post(f"{see.path(name)}/actions", **asked)[0] == 409
            assert see.post("/api/nodes/a/drain", over=False)[0] == 409
            status, stacks = act.post(f"{act.path(name)}/actions", action="stacks", worker=worker)
            assert status == 200 and "most recent call first" in stacks["said"]
            document = see.job(name)
            with Following(see, f"{document['boot']}-{document['number']}", name) as following:
                assert act.post(f"{act.path(name)}/actions", action="kill", worker=worker)[0] == 200
                fleet.until("the loss", following.has("member_lost", worker))
                fleet.until("who asked", following.has("worker_signal_asked", worker))
                fleet.until("the newcomer's generation", lambda: following.of("generation")[1:])
            asked_by = fleet.events("worker_signal_asked", worker_id=worker, kind="kill")
            assert asked_by and "operator ann" in asked_by[0]["caller"]
            assert act.post(f"{act.path(name)}/actions", action="scale", workers=1)[0] == 200
            fleet.until("a world of one", lambda: len(fleet.status(name)["members"]) == 1)
            assert act.post("/api/nodes/b/drain", over=False)[0] == 200
            fleet.until(
                "the drain", lambda: any(n["node"] == "b" and n["because"] for n in see.get("/api/fleet")["nodes"])
            )
            assert act.post("/api/nodes/nowhere/drain", over=False)[0] == 409
            assert act.post(f"{act.path(name)}/actions", action="stop")[0] == 200
            assert fleet.await_end(name)["job"] == name
            later = [*words[:-4], "--certs", str(viewer), *words[-2:]]
            commands.append(Command(later, tmp_path / "later.out", environment={"PYTHONPATH": str(ROOT)}, cwd=tmp_path))
            page = PageClient(job_until(commands[-1]))
            document = fleet.until("its steps", lambda: d if (d := page.job(name))["steps"]["at"] else None)
            document = fleet.until("its status", lambda: d if (d := page.job(name)).get("status") else None)
            assert document["status"]["state"] == "ended"
            assert {"worker_started", "member_lost"} <= {moment["event"] for moment in document["moments"]}
        finally:
            for command in commands:
                command.stop()
