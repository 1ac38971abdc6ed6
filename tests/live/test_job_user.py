"""Nodes whose jobs run as another user: they train over TLS, and cannot become the daemon of their node."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos_tests.cluster.cluster import Cluster
from tests.live.jobs import DEADLINE_S, POLL_S, ROOT, SCRIPTS

NAME = "nobody"
PATH = os.pathsep.join([str(ROOT), sysconfig.get_paths()["purelib"]])


def interpreter() -> str:
    """One of this version that the other user can run; "" if there is none."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for python in (sys.executable, shutil.which(version, path="/usr/bin:/usr/local/bin")):
        asked = ["/usr/bin/env", str(python), "-c", "import elastic, torch"]  # it, and not we, may fail to start it
        if (
            python
            and not subprocess.run(
                asked,
                user=NAME,
                group=pwd.getpwnam(NAME).pw_gid,
                env={"PYTHONPATH": PATH},
                cwd="/",
                capture_output=True,
            ).returncode
        ):
            return python
    return ""


@pytest.fixture
def home() -> Iterator[Path]:
    """Where every user may look."""
    made = Path(tempfile.mkdtemp(prefix="job-user-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def story(fleet: Cluster) -> str:
    logs = [*fleet.home.glob("*.log"), *fleet.home.glob("*/*/logs/*.log")]
    return "\n".join(f"--- {log}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts jobs as others")
def test_a_job_of_another_user_trains_and_reads_neither_the_daemons_keys_nor_its_memory(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = interpreter()
    if not python:
        pytest.skip(f"{NAME} can run no python of this version that finds torch")
    user = pwd.getpwnam(NAME)
    (home / "checkpoints").mkdir()
    (home / "said").mkdir()
    for path in ("checkpoints", "said"):
        os.chown(home / path, user.pw_uid, user.pw_gid)
    with Cluster(home, replicas=1, environment={"PYTHONPATH": PATH}, certs=True) as fleet:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", python)
            for node in ("a", "b"):
                fleet.node(node, "--job-user", NAME)
        fleet.await_nodes("a", "b")
        said = home / "said" / "found.json"
        command = [Path(python).name, str(SCRIPTS / "pries.py"), str(said), str(home / "go on")]
        job = fleet.submit(
            name="pries", command=command, workers=2, directory="/", checkpoint_dir=str(home / "checkpoints")
        )
        deadline_s = time.monotonic() + DEADLINE_S
        while fleet.client.status(job).get("applied", 0) < 10:
            assert time.monotonic() < deadline_s, story(fleet)
            time.sleep(POLL_S)
        (home / "go on").touch()
        while (ended := fleet.client.job(job))["state"] != "ended":
            assert time.monotonic() < deadline_s, story(fleet)
            time.sleep(POLL_S)  # files and other processes: there is nothing to wait on
        assert ended["exit_code"] == 0, (ended["because"], story(fleet))
        found = json.loads(said.read_text())
        assert (found.pop("user"), found.pop("above")) == (user.pw_uid, 0)
        assert 0 not in found.pop("groups")
        assert found.pop("own certificates") == ["ca.pem", "worker.pem"]
        assert found and set(found.values()) == {"PermissionError"}, found
        assert (home / "a" / job).stat().st_uid == user.pw_uid
        assert [path for path in (home / "a" / job).rglob("*") if path.stat().st_uid == 0] == []
