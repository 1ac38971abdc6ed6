"""Gradients over MPI: ranks and mpirun die, join and freeze, and the bits are those of the quiet run over TCP."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos_tests.support.processes import command_line, living
from elastic.agent.process.mpirun import Mpirun, find
from elastic.records.journal import Journal, read_all
from tests.live.conftest import Quiet
from tests.live.jobs import DEADLINE_S, ROOT, TRAINER, Job, Line

pytestmark = pytest.mark.long

SITE = Path(__file__).parent / "mpi_site"
BRIEF = Path(TRAINER).with_name("brief.py")


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    """Whatever a job of these tests leaves in shared memory fails the test."""
    before = set(Path("/dev/shm").glob("sm_segment*"))
    yield
    assert set(Path("/dev/shm").glob("sm_segment*")) <= before


def mpirun_of(job: Job) -> int:
    """The pid of the mpirun that this job has started; its own name for itself is prterun."""
    lines = {pid: command_line(pid) for pid in living(job.command.mark)}
    (pid,) = [pid for pid, line in lines.items() if "prterun" in line and "placeholder.py" in line]
    return pid


def carried(job: Job, over: str) -> str | None:
    """Why the gradients go this way, as `elastic status` says it; None if they do not, or nobody can say."""
    ring = job.status().get("ring", {})
    return str(ring["because"]) if ring.get("asked") == "mpi" and ring["over"] == over else None


def check_end(job: Job, quiet: Quiet) -> None:
    assert job.wait() == 0
    assert job.result["digest"] == quiet.digest
    assert job.left_behind() == {}


def test_the_sums_over_mpi_are_those_over_the_mesh_and_a_ring_is_rebuilt_without_leaks(tmp_path: Path) -> None:
    """See programs/mpi_member.py: the last rank never comes to an exchange, and the others go on without it."""
    ids = ["n.0.0", "n.1.0", "n.2.0"]
    (tmp_path / "members").write_text(" ".join(ids))
    first, second, last = asyncio.run(_members(tmp_path, ids))
    assert [line["event"] for line in last] == ["same", "blocked"]
    for lines in (first, second):
        assert [line["event"] for line in lines] == ["same", "broken", "warm", "settled", "rebuilt", "swept", "end"]
        settled, rebuilt, swept = lines[3:6]
        assert (rebuilt["threads"], rebuilt["fds"]) == (settled["threads"], settled["fds"])
        assert swept["left"] == 1, "only what the last one has never received"


async def _members(home: Path, ids: list[str]) -> list[list[Line]]:
    """What each said; the last one, which would wait for ever, is ended when the others have."""
    with Journal(home / "agent.jsonl", "job", "agent", "n") as journal:
        mpirun = Mpirun(home / "mpirun.log", journal, on_lost=lambda worker_id: None)
        await mpirun.start(ids)
        try:
            members = [
                await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "tests.live.programs.mpi_member", str(home), worker),
                    env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **mpirun.settings(worker)},
                    stdout=subprocess.PIPE,
                )
                for worker in ids
            ]
            try:
                outputs = [asyncio.create_task(member.communicate()) for member in members]
                await asyncio.wait_for(asyncio.gather(*outputs[:-1]), DEADLINE_S)
                assert [member.returncode for member in members[:-1]] == [0, 0]
            finally:
                for member in members:
                    if member.returncode is None:
                        member.kill()
                said = [(await output)[0] for output in outputs]
        finally:
            await mpirun.close()
    return [[json.loads(line) for line in text.splitlines()] for text in said]


def test_ranks_die_and_join_and_the_others_go_on_with_the_same_bits(quiet: Quiet, tmp_path: Path) -> None:
    """A spare has a rank, so MPI carries the gradients to it too; a process that starts later has none."""
    with Job(tmp_path, "--ring", "mpi", "--workers", "3", "--min-workers", "3", "--spares", "1", str(TRAINER)) as job:
        job.pace(0.03)
        job.shut("end")
        job.await_steps(3)
        first = job.workers()
        assert job.await_event("ring_over_mpi", generation=1)["ranks"] == [0, 1, 2]
        assert job.await_event("ring_up", generation=1)["over"] == "mpi"
        job.until("what carries the gradients", lambda: carried(job, over="mpi") == "")
        job.send("local.1.0")
        job.until("two ranks alone", lambda: any(line["ranks"] == [0, 2] for line in job.events("ring_over_mpi")))
        job.until("the spare", lambda: any(line["ranks"] == [0, 2, 3] for line in job.events("ring_over_mpi")))
        job.until("it is a member", lambda: "local.3.0" in job.members())
        job.send("local.0.0")
        late = job.await_event("ring_without_mpi")
        assert "starts after mpirun; spares (--spares) have one" in late["because"]
        because = job.until("what carries the gradients", lambda: carried(job, over="tcp"))
        assert because == late["because"]
        job.pace(0)
        job.open("end")
        check_end(job, quiet)
        ended = {line["worker_id"]: line["pid"] for line in job.events("worker_exited", because="exited with 0")}
        assert {worker: ended[worker] for worker in ("local.2.0", "local.3.0")}.items() <= first.items()
        assert "over TCP" in job.output


def test_a_frozen_rank_is_left_behind(quiet: Quiet, tmp_path: Path) -> None:
    """MPI cannot give up a message half-way; the job can."""
    with Job(tmp_path, "--ring", "mpi", "--workers", "3", "--no-replace", str(TRAINER)) as job:
        job.pace(0.03)
        job.shut("end")
        job.await_steps(3)
        job.send("local.1.0", signal.SIGSTOP)
        job.until("two ranks alone", lambda: any(line["ranks"] == [0, 2] for line in job.events("ring_over_mpi")))
        job.pace(0)
        job.open("end")
        check_end(job, quiet)


def test_the_end_of_mpirun_ends_all_ranks_and_the_job_goes_on_from_its_copy(quiet: Quiet, tmp_path: Path) -> None:
    with Job(tmp_path, "--ring", "mpi", "--workers", "2", "--snapshot-every", "5 steps", str(TRAINER)) as job:
        job.pace(0.03)
        job.shut("end")
        job.await_event("snapshot_complete")
        os.kill(mpirun_of(job), signal.SIGKILL)
        job.until("a ring over another mpirun", lambda: len(job.events("ring_over_mpi")) > 1)
        job.pace(0)
        job.open("end")
        check_end(job, quiet)
        assert "mpirun killed by SIGKILL, and every worker that had a rank of it ends with it" in job.output
        assert "local.0.0, local.1.0 (mpirun killed by SIGKILL)" in job.output


def test_a_rank_that_dies_in_mpi_init_ends_those_that_wait_for_it_and_the_job_goes_on_without_mpi(
    quiet: Quiet, tmp_path: Path
) -> None:
    (tmp_path / "job.gates").mkdir()
    (tmp_path / "job.gates" / "mpi-init").write_text("local.1.0")
    with Job(tmp_path, "--ring", "mpi", "--workers", "3", str(TRAINER), site=SITE) as job:
        job.await_held("mpi-init")
        job.send("local.1.0")
        assert job.await_event("mpi_not_started")["ended"] == ["local.0.0", "local.2.0"]
        over = job.await_event("ring_up", generation=1)
        assert over["over"] == "tcp"
        assert over["because"].startswith("MPI has no rank for local.0.1, local.1.1, local.2.1, because it gives none")
        check_end(job, quiet)
        assert "MPI cannot start: local.1.0 ended" in job.output


def test_a_rank_that_hangs_in_mpi_init_ends_with_all_others_and_the_job_goes_on_without_mpi(
    quiet: Quiet, tmp_path: Path
) -> None:
    (tmp_path / "job.gates").mkdir()
    (tmp_path / "job.gates" / "mpi-init").write_text("local.1.0")
    with Job(tmp_path, "--ring", "mpi", "--workers", "3", str(TRAINER), site=SITE) as job:
        job.await_held("mpi-init")
        job.send("local.1.0", signal.SIGSTOP)
        stopped = job.await_event("mpi_not_started")
        assert stopped["because"] == "not all workers had joined the others within 60 s"
        assert stopped["ended"] == ["local.0.0", "local.1.0", "local.2.0"]
        check_end(job, quiet)


def test_one_of_the_processes_that_mpirun_starts_runs_the_job(tmp_path: Path) -> None:
    """And the others end as it does."""
    command = [find(), "--oversubscribe", "-n", "3", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    words = [sys.executable, "-m", "elastic.cli", "run", "--job-dir", str(tmp_path / "job"), str(BRIEF), "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run([*command, *words], env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("digest") == 1
    (formed,) = [line for line in read_all(tmp_path / "job") if line["event"] == "published"]
    assert formed["because"] == "3 of 3 workers are here"
    assert not [*tmp_path.glob("elastic-siblings-*"), *tmp_path.glob("ompi.*")]
