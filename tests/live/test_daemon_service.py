"""Daemons as services: what a service manager hears of real processes, their logs, and a file of options read again."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from chaos_tests.support.processes import descendants
from elastic.process import log, notify
from tests.live.conftest import Quiet
from tests.live.fleet import Fleet
from tests.live.jobs import DEADLINE_S

FILE = """
slots = 1
label = ["zone=a"]
notices = "none"
log_format = "json"
"""


class Manager:
    """The socket of a service manager. It is read all the time: the kernel holds only ten messages, and a daemon does
    not wait for a manager that does not read. environment: for the process that it starts."""

    def __init__(self, bound: socket.socket, **more: str) -> None:
        bound.bind("")
        self._socket = bound
        self._heard: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.environment = {notify.SOCKET: "@" + bound.getsockname()[1:].decode(), **more}

    def read(self) -> None:
        """Until the socket is shut down."""
        while message := self._socket.recv(4096):
            self._heard.put(message)

    def hears(self, first: str) -> dict[str, str]:
        """The next message that begins with this, without those of the watchdog and of the status alone before it."""
        while True:
            lines = self._heard.get(timeout=DEADLINE_S).decode().splitlines()
            if lines[0] == first:
                return dict(line.split("=", 1) for line in lines)
            assert lines[0].startswith(("STATUS=", "WATCHDOG=")), lines


@contextmanager
def manager(**more: str) -> Iterator[Manager]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        made = Manager(bound, **more)
        reader = threading.Thread(target=made.read)
        reader.start()
        try:
            yield made
        finally:
            bound.shutdown(socket.SHUT_RDWR)
            reader.join()


def start_agent(fleet: Fleet, of: Manager, *words: str, text: str = FILE) -> tuple[subprocess.Popen[bytes], Path]:
    """The agent of node a, with a file of options."""
    path = fleet.home / "agent.toml"
    path.write_text(text)
    where = ("--rendezvous", ",".join(fleet.client.replicas), "--node", "a", "--jobs-dir", str(fleet.home / "a"))
    process = fleet.start("a", "agent", "--config", str(path), *where, *words, environment=of.environment)
    fleet.nodes["a"] = process
    return process, path


def log_of(fleet: Fleet, name: str) -> list[dict[str, Any]]:
    """Every line of a log in JSON; one that is none fails."""
    lines = [json.loads(line) for line in (fleet.home / f"{name}.log").read_text().splitlines()]
    assert all(line.keys() >= {"ts", "level", "logger", "msg"} for line in lines)
    return lines


def said(fleet: Fleet, msg: str) -> Callable[[], list[dict[str, Any]]]:
    return lambda: [line for line in log_of(fleet, "a") if line["msg"] == msg]


def offered(fleet: Fleet) -> int:
    """Slots of node a, as the fleet knows them; 0: it is away."""
    return next((node["slots"] for node in fleet.client.overview()["nodes"] if node["up"]), 0)


def test_a_service_manager_hears_of_daemons_and_the_log_has_what_they_do(tmp_path: Path) -> None:
    with Fleet(tmp_path, replicas=1) as fleet, manager(WATCHDOG_USEC="400000") as first, manager() as second:
        words = ("--etcd", ",".join(fleet.etcd.endpoints), "--listen", "127.0.0.1:0", "--allow-unsafe-etcd")
        where = ("--dir", str(fleet.home / "r1"), "--log-format", "json")
        fleet.replicas["r1"] = fleet.start("r1", "rendezvous", *words, *where, environment=first.environment)
        address = first.hears("READY=1")["STATUS"].removeprefix("listens at ")
        assert first.hears("WATCHDOG=1")
        fleet.end("r0", signal.SIGTERM)
        agent = fleet.start(
            *("a", "agent", "--rendezvous", address, "--node", "a", "--jobs-dir", str(fleet.home / "a")),
            environment=second.environment,
        )
        fleet.nodes["a"] = agent
        assert second.hears("READY=1")["STATUS"] == f"attends the fleet's leader at {address}"
        assert fleet.end("a", signal.SIGTERM) == 128 + signal.SIGTERM
        assert int(second.hears("STOPPING=1")["EXTEND_TIMEOUT_USEC"]) > 46e6
        assert fleet.end("r1", signal.SIGINT) == 128 + signal.SIGINT
        assert first.hears("STOPPING=1")
        told = {line["msg"]: line for line in log_of(fleet, "r1")}
        assert told.keys() >= {"listening", "leading_fleet", "node_up", "node_down", "stopped"}
        assert told["node_up"]["node"] == "a" and told["node_up"]["logger"] == "elastic.fleet.replica.leader"
        assert told["listening"]["address"] == address
    line = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (INFO|WARNING) elastic\.[\w.]+: \w+.*")
    lines = (tmp_path / "a.log").read_text().splitlines()
    assert lines and all(map(line.fullmatch, lines)), lines
    assert any(f"attending_fleet term={told['leading_fleet']['term']} address={address}" in one for one in lines)


def test_an_agent_reads_its_file_again_and_changes_what_may_change(tmp_path: Path) -> None:
    with Fleet(tmp_path, replicas=1) as fleet, manager() as service:
        agent, path = start_agent(fleet, service)
        service.hears("READY=1")
        fleet.until("the node", lambda: offered(fleet) == 1)
        job: dict[str, Any] = {"workers": 3, "min_workers": 3, "checkpoint_dir": str(tmp_path / "c")}
        waits = fleet.submit(name="wide", command=["python", "-c", ""], labels=["zone=b"], **job)
        assert "1 node with zone=b" not in fleet.entry(waits)["because"]

        path.write_text("slots = [")
        agent.send_signal(signal.SIGHUP)
        assert int(service.hears("RELOADING=1")["MONOTONIC_USEC"]) > 0
        service.hears("READY=1")
        (unread,) = fleet.until("the refusal", said(fleet, "settings_unread"))
        assert f"{path}: not valid TOML" in unread["because"] and unread["level"] == "WARNING"

        path.write_text(f'{FILE}address = "127.0.0.9"\n'.replace("slots = 1", "slots = 2").replace("zone=a", "zone=b"))
        agent.send_signal(signal.SIGHUP)
        service.hears("RELOADING=1")
        (refused,) = fleet.until("what stays", said(fleet, "setting_refused"))
        assert (refused["setting"], refused["keeps"], refused["wanted"]) == ("address", "the default", "127.0.0.9")
        (read,) = fleet.until("what changes", said(fleet, "settings_read"))
        assert read["changed"] == {"slots": [1, 2], "label": [["zone=a"], ["zone=b"]]}
        fleet.until("two slots", lambda: offered(fleet) == 2)
        fleet.until("its label", lambda: "1 node with zone=b" in fleet.entry(waits)["because"])
        assert len(fleet.events("node_up", node="a")) == 2 and agent.poll() is None
        assert not said(fleet, "no_fleet_leader")(), "it has not lost its leader"

        notice = tmp_path / "notice"
        path.write_text(FILE.replace('"none"', f'"file:{notice}"') + 'log_level = "warning"\n')
        agent.send_signal(signal.SIGHUP)
        fleet.until("the level", said(fleet, "the log level is warning now: it is configured"))
        notice.write_text("")
        fleet.until("the notice", lambda: fleet.events("notice", source=f"file {notice}"))
        path.write_text(FILE)
        agent.send_signal(signal.SIGHUP)
        fleet.until("no notice any more", lambda: fleet.events("notice_over"))
        fleet.until("the level", said(fleet, "the log level is info now: it is configured"))
        agent.send_signal(log.DEBUG_ON)
        fleet.until("the level", said(fleet, "the log level is debug now: SIGRTMIN+22 was sent"))
        assert fleet.end("a", signal.SIGTERM) == 128 + signal.SIGTERM


@pytest.mark.long
def test_jobs_go_on_over_a_file_read_again_and_a_signal_to_every_process(tmp_path: Path, quiet: Quiet) -> None:
    """As `systemctl kill --signal=HUP` sends it."""
    with Fleet(tmp_path, replicas=1) as fleet, manager() as service:
        agent, path = start_agent(fleet, service, "--slots", "2", text=FILE)
        service.hears("READY=1")
        fleet.pace(0.03)
        job = fleet.train("train", workers=2)
        before = fleet.await_members(job, "a.0.0", "a.1.0")
        (log_file,) = fleet.home.glob(f"a/{job}/logs/agent.log")
        workers = [member["pid"] for member in before["members"]]
        for pid in workers:
            names = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            assert not any(name.startswith((b"NOTIFY_SOCKET=", b"WATCHDOG_")) for name in names)
        jobs_agent = fleet.agent_of(job, "a")
        os.kill(jobs_agent, log.DEBUG_ON)
        fleet.until("the level", lambda: "the log level is debug now" in log_file.read_text())
        assert all(json.loads(line)["ts"] for line in log_file.read_text().splitlines())

        path.write_text(f'{FILE}grace = 7\nnode = "other"\n'.replace("slots = 1", "slots = 9"))
        for pid in (agent.pid, *descendants(agent.pid)):
            os.kill(pid, signal.SIGHUP)
        service.hears("RELOADING=1")
        service.hears("READY=1")
        fleet.until("what stays", said(fleet, "setting_refused"))
        assert {line["setting"] for line in said(fleet, "setting_refused")()} == {"grace"}, "words count more"
        fleet.await_more_steps(job, 3)
        assert [member["pid"] for member in fleet.status(job)["members"]] == workers
        agent.send_signal(signal.SIGHUP)
        fleet.until("it is read again", lambda: len(said(fleet, "setting_refused")()) == 2)
        assert said(fleet, "setting_refused")()[-1]["keeps"] == 30.0, "it has not taken what was refused"
        fleet.finish(job, quiet.digest, quiet.steps)
        assert fleet.end("a", signal.SIGTERM) == 128 + signal.SIGTERM
        assert log_of(fleet, "a")
