"""elastic.keep over several nodes: a part is damaged, or lost on both nodes that had it, or a node has no memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chaos_tests.nemesis.out_of_memory import limited, why_not
from elastic.errors import CheckpointCorrupt
from elastic.store.embedded import EmbeddedEtcd
from runtime.recovery.kept.place import directory_of, rounds_in
from runtime.recovery.kept.segment import HEADER_BYTES, read_header, segments_in
from tests.live.spread import Spread
from tests.live.test_kept import SCRIPT, STEPS, Rounds, alone, quiet
from tests.live.test_kept_nodes import lose, memory
from tests.live.test_kept_ranks import RANKS, under_torchrun
from tests.live.test_kept_ranks import SCRIPT as RANKS_SCRIPT

__all__ = ["memory"]
pytestmark = pytest.mark.long

NODES = ("a", "b", "c")
Agent = subprocess.Popen[bytes]


@contextmanager
def three_nodes(home: Path, memory: Path, files: Path) -> Iterator[tuple[Spread, dict[str, Agent], Rounds, int]]:
    """A job over the nodes a, b and c that has done 4 steps. Gives job, agents, rounds, and the number of the round."""
    files.mkdir()
    command = (sys.executable, str(SCRIPT), str(files), str(STEPS))
    with (
        EmbeddedEtcd() as etcd,
        Spread(home, etcd, "rounds", command=command, restart=True, workers=3, memory=memory) as job,
    ):
        job.rendezvous()
        agents = {node: job.agent(node) for node in NODES}
        rounds = Rounds(job.until, files)
        rounds.open(0, 1, 2, 3)
        yield job, agents, rounds, rounds.await_step(4, world=3)


def newest(memory: Path, part: int) -> list[Path]:
    """The segments of that part, on all nodes, of step 4."""
    found = []
    for node in NODES:
        for number in rounds_in(str(memory / node)):
            for path in segments_in(directory_of(str(memory / node), number)):
                try:
                    header = read_header(path)
                except CheckpointCorrupt:  # it is being written
                    continue
                if header is not None and (header.step, header.part) == (4, part):
                    found.append(path)
    return found


def await_mirrored(job: Spread, memory: Path) -> None:
    """Until step 4 is whole on two nodes: without it the next round goes on from step 3."""
    job.until("step 4 is mirrored", lambda: all(len(newest(memory, part)) > 1 for part in range(len(NODES))))


def test_a_node_and_the_one_that_mirrors_it_are_lost_at_once(tmp_path: Path, memory: Path) -> None:
    """The script begins with its own files (it has none), and what is lost is named."""
    files = tmp_path / "files"
    with three_nodes(tmp_path, memory, files) as (job, agents, rounds, first):
        await_mirrored(job, memory)
        for node in ("b", "c"):
            lose(node, agents[node], memory)
        second = job.until("a round of one node", lambda: rounds.begun_after(first, 1))
        (line,) = job.events("kept_incomplete")
        assert line["because"] == f"step 4 of round {first + 1} lacks 1 of 3 parts: 1"
        assert [begun for _, _, begun in rounds.started(second).values()] == [0]
        assert "lacks 1 of 3 parts" in job.told(second + 1)
        rounds.open(*range(4, STEPS))
        assert job.await_result()["exit_code"] == 0
    assert (files / "digest").read_text() == alone(STEPS)


def test_with_two_copies_a_node_and_the_next_one_may_be_lost_at_once(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tmp_path / "files"
    monkeypatch.setenv("COPIES", "2")
    with three_nodes(tmp_path, memory, files) as (job, agents, rounds, first):
        for node in ("b", "c"):
            lose(node, agents[node], memory)
        second = job.until("a round of one node", lambda: rounds.begun_after(first, 1))
        assert [begun >= 3 for _, _, begun in rounds.started(second).values()] == [True]
        rounds.open(*range(4, STEPS))
        result = job.await_result()
        assert result["exit_code"] == 0
        digest, lines, of_job = quiet(tmp_path)
        assert (files / "digest").read_text() == digest and result["digest"] == of_job
        assert [line["step"] for line in job.steps()] == [line["step"] for line in lines]


def test_with_two_copies_what_two_of_three_have_is_on_the_third_one_before_scripts_start(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new node is the only one that is left, before a process has begun a step there."""
    files = tmp_path / "files"
    monkeypatch.setenv("COPIES", "2")
    with three_nodes(tmp_path, memory, files) as (job, agents, rounds, first):
        lose("c", agents["c"], memory)
        second = job.until("a round of two nodes", lambda: rounds.begun_after(first, 2))
        (memory / "c").mkdir()
        job.agent("c")
        third = job.until("a round of three nodes", lambda: rounds.begun_after(second, 3))
        assert [rounds.done(third, rank) for rank in range(3)] == [[]] * 3, "no process may begin the next step"
        for node in ("a", "b"):
            lose(node, agents[node], memory)
        last = job.until("a round of the new node", lambda: rounds.begun_after(third, 1))
        assert [begun >= 3 for _, _, begun in rounds.started(last).values()] == [True]
        assert job.events("kept_not_copied") == [] and job.events("kept_incomplete") == []
        rounds.open(*range(4, STEPS))
        assert job.await_result()["exit_code"] == 0
    assert (files / "digest").read_text() == alone(STEPS)


