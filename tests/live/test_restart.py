"""`elastic run --restart`: a torchrun script is started again on all workers, whatever happens to one of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path

import pytest

from elastic.cli.job.status import status_text
from elastic.records.events.story import of_generation
from elastic.records.journal import read_all
from tests.live.jobs import ROOT, Job

SCRIPT = ROOT / "tests" / "live" / "programs" / "restarted.py"


def job(home: Path, *words: str) -> Job:
    (home / "files").mkdir()
    return Job(home, "--workers", "3", "--restart", *words, str(SCRIPT), str(home / "files"))


def alive(pids: Iterable[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def started(running: Job, home: Path, world: int, but: set[str]) -> dict[str, int]:
    """Pids of the scripts of a round with so many ranks, by their file. but: files of earlier rounds."""

    def found() -> dict[str, int] | None:
        files = {path.name: path for path in (home / "files").glob(f"?.{world}.?") if path.name not in but}
        ranks = {name.split(".")[0] for name in files}
        return {name: int(path.read_text()) for name, path in files.items()} if len(ranks) == world else None

    return running.until(f"a round of {world}", found)


def end(running: Job, home: Path) -> None:
    (home / "files" / "end").touch()
    assert running.wait() == 0, running.output


def test_a_worker_that_is_killed_costs_a_round_and_its_successor_another_one(tmp_path: Path) -> None:
    with job(tmp_path) as running:
        first = started(running, tmp_path, 3, set())
        status = running.status()
        lost, generation = str(status["members"][0]["worker_id"]), status["generation"]
        running.send(lost)
        second = started(running, tmp_path, 3, set(first))
        assert not alive(first.values())
        assert lost not in running.members()
        shown = status_text(running.status())
        assert ", round " in shown and "steps" not in shown
        end(running, tmp_path)
        assert not alive(second.values())
        assert "elastic: restarted: each change of the workers ends the script" in running.output
        assert len(running.events("script_started")) >= 6
        assert "steps" not in status_text(running.status())
        told = " ".join(moment.said for moment in of_generation(read_all(running.dir), generation))
        assert all(f"starts as rank {rank} of 3" in told for rank in range(3))
        assert " rounds in " in running.output and "0 steps" not in running.output


@pytest.mark.long
def test_a_script_that_fails_is_named_alone_and_all_start_again(tmp_path: Path) -> None:
    with job(tmp_path) as running:
        first = started(running, tmp_path, 3, set())
        (tmp_path / "files" / "fail").touch()
        started(running, tmp_path, 3, set(first))
        failed = running.events("script_failed")
        assert len({line["worker_id"] for line in failed}) == 1
        assert "restarted.py:" in failed[0]["place"]
        end(running, tmp_path)


@pytest.mark.long
def test_a_script_that_is_killed_costs_a_round(tmp_path: Path) -> None:
    with job(tmp_path) as running:
        first = started(running, tmp_path, 3, set())
        os.kill(min(first.values()), signal.SIGKILL)
        started(running, tmp_path, 3, set(first))
        assert not running.events("script_failed")
        end(running, tmp_path)


@pytest.mark.long
def test_a_script_that_always_fails_ends_the_job_with_what_it_said(tmp_path: Path) -> None:
    script = tmp_path / "bad.py"
    script.write_text("raise ValueError('never')\n")
    with Job(tmp_path, "--workers", "2", "--restart", str(script)) as running:
        assert running.wait() == 1
        assert "ValueError: never" in running.output + "".join(
            path.read_text() for path in (running.dir / "logs").glob("*.log")
        )


@pytest.mark.long
def test_a_script_is_asked_to_stop_when_the_job_is(tmp_path: Path) -> None:
    with job(tmp_path) as running:
        first = started(running, tmp_path, 3, set())
        running.command.process.send_signal(signal.SIGTERM)
        running.wait()
        assert {path.stem for path in (tmp_path / "files").glob("*.saved")} == set(first)
        assert not alive(first.values())
        assert not running.left_behind()


@pytest.mark.long
def test_a_worker_that_stands_still_has_no_script_for_long(tmp_path: Path) -> None:
    with job(tmp_path) as running:
        first = started(running, tmp_path, 3, set())
        frozen = running.members()[0]
        running.send(frozen, signal.SIGSTOP)
        second = started(running, tmp_path, 3, set(first))
        running.until("the old scripts have ended", lambda: not alive(first.values()) or None)
        assert len(alive(second.values())) == 3
        end(running, tmp_path)
