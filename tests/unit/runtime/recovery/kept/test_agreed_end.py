"""The step behind which all scripts of a round end: the same for all, whenever each of them is asked."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from queue import SimpleQueue

import pytest

from runtime.allreduce.ring.process_group import store_on
from runtime.recovery.kept.agreed_end import AgreedEnd, EndOfRound
from runtime.recovery.kept.choice import RoundNumber
from runtime.recovery.kept.place import KeptPlace

WORLD, STEPS, DEADLINE_S = 3, 400, 60.0


def scripts(home: Path, asked: dict[int, int], *, skew: bool) -> dict[int, int | None]:
    """The step behind which each rank ended; None: it has done all. asked: of each rank, the step in which its worker
    asks. skew: ranks may be a step ahead of others; otherwise they are in step."""
    store, place = store_on("127.0.0.1"), KeptPlace(str(home), RoundNumber(0, 1))
    directory = place.directory()
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    together = threading.Barrier(WORLD)
    ended: SimpleQueue[tuple[int, int | None]] = SimpleQueue()

    def script(rank: int) -> None:
        end, dice = AgreedEnd(place, rank, WORLD, environment), random.Random(rank)
        last: int | None = None
        for step in range(1, STEPS + 1):
            together.wait(DEADLINE_S)  # a collective in the step
            if asked.get(rank) == step:
                EndOfRound(directory, [rank]).ask()
            if skew:
                time.sleep(dice.choice((0.0, 0.002)))
            if end.is_last(step):
                last = step
                end.arrive()
                break
        ended.put((rank, last))

    threads = [threading.Thread(target=script, args=(rank,), daemon=True) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    workers = [EndOfRound(directory, [rank]) for rank in range(WORLD)]
    until_s = time.monotonic() + DEADLINE_S
    while len(asked) == WORLD and not all(worker.reached() is not None for worker in workers):
        assert time.monotonic() < until_s, "the scripts do not come to their end"
        time.sleep(0.01)
    assert ended.empty() or len(asked) < WORLD, "they wait for their workers"
    for worker in workers:
        worker.let_go()
    return dict(ended.get(timeout=DEADLINE_S) for _ in threads)


@pytest.mark.parametrize("skew", [False, True])
@pytest.mark.parametrize("asked", [{0: 5, 1: 5, 2: 5}, {0: 5, 1: 90, 2: 7}, {0: 60, 1: 3, 2: 59}])
def test_all_end_behind_the_same_step(asked: dict[int, int], skew: bool, tmp_path: Path) -> None:
    ended = scripts(tmp_path, asked, skew=skew)
    (last,) = set(ended.values())
    assert last is not None and max(asked.values()) < last <= max(asked.values()) + 4


def test_nobody_ends_while_a_worker_has_not_asked(tmp_path: Path) -> None:
    """As it was lost: the others are ended where they are."""
    assert set(scripts(tmp_path, {0: 5, 2: 7}, skew=False).values()) == {None}


def test_a_script_whose_store_is_gone_goes_on(tmp_path: Path) -> None:
    store, place = store_on("127.0.0.1"), KeptPlace(str(tmp_path), RoundNumber(0, 1))
    end = AgreedEnd(place, 0, 2, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)})
    worker = EndOfRound(place.directory(), [0])
    assert not end.is_last(1)
    worker.ask()
    assert not end.is_last(2)
    del store
    assert not end.is_last(3) and worker.reached() is None
