"""elastic.keep over several nodes: what a node has kept is on the next one, too, when it is lost with its memory."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic.store.embedded import EmbeddedEtcd
from tests.live.spread import Spread
from tests.live.test_kept import SCRIPT, STEPS, Rounds, alone
from tests.memory_directory import memory_directory


@pytest.fixture
def memory() -> Iterator[Path]:
    with memory_directory() as directory:
        yield Path(directory)


def all_keep(job: Spread, step: int) -> bool:
    """Whether all three workers have told of this step. Scripts do not wait for that."""
    members = [json.dumps(member) for member in job.status()["members"]]
    return len(members) == 3 and all(f"step {step} kept" in member for member in members)


@contextmanager
def of_three_workers(home: Path, memory: Path) -> Iterator[tuple[Spread, Rounds]]:
    """A job without an agent so far, and its rounds."""
    files = home / "files"
    files.mkdir()
    command = (sys.executable, str(SCRIPT), str(files), str(STEPS))
    with (
        EmbeddedEtcd() as etcd,
        Spread(home, etcd, "job", command=command, restart=True, workers=3, memory=memory) as job,
    ):
        job.rendezvous()
        yield job, Rounds(job.until, files)


def kill_script_of(node: str, job: Spread, rounds: Rounds, number: int) -> None:
    """Of the last worker of the node, in that round."""
    rank = max(rank for rank, worker in enumerate(job.members()) if worker.startswith(f"{node}."))
    os.kill(rounds.started(number)[rank][0], signal.SIGKILL)


def lose(node: str, agent: subprocess.Popen[bytes], memory: Path) -> None:
    """The node, and what is in its memory."""
    agent.kill()  # the kernel ends its worker and the script with it
    shutil.rmtree(memory / node)


def test_two_nodes_are_lost_the_second_one_before_a_step_is_done_and_two_new_ones_join(
    tmp_path: Path, memory: Path
) -> None:
    with of_three_workers(tmp_path, memory) as (job, rounds):
        agents = {node: job.agent(node) for node in ("a", "b", "c")}
        rounds.open(0, 1, 2, 3)
        first = rounds.await_step(4, world=3)
        lose("c", agents["c"], memory)
        second = rounds.await_step(0, world=2)
        assert second > first
        assert rounds.done(second, 0) == [], "no process may begin the next step"
        lose("b", agents["b"], memory)
        third = rounds.await_step(0, world=1)
        rounds.open(4)
        rounds.await_step(5, world=1)
        for node in (
            "b",
            "c",
        ):  # with nothing in memory: one copies what node a alone has, the other one reads it there
            (memory / node).mkdir()
            job.agent(node)
        fourth = rounds.await_step(5, world=3)
        rounds.open(*range(5, STEPS))
        assert job.await_result()["exit_code"] == 0
        rounds.check(fourth, again=2)
        assert rounds.started(third)[0][2] >= 2, "it has not begun anew"
        assert (tmp_path / "files" / "digest").read_text() == alone(STEPS)
        assert job.events("kept_thin") == []
        assert [line["step"] for line in job.steps()] == list(range(STEPS))


@pytest.mark.long
def test_what_is_older_than_a_round_without_memory_is_loaded_on_no_node(tmp_path: Path, memory: Path) -> None:
    """Node a has all parts of two steps, node b has none: its script has kept nothing since."""
    with of_three_workers(tmp_path, memory) as (job, rounds):
        for node, slots in (("a", 2), ("b", 1)):
            job.agent(node, slots=slots)
        rounds.open(0, 1, 2)
        first = rounds.await_step(3, world=3)
        (tmp_path / "files" / "full.b").touch()
        kill_script_of("a", job, rounds, first)
        second = job.until("a round of all", lambda: rounds.begun_after(first, 3))
        rounds.open(3, 4, 5, 6)
        rounds.await_step(7, world=3)
        kill_script_of("a", job, rounds, second)
        third = job.until("another round of all", lambda: rounds.begun_after(second, 3))
        begun = [{step for _, _, step in rounds.started(number).values()} for number in range(second, third + 1)]
        assert begun[0] <= {2, 3} and next(filter(None, begun[1:])) == {0}, "the first round behind it begins anew"
        (tmp_path / "files" / "full.b").unlink()
        rounds.open(7)
        assert job.await_result()["exit_code"] == 0
        assert (tmp_path / "files" / "digest").read_text() == alone(STEPS)
        assert [line["step"] for line in job.steps()] == list(range(STEPS))


@pytest.mark.long
def test_a_round_waits_for_a_node_without_a_worker_whose_memory_it_lacks(tmp_path: Path, memory: Path) -> None:
    """Two of three agents are killed with their workers: the third one has not all parts, and their memory has them."""
    with of_three_workers(tmp_path, memory) as (job, rounds):
        agents = {node: job.agent(node) for node in ("a", "b", "c")}
        for step in range(4):  # one by one, so that the workers have time to learn which step is whole
            rounds.open(step)
            first = rounds.await_step(step + 1, world=3)
            job.until(f"step {step + 1} to be known", lambda step=step: all_keep(job, step + 1))  # type: ignore[misc]
        for node in ("b", "c"):
            agents[node].kill()
        job.await_event("kept_awaited")
        for node in ("b", "c"):
            job.agent(node)
        rounds.open(*range(4, STEPS))
        last = rounds.await_step(STEPS, world=3)
        assert job.await_result()["exit_code"] == 0
        begun = {step for number in range(first + 1, last + 1) for _, _, step in rounds.started(number).values()}
        assert begun and min(begun) >= 2, "no round has begun anew"
        assert (tmp_path / "files" / "digest").read_text() == alone(STEPS)
