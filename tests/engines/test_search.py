"""`elastic search` with Optuna as it is installed: kills of workers and of the search, pruned trials, and a fleet."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos_tests.support.processes import await_exits, living
from elastic.errors import ExitCode
from elastic.records import ledger
from elastic.records.job_directory import read_json
from tests.engines.training import SOON_ORPHANS
from tests.live.fleet import Fleet
from tests.live.jobs import ROOT

pytest.importorskip("optuna", reason="make test-engines installs it")

pytestmark = [pytest.mark.timeout(1200), pytest.mark.filterwarnings("default")]

SCRIPT = ROOT / "tests" / "engines" / "searched" / "train.py"
DEADLINE_S = 400.0
STEPS = 40

STUDY = """\
import optuna

metric = "loss"
{more}

def sampler(seed):
    return optuna.samplers.{sampler}


def trial(trial):
    lr = trial.suggest_float("lr", 1e-3, 1e-1, log=True)
    return [{script!r}, "--lr", lr, "--steps", {steps}, "--pace", {pace!r}]
"""


class Searching:
    """A study.py in a directory, and the command that searches it."""

    def __init__(self, home: Path, more: str = "", sampler: str = "TPESampler(seed=seed, n_startup_trials=2)") -> None:
        self.home = home
        home.mkdir(exist_ok=True)
        self.pace(0.0)
        values = {"script": str(SCRIPT), "steps": STEPS, "pace": str(home / "pace")}
        (home / "study.py").write_text(STUDY.format(more=more, sampler=sampler, **values))

    def pace(self, seconds: float) -> None:
        (self.home / "pace.new").write_text(str(seconds))
        (self.home / "pace.new").rename(self.home / "pace")

    def start(self, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "elastic.cli", "search", "study.py", "--json", "--dir", "search", *options]
        with (self.home / "errors").open("ab") as errors:
            return subprocess.Popen(command, cwd=self.home, stdout=subprocess.PIPE, stderr=errors, text=True)

    @property
    def errors(self) -> str:
        """What all searches so far have said beside their results."""
        return (self.home / "errors").read_text()

    def run(self, *options: str) -> list[dict[str, Any]]:
        """What it says; it ends with 0."""
        search = self.start(*options)
        said, _ = search.communicate(timeout=DEADLINE_S)
        assert search.returncode == 0, said
        return [json.loads(line) for line in said.splitlines()]

    def job_dir(self, trial: int) -> Path:
        return self.home / "search" / f"trial-{trial}"

    def await_step(self, trial: int, step: int) -> None:
        path = self.job_dir(trial) / "steps.jsonl"
        until(f"step {step} of trial {trial}", lambda: path.exists() and path.read_bytes().count(b"\n") > step)


def until(what: str, reached: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + DEADLINE_S
    while not (value := reached()):
        assert time.monotonic() < deadline_s, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.05)  # files of other processes: there is nothing to wait on
    return value


def values(said: list[dict[str, Any]]) -> dict[int, tuple[str, float, dict[str, float]]]:
    return {one["trial"]: (one["state"], one["value"], one["params"]) for one in said if one["event"] == "trial"}


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[str, float, dict[str, float]]]:
    """The trials of a study that nobody disturbs."""
    return values(Searching(tmp_path_factory.mktemp("quiet")).run("--trials", "3"))


def test_kills_of_a_worker_and_of_the_search_change_no_value_and_no_trial(
    tmp_path: Path, mark: str, quiet: dict[int, Any]
) -> None:
    assert [state for state, *_ in quiet.values()] == ["complete"] * 3
    searching = Searching(tmp_path / "s")
    searching.pace(0.02)
    search = searching.start("--trials", "3", "--workers", "2")
    searching.await_step(0, 5)
    paths = (searching.job_dir(0) / "journal").glob("*.jsonl")
    journals = [line for path in paths for line in path.read_text().splitlines()]
    started = [line for line in map(json.loads, journals) if line["event"] == "worker_started"]
    os.kill(started[0]["pid"], signal.SIGKILL)
    searching.await_step(1, 5)
    search.kill()
    before, _ = search.communicate()
    assert not await_exits(living(mark), 30.0), "what a killed search has started ends with it"
    again = searching.run("--trials", "3", "--workers", "2")
    told = values([json.loads(line) for line in before.splitlines()]) | values(again)
    assert told == quiet
    assert again[-1]["trials"] == {"complete": 3}
    for trial in range(3):
        steps = ledger.merged([searching.job_dir(trial) / "steps.jsonl"])
        assert [line["step"] for line in steps] == list(range(STEPS)), "each step once"
    assert values(searching.run("--trials", "3")) == {}, "what is over stays over"


def test_ctrl_c_stops_the_trials_and_the_same_command_goes_on(tmp_path: Path, mark: str, quiet: dict[int, Any]) -> None:
    searching = Searching(tmp_path / "s")
    searching.pace(0.02)
    search = searching.start("--trials", "2", "--parallel", "2")
    searching.await_step(0, 5)
    search.send_signal(signal.SIGINT)
    search.communicate(timeout=60)
    assert search.returncode == 130
    assert not living(mark)
    assert (read_json(searching.job_dir(0) / "result.json") or {})["exit_code"] == 6
    searching.pace(0.0)
    assert values(searching.run("--trials", "2"))[0] == quiet[0]


def test_a_terminal_shows_the_trials_that_run_and_is_as_before_after_ctrl_c(tmp_path: Path, mark: str) -> None:
    searching = Searching(tmp_path / "s")
    searching.pace(0.02)
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    words = ("search", "study.py", "--dir", "search", "--trials", "2")
    environment = {**os.environ, "TERM": "xterm"}
    search = subprocess.Popen(
        [sys.executable, "-m", "elastic.cli", *words], cwd=searching.home, stdout=end, stderr=end, env=environment
    )
    os.close(end)
    shown = bytearray()
    reader = threading.Thread(target=_read_all, args=(terminal, shown))
    reader.start()
    try:
        until("a trial is over", lambda: b"elastic: trial 0 complete, loss " in shown)
        until("the first step of another one", lambda: re.search(rb"\r\n 1 +runs +1 +\d+ +\d+\.\d+ +lr=0\.", shown))
        search.send_signal(signal.SIGINT)
        assert search.wait(60) == 130
    finally:
        search.kill()
        reader.join()
        os.close(terminal)
    text = shown.decode()
    assert re.search(r"\n 0 +absent +0 +lr=0\.", text), "it has not begun, and nobody was killed"
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1, "the cursor is hidden, and comes back"
    assert text.rstrip().endswith("elastic: stopping the trials; the same command goes on with them")


def _read_all(terminal: int, shown: bytearray) -> None:
    with contextlib.suppress(OSError):  # the other end is closed
        while piece := os.read(terminal, 1 << 16):
            shown += piece


def test_pruned_trials_end_their_jobs_and_failed_ones_say_why(tmp_path: Path, mark: str) -> None:
    """The first trial runs to its end, as there is nothing to compare it with."""
    pruner = "pruner = optuna.pruners.ThresholdPruner(upper=1e-9, n_warmup_steps=3)\n"
    searching = Searching(tmp_path / "s", pruner, "RandomSampler(seed=seed)")
    searching.pace(0.05)
    search = searching.start("--trials", "2")
    said, _ = search.communicate(timeout=DEADLINE_S)
    assert search.returncode == 1, "none has a value"
    lines = [json.loads(line) for line in said.splitlines()]
    assert [line["state"] for line in lines if line["event"] == "trial"] == ["pruned", "pruned"]
    for trial in range(2):
        assert (read_json(searching.job_dir(trial) / "result.json") or {})["exit_code"] == 6
        assert len(ledger.merged([searching.job_dir(trial) / "steps.jsonl"])) < STEPS
    assert not living(mark)
    (searching.home / "study.py").write_text('metric = "acc"\n\ndef trial(trial):\n    return ["absent.py"]\n')
    search = searching.start("--trials", "3")
    said, _ = search.communicate(timeout=DEADLINE_S)
    (failed,) = [line for line in map(json.loads, said.splitlines()) if line["event"] == "trial"]
    assert (failed["state"], "absent.py" in failed["because"]) == ("fail", True)


def test_a_grid_ends_when_all_of_it_was_tried(tmp_path: Path, mark: str) -> None:
    searching = Searching(tmp_path / "s", "", 'GridSampler({"lr": [0.01, 0.05]}, seed=seed)')
    said = searching.run("--trials", "10", "--parallel", "2")
    assert sorted(one[2]["lr"] for one in values(said).values()) == [0.01, 0.05]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    home = tmp_path / "fleet"
    home.mkdir()
    with Fleet(home) as made:
        for name in ("a", "b"):
            made.node(name)
        made.await_nodes("a", "b")
        yield made


def of_fleet(fleet: Fleet, searching: Searching, min_workers: int, checkpoints: Path | str) -> tuple[str, ...]:
    """Write the job file of the trials. Returns the options of the search."""
    timing = "\n".join(f"{name} = {value}" for name, value in SOON_ORPHANS.items())
    job = f"""
