"""How a child of the control plane is started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.process import children, stop_signals

SHOW = """
import json, os, signal, sys
held = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))
print(json.dumps([os.getpgid(0) == os.getpid(), sys.stdin.read(), held, os.environ.get("ELASTIC_PARENT")]))
print("to errors", file=sys.stderr)
"""


def shown(log: Path, *, obeys: bool) -> list[object]:
    process = children.start([sys.executable, "-c", SHOW], log, obeys=obeys)
    assert process.wait(60) == 0
    line, errors = log.read_text().splitlines()
    assert errors == "to errors"
    found: list[object] = json.loads(line)
    return found


def test_a_child_that_obeys_has_its_parent_s_pid_and_holds_all_signals_that_stop_until_it_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTIC_PARENT", "1")
    held = sorted(map(int, stop_signals.BLOCKED))
    assert shown(tmp_path / "log", obeys=True) == [True, "", held, str(os.getpid())]
    assert shown(tmp_path / "other", obeys=False) == [True, "", [], "1"]
    assert (tmp_path / "log").stat().st_mode & 0o077 == 0
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_what_is_given_comes_before_what_all_children_have(tmp_path: Path) -> None:
    process = children.start(
        ["sh", "-c", 'cat; echo "$A"; echo error >&2'],
        tmp_path / "log",
        env={"A": "b", "PATH": os.environ["PATH"]},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.communicate(b"in\n", timeout=60)[0] == b"in\nb\n"
    assert (tmp_path / "log").read_text() == "error\n"


def test_a_child_is_asked_by_the_signal_that_it_listens_to() -> None:
    with subprocess.Popen(["sleep", "60"]) as plain:
        children.ask(plain)
        assert plain.wait(60) == -signal.SIGTERM
    listens = "import signal, sys; sys.stdin.read(); signal.pthread_sigmask(signal.SIG_UNBLOCK, range(1, 65))"
    child = children.start([sys.executable, "-c", listens], stdin=subprocess.PIPE)
    children.ask(child, signal.SIGINT)
    child.communicate(timeout=60)
    assert child.returncode == -stop_signals.ORDERS[signal.SIGINT]
