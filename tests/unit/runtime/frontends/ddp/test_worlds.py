"""Unchanged torchrun scripts end with the same bits in every world, through deaths and joins."""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
import os
from collections import Counter
from collections.abc import Iterator
from queue import SimpleQueue

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from runtime.recovery.state.verification import Verification
from tests.unit.runtime.frontends.ddp import threads
from tests.unit.runtime.frontends.ddp.threads import Main
from tests.unit.thoroughness import EXAMPLES, some
from tests.unit.worlds import FakeMember

SCRIPTS = {
    "plain": 7,
    "accumulation": 4,
    "endless": 6,
    "trainer": 4,
    "evaluated": 4,
    "spawned": 2,
    "early": 2,
    "replica_groups": 6,
    "reduced": 4,
    "ungraded": 4,
    "probe": 4,
    "horovod_loop": 3,
    "horovod_elastic": 6,
}
"""-> steps of an epoch."""

LARGE_WORLDS = (6,) if EXAMPLES else ()
"""Worlds that `make test-exact` tries besides."""


@pytest.fixture(autouse=True)
def seams() -> Iterator[None]:
    with threads.seams():
        yield


def main_of(script: str) -> Main:
    main: Main = importlib.import_module(f"tests.ddp_scripts.{script}").main
    return main


@functools.cache
def quiet_run(script: str) -> tuple[str, list[object]]:
    """Digest and ledger of a job of one."""
    return threads.alone(main_of(script))


def check(main: Main, quiet: tuple[str, list[object]], workers: int, **how: object) -> threads.Outcome:
    outcome = threads.together(workers, main, **how)  # type: ignore[arg-type]
    assert not outcome.errors
    assert set(outcome.digests.values()) == {quiet[0]}
    assert all(ledger == quiet[1] for name, ledger in outcome.ledgers.items() if name not in outcome.joined)
    return outcome


@pytest.mark.parametrize("script", SCRIPTS)
def test_any_number_of_workers_has_the_bits_and_the_ledger_of_one(script: str) -> None:
    main, quiet = main_of(script), quiet_run(script)
    for workers in (*some((2, 3, 4), 1, script), *LARGE_WORLDS):
        check(main, quiet, workers)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_death_at_any_moment_changes_no_bit(script: str) -> None:
    main, quiet = main_of(script), quiet_run(script)
    for operation, units in some(list(itertools.product((1, 2, 3, 7), (0, 1))), 0, script):
        check(main, quiet, 3, kills={"w0": (operation, units)})
    check(main, quiet, 4, kills={"w0": (3, 0), "w2": (4, 0), "w1": (5, 1)})


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_newcomer_in_any_step_changes_no_bit(script: str) -> None:
    main, quiet = main_of(script), quiet_run(script)
    steps = SCRIPTS[script]
    cases = ((0, 0), (0, 1), (1, min(3, steps - 1)), (steps, steps + 1), (steps + 1, steps + 1))
    for asked, admitted in some(cases, 1, script):
        outcome = check(main, quiet, 2, newcomers=1, asked_at=asked, admit_at=admitted)
        assert outcome.joined == {"n0": admitted}
    for operation in some((steps + 4,), 0, script):
        check(main, quiet, 2, kills={"w0": (operation, 0)}, newcomers=1, asked_at=0, admit_at=1)


@pytest.mark.parametrize("script", some(list(SCRIPTS), 3, "guess"))
def test_a_step_that_begins_with_the_batch_of_another_rank_changes_no_bit(script: str) -> None:
    main, quiet = main_of(script), quiet_run(script)
    assert threads.alone(main, kind=threads.WrongGuess) == quiet
    check(main, quiet, 3, kills={"w0": (3, 0)}, newcomers=1, asked_at=0, admit_at=1, kind=threads.WrongGuess)


@pytest.mark.parametrize("workers", [2, 3])
def test_shards_that_are_computed_to_be_compared_change_nothing(
    workers: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--verify every=1`: neither bits, nor what a script has behind the step, as the loss of a rank."""

    def main() -> None:
        dist.init_process_group("gloo")
        data, total = TensorDataset(torch.randn(96, 3), torch.randn(96, 1)), 0.0
        model = DDP(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in DataLoader(data, batch_size=2, sampler=DistributedSampler(data)):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
            if dist.get_rank() == 0:
                print(f"rank 0: {loss.item()} {total}")
        losses = torch.tensor(total, dtype=torch.float64)
        dist.all_reduce(losses)
        if dist.get_rank() == 0:
            print(f"all ranks: {losses.item()}")

    said = SimpleQueue[tuple[int, int, str]]()
    quiet = threads.alone(main)
    capsys.readouterr()  # a worker tells of one of its ranks, so of another one there
    check(main, quiet, workers)
    lines = capsys.readouterr().out
    assert len(lines.splitlines()) == 13
    monkeypatch.setattr(FakeMember, "verification", Verification(1))
    monkeypatch.setattr(FakeMember, "vouch", lambda self, shard, digest: said.put((self.number, shard, digest)))
    check(main, quiet, workers)
    assert capsys.readouterr().out == lines
    computed = Counter(said.get() for _ in range(said.qsize()))
    assert len({(number, shard) for number, shard, _ in computed}) == len(computed), "whoever computes one is right"
    assert min(computed.values()) >= 3


def test_a_line_comes_once_a_step_where_the_script_asks_the_environment_for_its_rank(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Also with a worker that computes all ranks."""

    def main() -> None:
        dist.init_process_group("gloo")
        data = TensorDataset(torch.randn(24, 3), torch.randn(24, 1))
        model = DDP(nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, (x, y) in enumerate(DataLoader(data, batch_size=2, sampler=DistributedSampler(data))):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            if int(os.environ["RANK"]) == 0:
                print(f"step {step}: {loss.item():.3f}")
                logging.getLogger("train").warning("step %s", step)

    threads.alone(main)
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == ["step 0", "step 1", "step 2"]
    assert caplog.messages == ["step 0", "step 1", "step 2"]
