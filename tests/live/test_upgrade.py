"""Agents are replaced by another version, node by node, while a job trains: every step once, the quiet run's bits."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from elastic.process import notify
from elastic.version import __version__
from tests.live.conftest import Quiet
from tests.live.fleet import Fleet
from tests.live.jobs import DEADLINE_S, POLL_S, ROOT

NEWER = f"9.{__version__}"


def copy_of_the_project(home: Path) -> Path:
    """The version NEWER of it."""
    home.mkdir()
    for name in ("runtime", "chaos_tests", "tests"):
        (home / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "elastic", home / "elastic", ignore=shutil.ignore_patterns("__pycache__"))
    version = home / "elastic" / "version.py"
    text = version.read_text()
    assert f'__version__ = "{__version__}"' in text
    version.write_text(text.replace(f'__version__ = "{__version__}"', f'__version__ = "{NEWER}"'))
    return home


class Nodes:
    """The agents of a fleet's nodes. services: those of them that a service manager starts again when they end."""

    def __init__(self, fleet: Fleet, manager: str, services: tuple[str, ...], newer: Path) -> None:
        self._fleet, self._manager, self._services, self._newer = fleet, manager, services, newer

    def start(self, name: str, program: Path) -> None:
        fleet = self._fleet
        where = ("--rendezvous", ",".join(fleet.client.replicas), "--node", name, "--jobs-dir", str(fleet.home / name))
        known = {notify.SOCKET: self._manager} if name in self._services else {}
        environment = {**known, "PYTHONPATH": str(program)}
        fleet.nodes[name] = fleet.start(
            name, "agent", *where, "--address", fleet.hosts.add(name), environment=environment
        )

    def restart_ended(self) -> None:
        """As service managers do."""
        for name in self._services:
            if (status := self._fleet.nodes[name].poll()) is not None:
                assert status == 128 + signal.SIGTERM
                self.start(name, self._newer)

    def replace(self, name: str) -> None:
        """As an operator does."""
        assert self._fleet.end(name, signal.SIGTERM) == 128 + signal.SIGTERM
        self.start(name, self._newer)


@contextmanager
def upgrade(fleet: Fleet, program: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`elastic upgrade` of that program; see `said`."""
    words = ("upgrade", "--json", "--rendezvous", ",".join(fleet.client.replicas))
    with (fleet.home / "said").open("wb") as out, (fleet.home / "upgrade.log").open("wb") as errors:
        command = subprocess.Popen(
            [sys.executable, "-P", "-m", "elastic.cli", *words],
            env={**os.environ, "PYTHONPATH": str(program)},
            cwd=fleet.home,
            stdout=out,
            stderr=errors,
        )
        try:
            yield command
        finally:
            command.kill()
            command.wait()


def said(fleet: Fleet) -> list[dict[str, Any]]:
    lines = (fleet.home / "said").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


@pytest.mark.long
def test_a_job_trains_on_while_the_agents_of_its_nodes_are_replaced_one_by_one(tmp_path: Path, quiet: Quiet) -> None:
    newer = copy_of_the_project(tmp_path / "newer")
    with Fleet(tmp_path, replicas=1) as fleet, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("")
        address = "@" + manager.getsockname()[1:].decode()
        nodes = Nodes(fleet, address, ("a", "b"), newer)
        for name in ("a", "b", "c"):
            nodes.start(name, ROOT)
        fleet.await_nodes("a", "b", "c")
        fleet.pace(1.0)  # so that its last steps, each slower than the one before, do not come meanwhile
        job = fleet.train("train", workers=3)
        fleet.await_members(job, "a.0.0", "b.0.0", "c.0.0")

        by_hand = False
        with upgrade(fleet, newer) as command:
            while command.poll() is None:
                nodes.restart_ended()
                if not by_hand and "await_operator" in [line["event"] for line in said(fleet)]:
                    nodes.replace("c")
                    by_hand = True
                time.sleep(POLL_S)  # other processes and a file: there is nothing to wait on
        assert command.returncode == 0, (fleet.home / "upgrade.log").read_text()
        told = said(fleet)
        by_manager = ["drain", "end_agent", "undrain", "done"]
        expected = {"a": by_manager, "b": by_manager, "c": ["drain", "await_operator", "undrain", "done"]}
        assert {node: [line["event"] for line in told if line.get("node") == node] for node in "abc"} == expected
        assert [line["node"] for line in told if line["event"] == "done"] == ["a", "b", "c"]
        assert (told[-1]["event"], told[-1]["version"]) == ("end", NEWER)
        assert f"--node c --jobs-dir {fleet.home / 'c'}" in next(
            line["because"] for line in told if line["event"] == "await_operator"
        )

        assert {fleet.client.examine(node=node)["version"] for node in "abc"} == {NEWER}
        assert not any(node["because"] for node in fleet.client.overview()["nodes"]), "no node is drained any more"
        fleet.await_slots(job, "a.0", "b.0", "c.0", gone="a.0.0")
        asked = fleet.events("agent_end_asked")
        assert {line["node"] for line in asked} == {"a", "b"} and all(line["caller"] and line["peer"] for line in asked)
        cut_off = ("quiesce_started", "redo_started", "ring_aborted")
        assert [event for event in cut_off if fleet.events(event)] == [], "every worker left between two steps"
        fleet.finish(job, quiet.digest, quiet.steps)

        with upgrade(fleet, newer) as again:
            assert again.wait(DEADLINE_S) == 0
        assert said(fleet)[-1]["nodes"] == [], "all have this version"
