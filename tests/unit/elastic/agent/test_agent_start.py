"""How the program of an agent begins: its fork server first on an idle machine, and with --wait only when told to."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic.agent import __main__ as main_module
from elastic.agent import agent as agent_module
from elastic.agent.__main__ import has_idle_processor, start_early
from elastic.agent.process import process_start
from elastic.config import JobSpec
from elastic.wire import codec

BOUND_S = 120.0


def agent(*words: str, stdin: str = "", closed: bool = False) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "elastic.agent", *words]
    if closed:
        command = ["sh", "-c", 'exec "$@" <&-', "sh", *command]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=BOUND_S, check=False)


def job_in(home: Path, script: str = "import torch\n") -> JobSpec:
    """A directory that holds a job."""
    (home / "train.py").write_text(script)
    (home / "logs").mkdir()
    spec = JobSpec(name="train", command=(sys.executable, str(home / "train.py")), workers=1, env=("A=b",))
    (home / "job.json").write_bytes(codec.to_json(spec))
    return spec


def test_a_waiting_agent_begins_with_a_byte_and_ends_with_its_parent(tmp_path: Path) -> None:
    words = ("--job-dir", str(tmp_path / "none"), "--node", "a", "--slots", "1")
    begun = agent("--wait", *words, stdin="\n")
    assert (begun.returncode, begun.stdout) == (2, "") and "this is not a job directory" in begun.stderr
    alone = agent("--wait", *words)
    assert (alone.returncode, alone.stderr) == (1, "")
    at_once = agent(*words, closed=True)
    assert at_once.returncode == 2, "without the option nothing is waited for"
    assert "this is not a job directory" in at_once.stderr


def test_the_fork_server_of_a_job_is_started_before_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = job_in(tmp_path)
    monkeypatch.setattr(process_start, "start_process", lambda *about, restarts: (*about, restarts))
    started: Any = start_early(["--slots", "1", "--job-dir", str(tmp_path), "--node", "a"])
    command, environment, log, restarts = started
    assert not restarts
    assert (command, log) == (list(spec.command), tmp_path / "logs" / "fork-server-a.log")
    assert environment["A"] == "b", "that of the job"


@pytest.mark.parametrize("how", ["no job", "cold", "another program", "no node"])
def test_where_no_worker_can_be_forked_nothing_is_started(tmp_path: Path, how: str) -> None:
    words = ["--job-dir", str(tmp_path), "--node", "a"]
    if how != "no job":
        spec = job_in(tmp_path)
        spec = replace(spec, fork=how != "cold", command=("sh", "x") if how == "another program" else spec.command)
        (tmp_path / "job.json").write_bytes(codec.to_json(spec))
    assert start_early(words[:2] if how == "no node" else words) is None


@pytest.mark.parametrize(
    ("load", "processors", "own", "idle"),
    [(0.9, 2, 2, True), (1.1, 2, 2, False), (0.0, 1, 1, False), (60.0, 128, 8, True), (0.0, 128, 1, False)],
)
def test_the_fork_server_imports_beside_the_agent_where_a_processor_is_idle(
    load: float, processors: int, own: int, idle: bool
) -> None:
    assert has_idle_processor(load, processors, own) is idle


@pytest.mark.parametrize("load", [0.0, 1000.0])
def test_a_fork_server_is_started_before_or_behind_the_imports_of_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: float
) -> None:
    happened: list[str] = []
    monkeypatch.setattr(sys, "argv", ["agent"])
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(main_module, "start_early", lambda words: happened.append("fork server"))
    monkeypatch.setattr(gc, "disable", lambda: happened.append("imports"))
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(agent_module, "main", lambda fork_server: 0)
    monkeypatch.setattr(os, "dup2", lambda from_, to: to)
    assert main_module.main() == 0
    assert happened == (["fork server", "imports"] if load == 0 else ["imports", "fork server"])
