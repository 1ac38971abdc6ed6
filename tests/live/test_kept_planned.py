"""elastic.keep when workers join or leave as planned: all scripts end behind the same step, and none is done again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.live.test_kept import Rounds
from tests.live.test_kept_nodes import memory
from tests.live.test_kept_ranks import RANKS, one_of_three_nodes_lost, under_torchrun

__all__ = ["memory"]
pytestmark = pytest.mark.long

STEPS, PACE_S = 400, 0.1


@contextmanager
def paced(rounds: Rounds, first: int) -> Iterator[None]:
    """Open steps all along, so that scripts come to done() while they are asked to end."""
    over = threading.Event()

    def open_steps() -> None:
        for step in range(first, STEPS):
            rounds.open(step)
            if over.wait(PACE_S):
                break

    thread = threading.Thread(target=open_steps)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_node_joins_and_another_one_leaves_and_no_step_is_done_again(tmp_path: Path, memory: Path) -> None:
    quiet, files = tmp_path / "quiet", tmp_path / "files"
    quiet.mkdir()
    files.mkdir()
    with one_of_three_nodes_lost(tmp_path, memory, files, STEPS) as (job, rounds, _, second):
        rounds.open(4, 5, 6)
        rounds.await_step(7, world=RANKS)
        with paced(rounds, 7):
            (memory / "c").mkdir()
            job.agent("c")
            third = job.until("a round of three nodes", lambda: rounds.begun_after(second, RANKS))
            rounds.await_step(max(rounds.done(second, 0)) + 5, world=RANKS)
            job.give_notice("b", 60.0)
            fourth = job.until("a round without b", lambda: rounds.begun_after(third, RANKS))
        (files / "go").touch()
        assert job.await_result()["exit_code"] == 0
        for number, workers in ((third, 2), (fourth, 3)):
            (begun,) = {step for _, _, step in rounds.started(number).values()}
            assert {max(rounds.done(number - 1, rank)) for rank in range(RANKS)} == {begun}
            assert [line["step"] for line in job.events("kept_agreed")].count(begun) == workers
    assert (files / "digest").read_text() == under_torchrun("gan", quiet, STEPS)
