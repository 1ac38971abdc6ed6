"""`elastic run` is killed before any of its first changes to the disk; the same command again finds its way."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from elastic import cli
from elastic.config import JobSpec
from elastic.errors import ExitCode
from elastic.platforms.local import job_run
from elastic.platforms.local.interrupts import Signals

CHANGES = ("os.mkdir", "os.rename", "os.link", "os.remove", "os.truncate")
MANY = 200


class Killed(BaseException):
    """No `except Exception` of the product sees it."""


class Executioner:
    """An audit hook, which Python cannot take away again, so there is one; it acts while `below` is set."""

    def __init__(self) -> None:
        self.below = ""
        self.left = 0
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.below or not (event in CHANGES or (event == "open" and _writes(arguments))):
            return
        if os.fspath(arguments[0]).startswith(self.below):
            if self.left == 0:  # and it stays dead: nothing is tidied up
                raise Killed
            self.left -= 1

    @contextmanager
    def after(self, changes: int, below: Path) -> Iterator[None]:
        self.below, self.left = str(below), changes
        try:
            yield
        finally:
            self.below = ""


def _writes(arguments: tuple[Any, ...]) -> bool:
    path, _, flags = arguments
    return isinstance(path, str | os.PathLike) and bool(flags & (os.O_WRONLY | os.O_RDWR))


executioner = Executioner()


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The job directories of the runs that were started."""
    found: list[Path] = []

    def record(spec: JobSpec, job_dir: Path, signals: Signals, **_: Any) -> job_run.RunOutcome:
        found.append(job_dir)
        (job_dir / "journal" / "agent.jsonl").write_text(f"run {len(found)}")
        return job_run.RunOutcome(ExitCode.DONE, "all members have finished")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(job_run, "attempt", record)
    (tmp_path / "train.py").write_text("")
    return found


def start(below: Path, changes: int) -> bool:
    """Whether it lived."""
    try:
        with executioner.after(changes, below):
            assert cli.main(["run", "--job-dir", "job", "train.py"]) == 0
    except Killed:
        return False
    return True


def test_a_start_that_was_killed_anywhere_can_be_repeated(tmp_path: Path, runs: list[Path]) -> None:
    for changes in range(MANY):
        home = tmp_path / str(changes)
        home.mkdir()
        os.chdir(home)
        (home / "train.py").write_text("")
        lived = start(home, changes)
        assert start(home, MANY), "the second start was not killed"
        if lived:
            break
    assert 10 < changes < MANY - 1, "the kill meets none of its changes"


def test_a_resumed_start_that_was_killed_anywhere_can_be_repeated(tmp_path: Path, runs: list[Path]) -> None:
    for changes in range(MANY):
        home = tmp_path / str(changes)
        home.mkdir()
        os.chdir(home)
        (home / "train.py").write_text("")
        runs.clear()
        assert start(home, MANY)
        lived = start(home, changes)
        assert start(home, MANY)
        aside = home / "job" / "runs"
        assert (aside / "1" / "journal" / "agent.jsonl").read_text() == "run 1"
        if lived:
            assert (aside / "2" / "journal" / "agent.jsonl").read_text() == "run 2"
            break
    assert 10 < changes < MANY - 1, "the kill meets none of its changes"
