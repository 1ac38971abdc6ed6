"""Jobs that lose workers again and again, for a real cause: they end, and the first line names the cause."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from chaos_tests.nemesis.out_of_memory import limited, why_not
from elastic.errors import ExitCode
from tests.live.fleet import Fleet
from tests.live.jobs import ROOT, SCRIPTS, Job

FAILING = SCRIPTS / "failing.py"


def run(home: Path, what: str, *options: str) -> Job:
    return Job(home, "--quiet", "--workers", "2", *options, str(FAILING), what)


class Inside(Job):
    """A job whose processes are in a memory cgroup."""

    def __init__(self, home: Path, cell: Path, what: str) -> None:
        self._cell = cell
        super().__init__(home, "--quiet", "--workers", "2", str(FAILING), what)

    def _program(self, words: Sequence[str]) -> Sequence[str]:
        enter = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); os.execv(sys.executable, sys.argv[2:])"
        return "-c", enter, str(self._cell / "cgroup.procs"), sys.executable, *super()._program(words)


def last_paragraph(job: Job) -> str:
    return " ".join(job.output.strip().split("\n\n")[-1].split())


def why(job: Job) -> str:
    command = [sys.executable, "-m", "elastic.cli", "story", "--why", "--job-dir", str(job.dir)]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=100).stdout


def ruling(job: Job) -> tuple[str, str]:
    """The only verdict, and its sentence."""
    (line,) = job.events("verdict")
    assert why(job).startswith(line["because"])
    return line["ruling"], line["because"]


def test_a_sample_that_crashes_the_decoder_is_named(tmp_path: Path) -> None:
    """SIGSEGV in native code: no worker can say anything any more."""
    with run(tmp_path, "a sample that crashes its decoder") as job:
        assert job.wait() in (ExitCode.SCRIPT_FAILED, ExitCode.STATE_LOST)
        named, because = ruling(job)
        assert named == "data" and because.startswith("the data of shard ")
        assert "samples " in because and "17" in because.split("(")[1].split(")")[0]
        assert "killed by SIGSEGV" in because
        assert because in last_paragraph(job)
        assert job.left_behind() == {}


def test_a_sample_that_raises_is_named_with_the_exception(tmp_path: Path) -> None:
    with run(tmp_path, "a sample that cannot be decoded") as job:
        assert job.wait() == ExitCode.SCRIPT_FAILED
        named, because = ruling(job)
        assert named == "data" and "both raised at ValueError" in because
        assert "samples " in because and "17" in because
        assert because in last_paragraph(job) and "ValueError: sample 17 is no image" in job.output


@pytest.mark.long
def test_a_mistake_of_the_script_ends_the_job_with_the_exception(tmp_path: Path) -> None:
    with run(tmp_path, "a mistake in a step") as job:
        assert job.wait() == ExitCode.SCRIPT_FAILED
        assert "KeyError: 'weights'" in job.output and "KeyError" in last_paragraph(job)
        assert len(job.events("worker_started")) <= 4


@pytest.mark.long
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "")
def test_a_shard_that_needs_more_memory_than_there_is(tmp_path: Path) -> None:
    """The whole job is in a memory cgroup with a limit, which the kernel holds."""
    with limited(2_000_000_000) as cell, Inside(tmp_path, cell, "a shard that is too large") as job:
        assert job.wait() in (ExitCode.SCRIPT_FAILED, ExitCode.STATE_LOST)
        named, because = ruling(job)
        assert named == "memory" and because.startswith("shard 1 in pass 0 of step 5"), because
        assert "no memory was left within the limit of its cgroup, 2.0 GB" in because
        assert because in last_paragraph(job)


@pytest.mark.long
def test_a_node_on_which_no_worker_can_begin_is_left(tmp_path: Path) -> None:
    with Fleet(tmp_path, nodes=("a", "b")) as fleet:
        command = ["python", str(FAILING), "a node whose data are gone"]
        environment = {"LIVE_GATES": str(fleet.gates), "OMP_NUM_THREADS": "1"}
        where = str(tmp_path / "checkpoints")
        job = fleet.submit(name="j", command=command, env=environment, workers=2, min_workers=1, checkpoint_dir=where)
        fleet.await_members(job, "a.0.0", "b.0.0")
        fleet.pace(0.1)
        fleet.kill_worker(job, "b.0.0")
        fleet.until("the node is left", lambda: fleet.events("node_excluded"))
        (line,) = fleet.events("verdict")
        assert line["ruling"] == "node" and line["because"].startswith("node b loses every worker")
        assert "raised RuntimeError" in line["because"]
        before = len(fleet.events("worker_started", worker_id="b.0.9"))
        fleet.await_more_steps(job, 10)
        assert len(fleet.events("worker_started", worker_id="b.0.9")) == before, "its slot gets no other worker"
        assert "a.0.0" in {member["worker_id"] for member in fleet.status(job)["members"]}


@pytest.mark.long
def test_a_first_step_that_no_worker_survives_ends_the_job(tmp_path: Path) -> None:
    """Each exit comes without a word, and in other shards than the one before: nothing but its number proves a thing.
    The waits between the attempts are short here; with those of a user the job needs minutes to try so often."""
    with Fleet(tmp_path, nodes=("a", "b")) as fleet:
        command = ["python", str(FAILING), "a first step that no worker survives"]
        fields = {"workers": 2, "max_restarts": 100, "checkpoint_dir": str(tmp_path / "checkpoints")}
        waits = {"backoff_min_s": 0.05, "backoff_max_s": 0.1}
        job = fleet.submit(name="j", command=command, env={"OMP_NUM_THREADS": "1"}, timing=waits, **fields)
        fleet.until("the verdict", lambda: fleet.events("verdict"))
        (line,) = fleet.events("verdict")
        assert line["ruling"] == "no progress"
        assert line["because"].startswith("the job makes no progress, 20 generations in a row ended before a step")
        assert "exited with 3" in line["because"], line["because"]
        assert fleet.await_end(job)["exit_code"] == ExitCode.SCRIPT_FAILED
