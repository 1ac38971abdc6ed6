"""`elastic run --restart`: scripts that stand still, hang, and leave something behind, beside workers that live."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from elastic.cli.job.status import status_text
from elastic.records.events.story import of_generation
from elastic.records.journal import read_all
from tests.live.jobs import ROOT, SLACK_S, Job

SCRIPT = ROOT / "tests" / "live" / "programs" / "unwell.py"
TIMERS = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}


def job(home: Path, how: str, *words: str, workers: int = 2, timers: bool = False) -> Job:
    (home / "files").mkdir()
    options = ("--workers", str(workers), "--restart", *words, str(SCRIPT), how, str(home / "files"))
    return Job(home, *options, environment=TIMERS if timers else None)


def logs(running: Job) -> str:
    return "".join(path.read_text(errors="replace") for path in (running.dir / "logs").glob("*.log"))


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.long
def test_a_script_that_a_signal_stops_is_ended_and_its_worker_is_replaced(tmp_path: Path) -> None:
    with job(tmp_path, "deaf") as running:
        running.until("both are there", lambda: len(list((tmp_path / "files").glob("there.*"))) == 2)
        stopped = running.await_event("script_started", rank=1)
        os.kill(stopped["script"], signal.SIGSTOP)
        assert running.await_event("script_stopped")["worker_id"] == stopped["worker_id"]
        running.await_event("member_lost", worker_id=stopped["worker_id"])
        assert running.wait() == 0, running.output
        assert not alive(stopped["script"])
        assert len(running.events("member_lost")) == 1
        assert f"the script of {stopped['worker_id']} is stopped by a signal" in running.output
        assert not running.events("script_failed"), "nobody counts it as the script's own fault"
        assert not running.left_behind()


@pytest.mark.long
def test_what_a_script_has_started_ends_with_its_worker(tmp_path: Path) -> None:
    """Also what has left its session, and shared memory that a tracker removes; the script ignores SIGTERM."""
    with job(tmp_path, "deaf") as running:
        running.until("both are there", lambda: len(list((tmp_path / "files").glob("there.*"))) == 2)
        left = [(tmp_path / "files" / f"children.{rank}").read_text().split() for rank in range(2)]
        assert all(alive(int(pid)) for helper, orphan, _ in left for pid in (helper, orphan))
        lost = running.await_event("script_started", rank=1)
        running.send(lost["worker_id"])

        def gone() -> bool:
            return not any(alive(int(pid)) for helper, orphan, _ in left for pid in (helper, orphan))

        def freed() -> bool:
            return not any(Path(f"/dev/shm/{name}").exists() for *_, name in left)

        running.until("all that they had started is gone", gone, SLACK_S)
        running.until("the tracker has removed their memory", freed, SLACK_S)
        assert running.wait() == 0, running.output


@pytest.mark.long
def test_a_timer_of_torch_that_expires_is_blamed_on_its_worker(tmp_path: Path) -> None:
    with job(tmp_path, "timer", timers=True) as running:
        failed = running.await_event("script_failed")
        assert running.wait() == 0, running.output
        blamed = next(line for line in running.events("script_started", rank=1) if line["generation"] == 1)
        assert failed["worker_id"] == blamed["worker_id"]
        assert "the second barrier in round 1" in failed["place"]
        assert "the timer of the second barrier expired" in running.output + logs(running)
        assert not running.left_behind()
        assert not list((running.dir / "errors").glob("*.timer"))


@pytest.mark.long
def test_signals_from_outside_to_scripts_change_nothing(tmp_path: Path) -> None:
    """As Slurm sends them to all processes of a job: its command gets them too, and asks the scripts."""
    with job(tmp_path, "doze") as running:
        begun = running.until("both have begun", lambda: (e := running.events("script_started"))[1:] and e)
        running.until("both are there", lambda: len(list((tmp_path / "files").glob("?.0"))) == 2)
        for line in begun:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                os.kill(line["script"], number)
        (tmp_path / "files" / "end").touch()
        assert running.wait() == 0, running.output
        assert [line["status"] for line in running.events("script_ended")] == [0, 0]


@pytest.mark.long
def test_a_script_that_exits_with_0_by_its_timer_has_failed(tmp_path: Path) -> None:
    with job(tmp_path, "caught-timer", timers=True) as running:
        failed = running.await_event("script_failed")
        assert "its wait in round 1" in failed["place"]
        assert running.wait() == 0, running.output


@pytest.mark.long
def test_a_worker_whose_script_has_no_starter_any_more_is_replaced(tmp_path: Path) -> None:
    with job(tmp_path, "deaf") as running:
        running.until("both are there", lambda: len(list((tmp_path / "files").glob("there.*"))) == 2)
        one = running.await_event("script_started", rank=0)
        status = Path(f"/proc/{one['script']}/status").read_text()
        os.kill(int(status.partition("PPid:")[2].split()[0]), signal.SIGKILL)
        running.await_event("member_lost", worker_id=one["worker_id"])
        assert running.wait() == 0, running.output
        assert not alive(one["script"])


@pytest.mark.long
@pytest.mark.parametrize("how", ["well", "print"])
def test_four_ranks_that_end_at_once_are_a_job(how: str, tmp_path: Path) -> None:
    with job(tmp_path, how, workers=4) as running:
        assert running.wait() == 0, running.output[-2000:]
        assert {path.name for path in (tmp_path / "files").iterdir()} == {f"{rank}.0" for rank in range(4)}
        assert how == "well" or running.output.count("y") >= 300_000


@pytest.mark.long
@pytest.mark.parametrize("how", ["hang", "part"])
def test_scripts_that_get_nowhere_are_shown_and_ended(how: str, tmp_path: Path) -> None:
    """Also where one of them has ended well, and the others wait for it."""
    # All are in round 1, whose scripts hang, however slowly they start.
    with job(tmp_path, how, "--hang-limit", "30", "--min-workers", "3", workers=3) as running:
        running.until("a script is said to be idle", lambda: "s of 30 s" in status_text(running.status()))
        hang = running.await_event("scripts_hang")
        assert running.wait() == 0, running.output
        (failed,) = [line for line in running.events("script_failed") if "message" in line]  # of the leader
        assert failed["worker_id"] == hang["worker_id"]
        assert "no script used a processor for 3" in failed["message"]
        assert "wait_for_ever" in logs(running), "the stacks of Python"
        assert "in round 1 ends" not in running.output
        assert "state S" in logs(running), "what the kernel says of each thread"
        assert "and is replaced" in running.output and "no script used a processor" in running.output
        told = " ".join(moment.said for moment in of_generation(read_all(running.dir), 1))
        assert "no script of round 1 gets anywhere" in told


@pytest.mark.long
def test_hangs_are_counted(tmp_path: Path) -> None:
    with job(tmp_path, "always-hang", "--hang-limit", "30", "--max-restarts", "0", "--min-workers", "2") as running:
        assert running.wait() == 1
        assert "no script used a processor" in running.output
