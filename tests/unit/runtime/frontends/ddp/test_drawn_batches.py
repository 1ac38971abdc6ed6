"""Batches that scripts draw themselves: the same in every world, or refused."""

from __future__ import annotations

import functools
import importlib
import itertools
import random
from collections import UserList
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import elastic.ddp
from elastic.agent.worker.environment import AGENT_SOCKET, RANKS, RESTART
from elastic.errors import ConfigError
from runtime.frontends.ddp.drawn_batches import batches
from runtime.frontends.ddp.rank_script import RankScript
from tests.unit.runtime.frontends.ddp import threads
from tests.unit.runtime.frontends.ddp.test_mistakes import Setup

STEPS = 5
MAIN = functools.partial(importlib.import_module("tests.ddp_scripts.drawn").main, seed_of_the_rank=False)
"""The world of threads does not copy the first weights from rank 0, as real workers do."""


@pytest.fixture
def seams() -> Iterator[None]:
    with threads.seams():
        yield


@pytest.fixture(scope="module")
def wanted() -> str:
    with threads.seams():
        return threads.alone(MAIN)[0]


@pytest.mark.parametrize(
    ("workers", "kills", "newcomers"),
    [
        (2, {}, {}),
        (3, {"w0": (4, 0)}, {}),
        (3, {"w1": (3, 1)}, {}),
        (4, {"w0": (2, 0), "w1": (5, 0)}, {}),
        (2, {}, {"newcomers": 1, "asked_at": 1, "admit_at": 3}),
        (2, {"w1": (9, 0)}, {"newcomers": 1, "asked_at": 2, "admit_at": 4}),
    ],
)
def test_a_loop_without_a_loader(
    workers: int, kills: dict[str, Any], newcomers: dict[str, Any], wanted: str, seams: None
) -> None:
    outcome = threads.together(workers, MAIN, kills, **newcomers)
    assert outcome.errors == {}
    assert set(outcome.digests.values()) == {wanted}
    assert all(number > 0 for number in outcome.joined.values())


def test_a_step_that_begins_with_the_batch_of_another_rank(wanted: str, seams: None) -> None:
    """As in the middle of a loop over accumulated batches, which nothing can begin anew."""
    assert threads.alone(MAIN, kind=threads.WrongGuess)[0] == wanted
    outcome = threads.together(4, MAIN, {"w0": (2, 0), "w1": (5, 0)}, kind=threads.WrongGuess)
    assert outcome.errors == {}
    assert set(outcome.digests.values()) == {wanted}


GIVEN: UserList[tuple[int, tuple[float, ...]]] = UserList()
"""Rank and batch of each turn. No list: what a silent turn appends to a list in the globals of this file is undone."""


def script(draw: Callable[..., Any], epochs: int = 2, seed: int = 0) -> Callable[[], None]:
    def main() -> None:
        setup = Setup()
        for _ in range(epochs):
            for x in batches(draw, STEPS, seed=seed):
                setup.step(x, x.sum(1, keepdim=True))
                GIVEN.append((RankScript.running().turned[-1] or 0, tuple(x.flatten().tolist())))

    return main


def of_everything() -> torch.Tensor:
    return torch.rand(3, 4) + float(np.random.rand()) + random.random()


def of_a_position(number: int, rank: int) -> torch.Tensor:
    return torch.arange(12.0).reshape(3, 4) / 12 + number + 10 * rank


@pytest.mark.parametrize("draw", [of_everything, of_a_position])
def test_each_rank_has_batches_of_its_own_whoever_computes_it(draw: Callable[..., Any], seams: None) -> None:
    GIVEN.clear()
    digest, lines = threads.alone(script(draw))
    alone = sorted(GIVEN)
    epochs = 1 if draw is of_a_position else 2
    assert len(alone) == 2 * STEPS * threads.RANKS
    assert len(set(alone)) == epochs * STEPS * threads.RANKS, "each batch is another one, also in the second epoch"
    assert [line[1] for line in lines] == [0] * STEPS + [1] * STEPS
    GIVEN.clear()
    outcome = threads.together(2, script(draw), {"w1": (4, 1)})
    assert outcome.errors == {}
    assert set(outcome.digests.values()) == {digest}
    assert set(GIVEN) == set(alone)


def test_another_seed_gives_other_batches(seams: None) -> None:
    assert threads.alone(script(of_everything))[0] != threads.alone(script(of_everything, seed=1))[0]


def test_a_function_that_keeps_a_position_is_refused_with_advice_that_works(seams: None) -> None:
    position = itertools.count()

    def next_batch() -> torch.Tensor:
        return torch.full((3, 4), float(next(position)))

    with pytest.raises(ConfigError, match=r"next_batch.* it keeps a position.*Let it take \(number, rank\)"):
        threads.alone(script(next_batch))
    with pytest.raises(ConfigError, match=r"it keeps a position.*Let it take \(number, rank\).*from nothing else"):
        threads.alone(script(lambda number, rank: next_batch()))
    threads.alone(script(lambda number, rank: torch.full((3, 4), float(number * threads.RANKS + rank)) / 20))


@pytest.mark.parametrize("draw", [3, lambda number: number, lambda a, b, c: a, lambda *, rank: rank])
def test_a_function_of_other_arguments_is_refused(draw: Any) -> None:
    with pytest.raises(ConfigError, match=r"without arguments.*or one of \(number, rank\)"):
        batches(draw, 3)


@pytest.mark.parametrize("steps", [0, 2.5])
def test_there_is_a_batch_at_least(steps: Any) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        batches(of_everything, steps)


def test_without_logical_ranks_it_calls_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    assert list(batches(lambda number, rank: (number, rank), 3)) == [(0, 2), (1, 2), (2, 2)]
    counted = itertools.count()
    assert list(batches(lambda: next(counted), 3)) == [0, 1, 2]


# enable()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A worker of `elastic run`."""
    monkeypatch.setenv(AGENT_SOCKET, "/nowhere")
    monkeypatch.delenv(RANKS, raising=False)
    monkeypatch.delenv(RESTART, raising=False)
    return monkeypatch


def test_it_does_nothing_where_no_agent_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(AGENT_SOCKET, raising=False)
    before = torch.nn.parallel.DistributedDataParallel.__init__
    elastic.ddp.enable(ranks=4)
    assert RankScript.current() is None
    assert torch.nn.parallel.DistributedDataParallel.__init__ is before


def test_it_does_nothing_in_a_script_that_is_restarted(asked: pytest.MonkeyPatch) -> None:
    asked.setenv(RESTART, "1")
    elastic.ddp.enable()
    assert RankScript.current() is None


def test_somebody_has_to_say_how_many_ranks_there_are(asked: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"ddp\.enable\(ranks=8\) or by `elastic run --ranks 8`"):
        elastic.ddp.enable()
    with pytest.raises(ConfigError, match="at least 1"):
        elastic.ddp.enable(ranks=0)
    asked.setenv(RANKS, "4")
    with pytest.raises(ConfigError, match=r"ddp\.enable\(ranks=2\), and the job was started with --ranks 4"):
        elastic.ddp.enable(ranks=2)
