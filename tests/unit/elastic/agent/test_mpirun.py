"""What `--ring mpi` needs is looked for before anything starts."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.agent.process import mpirun
from elastic.agent.worker.mpi_ranks import Ranks
from elastic.errors import ConfigError
from elastic.records.journal import Journal, journal_path, read_all
from runtime.allreduce.ring.mpi import MpiWorld


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with this interpreter and mpi4py and nothing else; returns the only directory of programs."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    return programs


def program(path: Path, says: str) -> None:
    path.write_text(f"#!/bin/sh\necho {says}\n")
    path.chmod(0o755)


def test_without_mpi4py_it_says_what_to_install(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs mpi4py.*pip install 'elastic-ring\[mpi\]'"):
        mpirun.find()


def test_without_mpirun_it_says_what_to_install(bare: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs the mpirun of Open MPI 5.*pip install"):
        mpirun.find()


@pytest.mark.parametrize("info", ["MPI extensions: affinity, cuda", None])
def test_an_mpirun_without_fault_tolerance_is_refused(bare: Path, info: str | None) -> None:
    program(bare / "mpirun", "")
    if info is not None:
        program(bare / "ompi_info", info)
    with pytest.raises(ConfigError, match=r"needs an Open MPI with ULFM.*pip install"):
        mpirun.find()


def test_an_mpirun_with_it_is_found(bare: Path) -> None:
    program(bare / "mpirun", "")
    program(bare / "ompi_info", "MPI extensions: affinity, cuda, ftmpi")
    assert mpirun.find() == str(bare / "mpirun")


def test_mpirun_inherits_no_scheduler_and_no_outer_rank_but_the_users_settings() -> None:
    inherited = {"HOME": "/h", "SLURM_JOB_ID": "7", "PMIX_RANK": "0", "OMPI_MCA_btl": "self,tcp"}
    kept = mpirun.environment(inherited)
    assert kept["HOME"] == "/h"
    assert kept["OMPI_MCA_btl"] == "self,tcp"
    assert not {"SLURM_JOB_ID", "PMIX_RANK"} & kept.keys()
    assert "OMPI_MCA_btl" not in mpirun.environment({**inherited, "OMPI_COMM_WORLD_SIZE": "4"})


def test_what_a_worker_is_told_of_the_ranks_survives_its_environment(tmp_path: Path) -> None:
    ranks = Ranks(("n.0.0", "n.1.0"), tmp_path)
    environment = ranks.to_environment()
    assert json.loads(environment["ELASTIC_MPI"])["workers"] == ["n.0.0", "n.1.0"]
    assert Ranks.from_environment(environment) == ranks


WORKERS = ("n.0.0", "n.1.0", "n.2.0")


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        (["ready.0", "ready.1"], set()),
        (["ready.0", "ready.1", "ready.2"], set(WORKERS)),
        (["ready.0", "ready.1", "ready.2", "joined.2"], {"n.0.0", "n.1.0"}),
    ],
    ids=["not all have come", "all wait", "one has got out"],
)
def test_who_may_wait_in_mpi_init_is_known(files: list[str], wanted: set[str], tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).touch()
    assert Ranks(WORKERS, tmp_path).joining() == wanted


@pytest.mark.parametrize(
    ("joined", "looks", "ended"),
    [
        ([], [100.0, 100.0 + mpirun.JOIN_S - 1], []),
        ([], [100.0, 100.0 + mpirun.JOIN_S, 200.0 + mpirun.JOIN_S], [*WORKERS]),
        ([0, 2], [100.0, 100.0 + mpirun.JOIN_S], ["n.1.0"]),
        ([0, 1, 2], [100.0, 100.0 + mpirun.JOIN_S], []),
    ],
    ids=["there is time", "nobody joined", "one has not", "all have"],
)
def test_who_does_not_get_out_of_mpi_init_in_time_is_ended_once(
    joined: list[int], looks: list[float], ended: list[str], tmp_path: Path
) -> None:
    lost: list[str] = []
    with Journal(tmp_path / "agent.jsonl", "job", "agent", "n") as journal:
        watched = mpirun.Mpirun(tmp_path / "mpirun.log", journal, lost.append)
        watched.look(1.0)  # it has no ranks yet
        watched._ranks = ranks = Ranks(WORKERS, tmp_path)
        watched.look(50.0)  # nobody has come yet
        for n in range(3):
            ranks.ready(n).touch()
        for n in joined:
            ranks.joined(n).touch()
        for now_s in looks:
            watched.look(now_s)
    assert lost == ended


def test_who_ends_with_mpirun_is_said_to_have_ended_by_it_whichever_is_heard_of_first(tmp_path: Path) -> None:
    """The end of a worker may be dealt with before the event loop has been told of that of mpirun."""

    async def run() -> tuple[str, str, str]:
        with Journal(journal_path(tmp_path, "agent"), "job", "agent", "n") as journal:
            watched = mpirun.Mpirun(tmp_path / "mpirun.log", journal, lambda worker_id: None)
            program = mpirun._Program(subprocess.Popen(["sleep", "600"]))
            rank = await asyncio.create_subprocess_exec("sleep", "600", stdin=subprocess.PIPE)
            assert rank.stdin is not None
            watched._ranks, watched._program = Ranks(WORKERS[:1], tmp_path), program
            watched._holders[WORKERS[0]] = mpirun._Holder(rank.pid, {}, rank.stdin)
            try:
                before = watched.why_lost(WORKERS[0])
                rank.kill()
                await rank.wait()
                alone = watched.why_lost(WORKERS[0])
                os.kill(program.pid, signal.SIGKILL)
                os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)
                return before, alone, watched.left(WORKERS[0])
            finally:
                await watched.close()

    assert asyncio.run(run()) == ("", "its rank of mpirun was ended", "mpirun killed by SIGKILL")
    (ended,) = [line for line in read_all(tmp_path) if line["event"] == "mpirun_ended"]
    assert ended["because"] == "killed by SIGKILL"


@pytest.mark.parametrize("came", [True, False])
def test_who_waits_for_the_others_hears_that_one_has_ended(came: bool, tmp_path: Path) -> None:
    ranks = Ranks(("n.0.0", "n.1.0", "n.2.0"), tmp_path)
    if came:
        ranks.ready(1).touch()
    ranks.gone(1).touch()
    with (
        Journal(tmp_path / "n.0.0.jsonl", "job", "n.0.0", "n") as journal,
        pytest.raises(ConfigError, match=r"n\.1\.0 ended before all had called elastic\.join\(\)"),
    ):
        MpiWorld(ranks, "n.0.0", journal)