def test_a_flipped_bit_is_found_before_it_is_loaded_and_the_mirror_is_taken(tmp_path: Path, memory: Path) -> None:
    files = tmp_path / "files"
    with three_nodes(tmp_path, memory, files) as (job, _, rounds, first):
        await_mirrored(job, memory)
        own, _ = newest(memory, 0)
        with open(own, "r+b") as file:
            file.seek(HEADER_BYTES + 3)
            byte = file.read(1)[0]
            file.seek(HEADER_BYTES + 3)
            file.write(bytes([byte ^ 16]))
        # On the node that has no mirror of that part: the next round may begin before its new worker has joined.
        os.kill(rounds.started(first)[2][0], signal.SIGKILL)
        second = job.until("another round", lambda: rounds.begun_after(first, 2) or rounds.begun_after(first, 3))
        (line,) = job.events("kept_damaged")
        assert line["segment"] == f"{own.parent.name}/{own.name}" and "checksum" in line["because"]
        assert {begun for _, _, begun in rounds.started(second).values()} == {4}, "no step is done again"
        assert any("a damaged piece" in job.told(number + 1) for number in range(first + 1, second + 1))
        rounds.open(*range(4, STEPS))
        assert job.await_result()["exit_code"] == 0
    assert (files / "digest").read_text() == alone(STEPS)


BALLAST_MB = 256


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "")
def test_a_node_that_has_not_the_memory_for_all_ranks_says_so(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node a is in a memory cgroup with a limit. In their first round its two ranks hold memory, and four of them would
    not have room; in the next round they need less than they had, so the kernel ends none of them."""
    quiet, files = tmp_path / "quiet", tmp_path / "files"
    quiet.mkdir()
    files.mkdir()
    monkeypatch.setenv("BALLAST_MB", str(BALLAST_MB))
    command = (sys.executable, str(RANKS_SCRIPT), "gan", str(files), str(STEPS))
    with (
        EmbeddedEtcd() as etcd,
        limited(8 << 30) as cell,
        Spread(tmp_path, etcd, "ranks", memory=memory, command=command, restart=True, ranks=RANKS, workers=2) as job,
    ):
        job.rendezvous()
        outside = own_cell(cell)
        (cell / "cgroup.procs").write_text(str(os.getpid()))
        try:
            job.agent("a")
        finally:
            (outside / "cgroup.procs").write_text(str(os.getpid()))
        other = job.agent("b")
        rounds = Rounds(job.until, files)
        rounds.open(0, 1)
        first = rounds.await_step(2, world=RANKS)
        used = next(path for name in USED if (path := cell / name).exists())
        limit = next(path for name in LIMIT if (path := cell / name).exists())
        limit.write_text(str(int(used.read_text()) + (BALLAST_MB << 20)))  # room for three ranks
        lose("b", other, memory)
        line = job.await_event("ranks_memory")
        assert line["ranks"] == RANKS and "4 processes of the script" in line["because"]
        job.until("a round of one node", lambda: rounds.begun_after(first, RANKS))
        rounds.open(*range(2, STEPS))
        assert job.await_result()["exit_code"] == 0
    assert (files / "digest").read_text() == under_torchrun("gan", quiet)


USED, LIMIT = ("memory.usage_in_bytes", "memory.current"), ("memory.limit_in_bytes", "memory.max")
"""Of the two versions of cgroups."""


def own_cell(beside: Path) -> Path:
    """The memory cgroup of this process. beside: another one of the same hierarchy."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(",") or (number == "0" and (beside / LIMIT[1]).exists()):
            return beside.parent / path.lstrip("/")
    raise AssertionError("no memory cgroup")
