"""elastic.keep of replicas of shards (HSDP) on several nodes: they are each other's mirrors, and nothing is sent."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from elastic.errors import CheckpointCorrupt
from elastic.store.embedded import EmbeddedEtcd
from runtime.recovery.kept.place import directory_of, rounds_in
from runtime.recovery.kept.segment import read_header, segments_in
from tests.live.spread import Spread
from tests.live.test_kept import SCRIPT, STEPS, Rounds, alone
from tests.live.test_kept_nodes import lose, memory

__all__ = ["memory"]
pytestmark = pytest.mark.long


def parts_on(node: Path) -> set[tuple[int, int]]:
    """Part and number of parts of all segments in the newest round of that node's memory."""
    found = set()
    for path in segments_in(directory_of(str(node), rounds_in(str(node))[-1])):
        try:
            header = read_header(path)
        except CheckpointCorrupt:  # it is being written
            continue
        if header is not None:
            found.add((header.part, header.parts))
    return found


def not_like(node: str, others: tuple[str, ...], memory: Path) -> str:
    """The one of these nodes that has another part: which one joins first is not known."""
    return next(other for other in others if parts_on(memory / other) != parts_on(memory / node))


FIRST, SECOND, BOTH = {(0, 2)}, {(1, 2)}, {(0, 2), (1, 2)}


@pytest.mark.parametrize(
    ("has", "slots", "first_lost", "then_lost"),
    [
        ({"a": BOTH, "b": BOTH}, 2, ("b",), ("a",)),
        ({"a": FIRST, "b": SECOND, "c": FIRST, "d": SECOND}, 1, ("c", "d"), ()),
    ],
    ids=["a replica on each node", "a shard on each node"],
)
def test_a_whole_replica_is_lost_and_nodes_of_different_replicas(
    has: dict[str, set[tuple[int, int]]],
    slots: int,
    first_lost: tuple[str, ...],
    then_lost: tuple[str, ...],
    tmp_path: Path,
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("REPLICAS", "2")
    files = tmp_path / "files"
    files.mkdir()
    command = (sys.executable, str(SCRIPT), str(files), str(STEPS))
    with ExitStack() as stack:
        etcd = stack.enter_context(EmbeddedEtcd())
        job = stack.enter_context(
            Spread(tmp_path, etcd, "replicas", command=command, restart=True, workers=4, memory=memory)
        )
        job.rendezvous()
        agents = {node: job.agent(node, slots=slots) for node in has}
        rounds = Rounds(job.until, files)
        rounds.open(0, 1, 2, 3)
        first = rounds.await_step(4, world=4)
        assert {node: parts_on(memory / node) for node in has} == has, "no node has what another one has written"
        for node in first_lost:
            lose(node, agents[node], memory)
        second = job.until("a round of two processes", lambda: rounds.begun_after(first, 2))
        rounds.open(4)
        rounds.await_step(5, world=2)
        for node in first_lost:
            (memory / node).mkdir()
            agents[node] = job.agent(node, slots=slots)
        third = job.until("a round of four processes", lambda: rounds.begun_after(second, 4))
        rounds.open(5, 6)
        rounds.await_step(7, world=4)
        for node in then_lost or ("a", not_like("a", first_lost, memory)):
            lose(node, agents[node], memory)
        last = job.until("another round of two processes", lambda: rounds.begun_after(third, 2))
        rounds.open(*range(7, STEPS))
        assert job.await_result()["exit_code"] == 0
        begun = [{step for _, _, step in rounds.started(number).values()} for number in (second, third, last)]
        assert all(len(steps) == 1 for steps in begun), "all processes begin with one step"
        assert begun[0] <= {3, 4} and begun[1] == {5} and begun[2] <= {6, 7}, "at most one step is done again"
        assert job.events("kept_thin") == [] and job.events("kept_incomplete") == []
        assert [line["step"] for line in job.steps()] == list(range(STEPS))
    assert (files / "digest").read_text() == alone(STEPS)
