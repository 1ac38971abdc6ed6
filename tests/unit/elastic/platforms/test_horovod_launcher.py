"""The processes that are hosts of a job of elastic horovodrun; a script takes the place of each."""

from __future__ import annotations

import errno
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.errors import ConfigError, ElasticError
from elastic.platforms.common.job_driver import NodeTask
from elastic.platforms.common.node_task import TaskOutcome, Ticket
from elastic.platforms.horovod import launcher
from elastic.platforms.horovod.launcher import HostTasks
from elastic.process import children

LARGE = 200_000
"""Bytes: a pipe holds 64 KiB."""

RETURNS = """
import base64, json, sys
value = base64.b64encode(json.loads(sys.stdin.buffer.readline())["node"].encode() * {times}).decode()
print(json.dumps({{"over": True, "values": {{"0": value}}, "last": {{}}}}))
"""


class Job:
    """A job whose hosts are this script. ended: what was told of each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, script: str, **launch: Any) -> None:
        self.job, self.function = "job-1", b""
        self.fleet = SimpleNamespace(ticket=self._ticket, check=lambda: None)
        self.outcomes: list[TaskOutcome | Exception] = []
        monkeypatch.setattr(launcher, "command_of", lambda host, ssh: [sys.executable, "-c", script])
        wanted = {"request": SimpleNamespace(world=(1, 9)), "cooldown_s": None, "reset_limit": None, "ssh": ("ssh",)}
        driver: Any = self
        told: Any = SimpleNamespace(**{**wanted, **launch})
        self.hosts = HostTasks(driver, told)

    def _ticket(self, job: str, node: str, slots: int, grace_s: float, function: bytes) -> Ticket:
        return Ticket("h:1", job, node, slots, grace_s, {}, function)

    def ended(self, task: NodeTask, outcome: TaskOutcome | Exception) -> None:
        self.outcomes.append(outcome)


def test_a_large_value_of_a_function_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, RETURNS.format(times=LARGE))
    job.hosts.step({"a": 1})
    job.hosts.finish()
    (outcome,) = job.outcomes
    assert isinstance(outcome, TaskOutcome) and outcome.values == {0: b"host-0-1" * LARGE}


def test_a_host_that_does_not_read_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "reads")
    order = os.open(tmp_path / "reads", os.O_RDWR)
    reads = f"import signal\nsignal.alarm(60)\nopen({str(tmp_path / 'reads')!r}).readline()\n"
    job = Job(monkeypatch, reads + RETURNS.format(times=1))
    job.function = bytes(LARGE)
    job.hosts.step({"a": 1})
    os.write(order, b"\n")
    job.hosts.finish()
    os.close(order)
    (outcome,) = job.outcomes
    assert isinstance(outcome, TaskOutcome) and outcome.values == {0: b"host-0-1"}


FAILS = "import sys; sys.stdin.buffer.readline(); sys.exit(1)"


def test_a_job_whose_launcher_ends_is_stopped_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "stops")
    order = os.open(tmp_path / "stops", os.O_RDWR)
    job = Job(monkeypatch, f"open({str(tmp_path / 'stops')!r}).readline()")
    job.fleet.client = SimpleNamespace(stop=lambda name, because: os.write(order, f"{name}\n".encode()))
    job.hosts.step({"a": 1})
    (host,) = job.hosts._all()
    job.hosts.cancel()
    os.close(order)
    assert host.process is not None and host.process.returncode == 0, "it was not killed"


def test_no_failure_counts_when_the_job_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, FAILS, reset_limit=0)
    job.hosts.step({"a": 1})
    job.hosts.finish()
    assert [str(outcome) for outcome in job.outcomes] == ["its process has ended with 1"]
    again = Job(monkeypatch, FAILS, reset_limit=0)
    again.hosts.step({"a": 1})
    for host in again.hosts._all():
        assert host.process is not None and host.process.wait(60) == 1
    with pytest.raises(ElasticError, match="--reset-limit 0"):
        again.hosts.step({"a": 1})


def test_a_shell_of_the_host_may_print_behind_the_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, RETURNS.format(times=1) + "print('[1, 2]')\nprint('goodbye')")
    job.hosts.step({"a": 1})
    job.hosts.finish()
    (outcome,) = job.outcomes
    assert isinstance(outcome, TaskOutcome) and outcome.values == {0: b"host-0-1"}
    silent = Job(monkeypatch, "import sys; sys.stdin.buffer.readline(); print('goodbye')")
    silent.hosts.step({"a": 1})
    silent.hosts.finish()
    assert [str(outcome) for outcome in silent.outcomes] == [
        "its process has ended without an outcome; the last that it printed: goodbye"
    ]


def test_a_host_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, RETURNS.format(times=1))
    starts = children.start
    full = OSError(errno.EAGAIN, "Resource temporarily unavailable")

    def refuses(*_: Any, **__: Any) -> Any:
        raise full

    monkeypatch.setattr(children, "start", refuses)
    job.hosts.step({"a": 1})
    assert [str(outcome) for outcome in job.outcomes] == [f"a cannot be started from here: {full}"]
    assert not job.hosts._all()
    monkeypatch.setattr(children, "start", starts)
    job.hosts.step({"a": 1})
    job.hosts.finish()
    outcome = job.outcomes[-1]
    assert isinstance(outcome, TaskOutcome) and outcome.values == {0: b"host-0-2"}


def test_the_hosts_are_told_an_address_that_they_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"own": "127.0.1.1", "alias": "127.0.0.1", "gpu-2": "10.0.0.5", launcher.ANYWHERE: "10.0.0.1"}

    def towards(host: str) -> str:
        if host in ways:
            return ways[host]
        raise OSError("no route")

    monkeypatch.setattr(launcher, "_address_towards", towards)
    monkeypatch.setattr(socket, "gethostname", lambda: "own")
    monkeypatch.setattr(socket, "getfqdn", lambda: "own.example.com")
    here = {"own": 2, "own.example.com": 1, "localhost": 1}
    assert launcher.address(here) == "127.0.0.1", "nobody else asks"
    assert launcher.address({**here, "gpu-2": 2}) == "10.0.0.5", "the names of this machine come first"
    assert launcher.address({**here, "alias": 2}) == "10.0.0.1"
    assert launcher.address({}, discovers=True) == launcher.address(here, discovers=True) == "10.0.0.1"
    del ways[launcher.ANYWHERE]
    assert launcher.address(here, discovers=True) == "127.0.0.1", "there is no network"
    ways["own"] = "10.0.0.7"
    assert launcher.address(here, discovers=True) == "10.0.0.7", "a network without a way out of it"
    with pytest.raises(ConfigError, match="gpu-3 cannot be reached from here: no route"):
        launcher.address({"gpu-3": 1})
