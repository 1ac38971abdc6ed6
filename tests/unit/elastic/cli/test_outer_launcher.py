"""Under mpirun and srun a command is started several times, and one of them acts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic.errors import ConfigError
from elastic.platforms.local.outer_launcher import Launch, find

ROOT = Path(__file__).resolve().parents[4]
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "PMIX_NAMESPACE": "prterun-host-17@1",
}
SLURM = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_LOCALID": "2",
}
HYDRA = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        (OPEN_MPI, Launch("mpirun", "mpirun-prterun-host-17@1", 3, 4)),
        (SLURM, Launch("srun", "srun-71.0", 2, 4)),
        (HYDRA, Launch("mpiexec", "mpiexec-99", 1, 2)),
    ],
)
def test_each_launcher_says_which_of_its_processes_this_is(environment: dict[str, str], launch: Launch) -> None:
    assert find(environment, parent=99) == launch


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"},
        {"SLURM_JOB_ID": "71", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    ],
    ids=["nothing", "one process", "a batch script, which is one process whatever it asked for"],
)
def test_one_process_is_no_launch(environment: dict[str, str]) -> None:
    assert find(environment, parent=99) is None


@pytest.mark.parametrize(
    "environment", [{**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, {**SLURM, "SLURM_STEP_NUM_NODES": "2"}]
)
def test_several_machines_are_refused_with_what_to_do(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"several machines.*`elastic agent` once on each"):
        find(environment, parent=99)


def test_half_an_environment_names_what_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"OMPI_COMM_WORLD_LOCAL_RANK is missing.*unset OMPI_COMM_WORLD_SIZE"):
        find({"OMPI_COMM_WORLD_SIZE": "4"}, parent=99)


PROGRAM = """
import os, sys
from elastic.platforms.local.outer_launcher import Launch
from elastic.platforms.local import one_of_many
launch = Launch("mpirun", "key", int(sys.argv[1]), 3)
one_of_many.MEET_S = 600  # who acts may be gone at once, and is not waited for
cpus = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {cpus[launch.local_rank % len(cpus)]})
def act():
    print("acted on", len(os.sched_getaffinity(0)), flush=True)
    ACT
print("exits")
sys.exit(one_of_many.follow(launch) if launch.local_rank else one_of_many.lead(launch, act))
"""
Started = Callable[[str], list[subprocess.Popen[str]]]


@pytest.fixture
def start(tmp_path: Path) -> Started:
    def three(act: str) -> list[subprocess.Popen[str]]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
        command = [sys.executable, "-c", PROGRAM.replace("ACT", act)]
        return [
            subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE, text=True)
            for rank in (2, 0, 1)
        ]

    return three


@pytest.mark.parametrize(
    ("act", "code"),
    [
        ("return 7", 7),
        ("from elastic.errors import ConfigError; sys.stderr = None; raise ConfigError('no')", 2),
        ("os.kill(os.getpid(), 9)", 1),
    ],
)
def test_all_end_as_the_one_that_acts(start: Started, tmp_path: Path, act: str, code: int) -> None:
    """It may use the processors of all, which a launcher has often divided."""
    processes = start(act)
    said = [process.communicate(timeout=60)[0] for process in processes]
    followers = [processes[0].returncode, processes[2].returncode]
    assert followers == [code, code]
    assert [text.count("acted") for text in said] == [0, 1, 0]
    assert f"acted on {min(3, len(os.sched_getaffinity(0)))}" in said[1]
    if "kill" not in act:
        assert list(tmp_path.iterdir()) == []