name = "replaced"
command = ["python"]
workers = 2
min_workers = {min_workers}
checkpoint_dir = "{checkpoints}"
checkpoint_every = "5 steps"
[timing]
{timing}
[env]
OMP_NUM_THREADS = "1"
"""
    (searching.home / "job.toml").write_text(job)
    return ("--job", "job.toml", "--rendezvous", ",".join(fleet.client.replicas))


def test_on_a_fleet_a_search_that_was_killed_finds_its_jobs_again(
    fleet: Fleet, tmp_path: Path, quiet: dict[int, Any]
) -> None:
    searching = Searching(tmp_path / "s")
    searching.pace(0.02)
    options = (*of_fleet(fleet, searching, 1, tmp_path / "checkpoints"), "--parallel", "2")
    search = searching.start("--trials", "3", *options)
    until("a trial that trains", lambda: any(line["step"] > 3 for name in jobs(fleet) for line in fleet.steps(name)))
    search.kill()
    before, _ = search.communicate()
    assert any(job["state"] != "ended" for job in fleet.client.overview()["jobs"]), "jobs go on without it"
    fleet.end("b")
    searching.pace(0.0)
    again = searching.run("--trials", "3", *options)
    told = values([json.loads(line) for line in before.splitlines()]) | values(again)
    assert told[0] == quiet[0] and told[1] == quiet[1], "those that were proposed before anything was known"
    assert [state for state, *_ in told.values()] == ["complete"] * 3
    name = (searching.home / "search" / "name").read_text()
    assert sorted(jobs(fleet)) == [f"{name}-t{n}-{n + 1}" for n in range(3)], "each trial was one job"


def jobs(fleet: Fleet) -> list[str]:
    return [job["job"] for job in fleet.client.overview()["jobs"]]


def test_on_a_fleet_a_trial_goes_on_after_a_preemption_and_after_the_death_of_all_its_nodes(
    fleet: Fleet, tmp_path: Path, quiet: dict[int, Any]
) -> None:
    searching = Searching(tmp_path / "s")
    searching.pace(0.3)
    search = searching.start("--trials", "1", *of_fleet(fleet, searching, 2, tmp_path / "checkpoints"))
    (first,) = until("the job", lambda: jobs(fleet))
    await_more(fleet, first, 3)
    searching.pace(3.0)  # a leader preempts nobody in its first 30 s
    urgent = fleet.train("urgent", workers=1, priority=5)
    second = until("the job that it goes on as", lambda: jobs(fleet)[2:])[0]
    assert fleet.entry(first)["because"] == f"preempted for {urgent}; goes on as {second}"
    until("the trial waits", lambda: fleet.entry(second)["state"] == "waits")
    searching.pace(0.3)
    assert fleet.run("stop", urgent).returncode == 0
    await_more(fleet, second, 7)  # with a checkpoint
    switch_off(fleet)
    switch_on(fleet)
    await_more(fleet, second, 3)  # nodes have come before it was given up
    switch_off(fleet)
    until("the job is given up", lambda: fleet.entry(second)["state"] == "ended")
    assert fleet.entry(second)["exit_code"] == ExitCode.STATE_LOST
    until("the next one waits", lambda: [fleet.entry(job)["state"] for job in jobs(fleet)[3:]] == ["waits"])
    searching.pace(0.0)
    switch_on(fleet)
    said, _ = search.communicate(timeout=DEADLINE_S)
    assert search.returncode == 0, searching.errors
    assert values([json.loads(line) for line in said.splitlines()]) == {0: quiet[0]}
    (third,) = jobs(fleet)[3:]
    begun = [fleet.steps(job)[0]["step"] for job in (first, second, third)]
    assert begun[0] == 0 < begun[1] < begun[2], "each goes on, the last one from a checkpoint"


def switch_off(fleet: Fleet) -> None:
    for node in ("a", "b"):
        fleet.end(node)


def switch_on(fleet: Fleet) -> None:
    for node in ("a", "b"):
        fleet.node(node)


def await_more(fleet: Fleet, job: str, count: int) -> None:
    begun = len(fleet.steps(job))
    until(f"{count} steps of {job}", lambda: len(fleet.steps(job)) >= begun + count)


def test_on_a_fleet_a_search_waits_for_a_leader_and_ends_at_a_mistake_of_all_its_trials(
    fleet: Fleet, tmp_path: Path, quiet: dict[int, Any]
) -> None:
    searching = Searching(tmp_path / "s")
    refused = searching.start("--trials", "1", *of_fleet(fleet, searching, 1, "not/absolute"))
    refused.communicate(timeout=DEADLINE_S)
    assert refused.returncode == ExitCode.BAD_INPUT
    assert "checkpoint_dir='not/absolute' must be an absolute path" in " ".join(searching.errors.split())
    options = of_fleet(fleet, searching, 1, tmp_path / "checkpoints")
    searching.pace(0.3)
    search = searching.start("--trials", "1", *options)
    (job,) = until("the job", lambda: jobs(fleet))
    await_more(fleet, job, 3)
    replicas = list(fleet.replicas)
    for replica in replicas:
        fleet.end(replica)
    searching.pace(0.0)
    until("the end of the training", lambda: len(fleet.steps(job)) == STEPS)
    assert search.poll() is None, searching.errors
    for replica in replicas:
        fleet.replica(replica)
    said, _ = search.communicate(timeout=DEADLINE_S)
    assert values([json.loads(line) for line in said.splitlines()]) == {0: quiet[0]}
    assert jobs(fleet) == [job], "the mistake has left none, and the trial was one job"


def test_another_search_in_the_directory_and_another_direction_are_refused(
    tmp_path: Path, mark: str, quiet: dict[int, Any]
) -> None:
    searching = Searching(tmp_path / "s")
    searching.pace(0.05)
    search = searching.start("--trials", "1")
    searching.await_step(0, 3)
    second = searching.start("--trials", "1")
    second.communicate(timeout=DEADLINE_S)
    assert second.returncode == ExitCode.BAD_INPUT and "another `elastic search` uses" in searching.errors
    search.kill()
    search.communicate()
    assert not await_exits(living(mark), 30.0)
    study = (searching.home / "study.py").read_text()
    (searching.home / "study.py").write_text(f"direction = 'maximize'\n{study}")
    other = searching.start("--trials", "1")
    other.communicate(timeout=DEADLINE_S)
    assert other.returncode == ExitCode.BAD_INPUT
    assert "direction='maximize', but the study in" in " ".join(searching.errors.split())
    searching.pace(0.0)
    (searching.home / "study.py").write_text(study.replace("1e-3, 1e-1", "1.0, 2.0"))
    again = values(searching.run("--trials", "2"))
    assert again[0] == quiet[0], "a trial that has begun keeps its words"
    assert 1.0 <= again[1][2]["lr"] <= 2.0, "others are proposed by the new file"
