"""Jobs as another user: what the daemon does in their directories it does with their rights."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.errors import ConfigError
from elastic.records import job_files
from elastic.rendezvous.reach import Reach
from elastic.security import job_user, roles
from elastic.security.certificate_authority import Authority, create
from elastic.security.job_user import JobUser, acting
from elastic.security.keyring import of_role
from elastic.security.roles import Identity, Role

NAME = "nobody"

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root starts jobs as others")


@pytest.fixture
def home() -> Iterator[Path]:
    """Where every user may look."""
    made = Path(tempfile.mkdtemp(prefix="job-user-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def user() -> JobUser:
    return job_user.find(NAME)


def test_whoever_is_not_root_or_names_nobody_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for name, because in (("nobody-at-all", "no such user"), ("root", "the user of this agent")):
        with pytest.raises(ConfigError, match=because):
            job_user.find(name)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="an agent that runs as root"):
        job_user.find(NAME)


@root_only
def test_a_link_that_a_job_has_left_leads_the_daemon_nowhere(home: Path, user: JobUser) -> None:
    secret, logs = home / "agent.pem", home / "jobs" / "train-1" / "logs"
    secret.write_text("key")
    secret.chmod(0o600)
    logs.mkdir(parents=True)
    for path in (logs, logs.parent):
        user.give(path)
    (logs / "a.0.0.log").symlink_to(secret)
    groups, entered, others = os.getgroups(), threading.Event(), list[str]()
    other = threading.Thread(target=lambda: others.append(secret.read_text() if entered.wait(30.0) else ""))
    other.start()
    with acting(user):
        with pytest.raises(PermissionError):
            job_files.read(home / "jobs", "train-1", "a.0.0", 0)
        with pytest.raises(PermissionError):
            (logs / "a.0.0.log").open("ab")
        (logs / "own").write_text("")
        entered.set()
        other.join()
        assert others == ["key"], "only this thread is somebody else"
    assert (logs / "own").stat().st_uid == user.uid and (logs / "own").stat().st_gid == user.gid
    assert secret.read_text() == "key" and os.getgroups() == groups
    with pytest.raises(ZeroDivisionError), acting(user):
        raise ZeroDivisionError
    assert secret.read_text() == "key"
    with acting(None):
        assert secret.read_text() == "key"


@root_only
def test_a_directory_that_the_job_could_write_to_is_not_used_and_one_that_it_cannot_enter_neither(
    home: Path, user: JobUser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/sh")  # that of the tests may be out of reach
    monkeypatch.setattr(job_user, "__file__", "/bin/sh")
    job_user.check(user, home)
    home.chmod(0o700)
    with pytest.raises(ConfigError, match="cannot enter"):
        job_user.check(user, home)
    home.chmod(0o777)
    with pytest.raises(ConfigError, match="can be written by others"):
        job_user.check(user, home)
    home.chmod(0o755)
    user.give(home)
    with pytest.raises(ConfigError, match="can be written by others"):
        job_user.check(user, home)


def test_an_agent_without_the_nodes_own_certificate_shows_that_of_its_workers(tmp_path: Path) -> None:
    create(tmp_path / "ca")
    Authority(tmp_path / "ca").issue("a", [Role.AGENT], tmp_path / "a")
    assert of_role(tmp_path / "a", Role.AGENT, Role.WORKER).current().identity == Identity(Role.AGENT, "a")
    (tmp_path / "a" / "agent.pem").unlink()
    assert of_role(tmp_path / "a", Role.AGENT, Role.WORKER).current().identity == Identity(Role.WORKER, "a")
    Reach(certs=tmp_path / "a").channels()
    worker = Identity(Role.WORKER, "a")
    assert not roles.objection_to_call(worker, "/elastic.wire.Rendezvous/Attend")
    for method in ("Fleet/Attend", "Fleet/Ask", "Rendezvous/Drain", "Rendezvous/Status"):
        assert roles.objection_to_call(worker, f"/elastic.wire.{method}"), "it is no daemon, and no operator"
