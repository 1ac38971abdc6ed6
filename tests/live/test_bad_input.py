"""Scripts that are wrong, or whose workers are: the job ends with the exit code and the words for it, or goes on."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from elastic.errors import ExitCode
from tests.live.jobs import SCRIPTS, Job

MISCHIEF = SCRIPTS / "mischief.py"


def run(home: Path, what: str, *options: str) -> Job:
    return Job(home, "--quiet", "--workers", "2", *options, str(MISCHIEF), what)


def said(job: Job) -> str:
    """The last paragraph of the command's output, as one line."""
    return " ".join(job.output.strip().split("\n\n")[-1].split())


@pytest.mark.parametrize(
    ("what", "words"),
    [
        pytest.param("no shards", "ConfigError: shards=0", marks=pytest.mark.long),
        ("one shard is poison", "ValueError: poison"),
        pytest.param("an exit with words behind the loop", "SystemExit: no data", marks=pytest.mark.long),
    ],
)
def test_the_same_exception_at_the_same_place_ends_the_job_with_its_traceback_first(
    what: str, words: str, tmp_path: Path
) -> None:
    with run(tmp_path, what, "--min-workers", "2") as job:  # a worker that comes later is not both
        assert job.wait() == ExitCode.SCRIPT_FAILED
        assert job.output.count("Traceback (most recent call last):") == job.output.count(words) == 1
        assert job.output.index(words) < job.output.rindex("elastic: ")
        assert "both raised at" in job.output
        assert len(job.events("worker_started")) <= 4, "it must not be tried for ever"
        assert job.left_behind() == {}


@pytest.mark.long
def test_cuda_errors_of_several_workers_in_the_same_step_do_not_end_the_job(tmp_path: Path) -> None:
    """As when a link between GPUs fails."""
    with run(tmp_path, "two devices fail", "--workers", "3") as job:
        job.pace(0.3)  # the steps behind the errors take half a minute
        for slot in (1, 2):
            job.await_event("worker_exited", worker_id=f"local.{slot}.0", because="exited with 1")
        assert "local.0.0" in job.await_world(3)
        job.pace(0)
        assert job.wait() == ExitCode.DONE
        assert len(job.steps()) == 40
        assert job.output.count("CUDA error: unspecified launch failure") >= 1, "the operator is told"


@pytest.mark.long
def test_a_loader_process_that_is_killed_costs_its_worker_and_nobody_else(tmp_path: Path) -> None:
    """As by the kernel when memory runs out."""
    with run(tmp_path, "a loader process is killed") as job:
        job.shut("end")  # the other worker might have finished before this one's process has ended
        job.await_event("worker_exited", because="exited with 1")
        job.open("end")
        assert job.wait() == ExitCode.DONE
        assert len(job.steps()) == 40
        assert [line["worker_id"] for line in job.events("worker_exited", because="exited with 1")] == ["local.1.0"]
        told, first = (job.dir / "logs" / "local.1.0.log").read_text(), "Traceback (most recent call last):"
        lines = job.output.splitlines()
        (named,) = [line for line in lines if line.startswith("elastic: local.1.0 exited with 1 at DataWorkerDied")]
        assert f" {MISCHIEF}:" in named and ", and is replaced" in named
        assert lines[lines.index(named) + 1] == first
        assert job.output.count(first) == told.count(first)
        for part in ("DataWorkerDied", "loader(workers=1) has ended", "killed by SIGKILL", "Lower workers="):
            assert part in told
        assert job.left_behind() == {}


@pytest.mark.long
def test_a_script_that_fails_before_join_is_tried_once_more(tmp_path: Path) -> None:
    (tmp_path / "typo.py").write_text("import no_such_module\n")
    with Job(tmp_path, "--quiet", "typo.py") as job:
        assert job.wait() == ExitCode.SCRIPT_FAILED
        assert "No module named 'no_such_module'" in job.output
        assert job.output.count("Traceback (most recent call last):") == 1
        assert f"exited with 1 at {tmp_path}/typo.py:1; so did the one before it, at the same place" in said(job)
        assert len(job.events("worker_started")) <= 4
        assert job.left_behind() == {}


@pytest.mark.long
def test_several_workers_that_train_each_for_itself_end_the_job(tmp_path: Path) -> None:
    """As the loop of a library does, which knows of no job."""
    (tmp_path / "fit.py").write_text("import elastic\njob = elastic.join()\nrun = job.shared('run', lambda: 'a')\n")
    with Job(tmp_path, "--quiet", "--workers", "2", "fit.py") as job:
        assert job.wait() == ExitCode.SCRIPT_FAILED
        assert "NoSteps: the script has ended without one step of job.steps()" in job.output
        assert "`for step in job.steps(train, total=1000):`" in job.output
        assert job.left_behind() == {}


@pytest.mark.long
def test_exits_by_the_script_are_counted_and_end_the_slot_while_the_others_go_on(tmp_path: Path) -> None:
    with run(tmp_path, "each time another mistake", "--max-restarts", "0") as job:
        job.shut("end")
        given_up = job.await_event("slot_given_up", slot=1)
        job.open("end")
        assert job.wait() == ExitCode.DONE
        assert "max_restarts=0" in given_up["because"]
        assert "ValueError: at step" in given_up["because"]
        assert "slot local.1 gets no worker any more: local.1.0 exited with 1" in job.output
        assert job.output.count("ValueError: at step") == 1, "its traceback"
        assert len(job.steps()) == 40
        assert job.steps()[-1]["world_size"] == 1


