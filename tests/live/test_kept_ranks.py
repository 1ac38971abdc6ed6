"""`elastic run --restart --ranks N` with elastic.keep: deaths and joins leave the bits of a quiet torchrun with N
processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from elastic.store.embedded import EmbeddedEtcd
from tests.live.jobs import DEADLINE_S, ROOT, Job
from tests.live.spread import Spread
from tests.live.test_kept import Rounds
from tests.live.test_kept_nodes import lose, memory

__all__ = ["memory"]
pytestmark = pytest.mark.long

SCRIPT = ROOT / "tests" / "live" / "programs" / "kept_ranks.py"
RANKS, STEPS = 4, 8


def under_torchrun(kind: str, home: Path, steps: int = STEPS) -> str:
    """The digest of a quiet run."""
    (home / "go").touch()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command = [*words, str(SCRIPT), kind, str(home), str(steps)]
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=DEADLINE_S)
    return (home / "digest").read_text()


@contextmanager
def one_of_three_nodes_lost(
    home: Path, memory: Path, files: Path, steps: int
) -> Iterator[tuple[Spread, Rounds, dict[str, subprocess.Popen[bytes]], int]]:
    """A job over the nodes a, b and c has done 4 steps, and c is then lost with its memory. Gives job, rounds, agents,
    and the number of the round of the two nodes that are left."""
    command = (sys.executable, str(SCRIPT), "gan", str(files), str(steps))
    spec: dict[str, Any] = {"command": command, "restart": True, "ranks": RANKS, "workers": 3}
    with ExitStack() as stack:
        etcd = stack.enter_context(EmbeddedEtcd())
        job = stack.enter_context(Spread(home, etcd, "ranks", memory=memory, **spec))
        job.rendezvous()
        agents = {node: job.agent(node) for node in ("a", "b", "c")}
        rounds = Rounds(job.until, files)
        rounds.open(0, 1, 2, 3)
        first = rounds.await_step(4, world=RANKS)
        lose("c", agents["c"], memory)
        yield job, rounds, agents, job.until("a round of two nodes", lambda: rounds.begun_after(first, RANKS))


@pytest.mark.parametrize("kind", ["barlow", "gan"])
def test_scripts_with_collectives_anywhere_have_the_bits_of_torchrun(kind: str, tmp_path: Path) -> None:
    """A script and a worker are killed (or a script is stopped), replacements join, and each rank goes on with what it
    had."""
    quiet, files = tmp_path / "quiet", tmp_path / "files"
    quiet.mkdir()
    files.mkdir()
    options = ("--workers", "3", "--restart", "--ranks", str(RANKS))
    with Job(tmp_path, *options, str(SCRIPT), kind, str(files), str(STEPS)) as running:
        rounds = Rounds(running.until, files)
        rounds.open(0, 1, 2)
        first = rounds.await_step(3, world=RANKS)
        os.kill(rounds.started(first)[2][0], signal.SIGKILL if kind == "barlow" else signal.SIGSTOP)
        rounds.open(3, 4)
        second = rounds.await_step(5, world=RANKS)
        assert second > first
        running.until("three workers", lambda: len(running.members()) == 3)
        running.send(running.members()[0])
        # Not before: scripts of the round in progress might do the step until they are ended with their worker.
        running.until("another round", lambda: rounds.begun_after(second, RANKS))
        rounds.open(5)
        rounds.await_step(6, world=RANKS)
        rounds.open(6, 7)
        assert running.wait() == 0, running.story()
        last = max(int(path.stem) for path in files.glob("*.0"))
        rounds.check(last, again=1)
        worlds = {(line["rank"], line["world"]) for line in running.events("script_started")}
        assert worlds == {(rank, RANKS) for rank in range(RANKS)}
    assert (files / "digest").read_text() == under_torchrun(kind, quiet)


def test_all_workers_are_killed_at_once(tmp_path: Path) -> None:
    """The memory of the machine is still there."""
    quiet, files = tmp_path / "quiet", tmp_path / "files"
    quiet.mkdir()
    files.mkdir()
    options = ("--workers", "3", "--restart", "--ranks", str(RANKS))
    with Job(tmp_path, *options, str(SCRIPT), "barlow", str(files), str(STEPS)) as running:
        rounds = Rounds(running.until, files)
        rounds.open(0, 1, 2)
        first = rounds.await_step(3, world=RANKS)
        for pid in running.workers().values():
            os.kill(pid, signal.SIGKILL)
        second = running.until("another round", lambda: rounds.begun_after(first, RANKS))
        assert rounds.started(second)[0][2] >= 2
        (files / "go").touch()
        assert running.wait() == 0, running.story()
    assert (files / "digest").read_text() == under_torchrun("barlow", quiet)


def test_nodes_are_lost_with_their_memory_and_new_ones_join(tmp_path: Path, memory: Path) -> None:
    """The second one is lost before a step is done, so what it alone had was copied before scripts began."""
    quiet, files = tmp_path / "quiet", tmp_path / "files"
    quiet.mkdir()
    files.mkdir()
    with one_of_three_nodes_lost(tmp_path, memory, files, STEPS) as (job, rounds, agents, second):
        assert rounds.done(second, 0) == [], "no process may begin the next step"
        lose("b", agents["b"], memory)
        third = job.until("a round of one node", lambda: rounds.begun_after(second, RANKS))
        rounds.open(4)
        rounds.await_step(5, world=RANKS)
        for node in ("b", "c"):
            (memory / node).mkdir()
            job.agent(node)
        rounds.open(*range(5, STEPS))
        assert job.await_result()["exit_code"] == 0
        last = max(int(path.stem) for path in files.glob("*.0"))
        rounds.check(last, again=2)
        assert rounds.started(third)[0][2] >= 2, "it has not begun anew"
    assert (files / "digest").read_text() == under_torchrun("gan", quiet)