@pytest.mark.long
def test_newcomers_that_raise_beside_members_are_not_the_scripts_fault(tmp_path: Path) -> None:
    with run(tmp_path, "newcomers raise", "--max-restarts", "0") as job:
        job.pace(0.3)  # the steps behind the death take half a minute
        job.await_steps(2)
        job.send("local.1.0")
        job.await_event("joined", worker_id="local.1.4")
        job.pace(0)
        assert job.wait() == ExitCode.DONE
        assert len(job.steps()) == 40
        assert not job.events("slot_given_up")
        assert "before its first step; members train on with this script, so the next one is tried in 2 s" in job.output


@pytest.mark.long
def test_initial_parameters_that_differ_are_copied_from_rank_0_and_said(tmp_path: Path) -> None:
    with run(tmp_path, "initial parameters differ") as job:
        assert job.wait() == ExitCode.DONE
        assert "the initial parameters of local.1.0 differed from rank 0's and were copied from local.0.0" in job.output
        assert len(job.steps()) == 40


@pytest.mark.long
def test_workers_that_disagree_are_named_with_their_values(tmp_path: Path) -> None:
    with run(tmp_path, "states differ") as job:
        assert job.wait() == ExitCode.DISAGREE
        for part in ("Disagree", "local.0.0", "local.1.0", '{"level": 0}', '{"level": 1}'):
            assert part in job.output
        assert "stopped the job at Disagree" in job.output.splitlines()[-1]
        assert job.left_behind() == {}


@pytest.mark.long
def test_a_worker_that_leaves_the_loop_alone_is_named(tmp_path: Path) -> None:
    with run(tmp_path, "one leaves the loop") as job:
        assert job.wait() == ExitCode.DISAGREE
        assert "LeftAlone" in job.output
        assert "local.1.0" in job.output
        assert "job.stop(" in job.output, "the fix"
        assert job.left_behind() == {}


@pytest.mark.long
def test_different_numerics_at_formation_are_an_error(tmp_path: Path) -> None:
    with run(tmp_path, "threads differ") as job:
        assert job.wait() == ExitCode.BAD_INPUT
        assert "cannot take part in an exact job" in said(job)
        assert "local.0.0" in said(job)
        assert "--reduction allreduce" in said(job)
        assert job.steps() == []
        assert job.left_behind() == {}


@pytest.mark.long
def test_a_newcomer_with_other_numerics_is_refused_by_name_and_the_job_goes_on(tmp_path: Path) -> None:
    with run(tmp_path, "a newcomer's threads differ", "--max-restarts", "0") as job:
        job.pace(0.1)
        job.shut("end")
        job.await_world(2)
        job.send("local.1.0")
        refused = job.await_event("refused", worker_id="local.1.1")
        assert "differ from those of local.0.0" in refused["because"]
        job.await_event("worker_exited", worker_id="local.1.1")
        job.open("end")
        steps = len(job.steps())
        job.until("the job goes on", lambda: len(job.steps()) > steps)
        job.pace(0)
        assert job.wait() == ExitCode.DONE
        assert "local.1.1 is refused: its numerics" in job.output
        assert len(job.steps()) == 40
        assert job.left_behind() == {}


@pytest.mark.long
def test_the_loss_of_every_copy_ends_the_job_and_names_the_step(tmp_path: Path) -> None:
    """No restart from step 0 behind the user's back."""
    with run(tmp_path, "nothing", "--snapshot-every", "off") as job:
        job.shut("end")
        workers = [job.workers()[worker] for worker in job.await_world(2)]
        job.await_steps(30)
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        assert job.wait() == ExitCode.STATE_LOST
        assert "every copy of the state is lost after 30 applied steps" in said(job)
        assert len(job.steps()) == 30
        assert job.left_behind() == {}


@pytest.mark.long
@pytest.mark.parametrize("how", ["all are killed", "one is killed", "nobody is"])
def test_a_job_whose_directory_is_removed_ends_and_says_so(how: str, tmp_path: Path) -> None:
    with run(tmp_path, "nothing", "--snapshot-every", "off") as job:
        job.shut("end")
        workers = [job.workers()[worker] for worker in job.await_world(2)]
        first = set(job.members())
        job.await_steps(30)
        shutil.rmtree(job.dir.rename(tmp_path / "moved"), ignore_errors=True)
        for pid in {"all are killed": workers, "one is killed": workers[1:], "nobody is": []}[how]:
            os.kill(pid, signal.SIGKILL)
        job.until("somebody is told", lambda: f"{job.dir} was removed or moved while the job ran" in said(job))
        if how == "one is killed":
            job.until("its successor comes", lambda: {e["worker_id"] for e in job.events("steps_planned")} - first)
        job.open("end")
        assert job.wait() == (ExitCode.STATE_LOST if how == "all are killed" else ExitCode.DONE)
        assert "Traceback" not in job.output
        if how == "all are killed":
            assert "every copy of the state is lost" in said(job) and str(job.dir) in said(job).rsplit(";", 1)[1]
        assert job.left_behind() == {}


@pytest.mark.long
def test_a_world_below_its_quorum_that_is_not_replaced_ends_the_job(tmp_path: Path) -> None:
    with run(tmp_path, "nothing", "--min-workers", "2", "--no-replace") as job:
        job.shut("end")
        job.send(job.await_world(2)[1])
        assert job.wait() == ExitCode.BELOW_QUORUM
        assert "1 of at least 2 workers" in said(job)
        assert job.left_behind() == {}
