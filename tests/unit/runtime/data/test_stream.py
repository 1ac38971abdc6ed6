"""job.stream: each shard's batches in order and once, whoever reads them, and where an epoch ends."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from elastic.checkpoints.series import Series
from elastic.checkpoints.settings import Settings
from elastic.checkpoints.storage import storage_at
from elastic.errors import ConfigError, UsageError
from runtime.data.prefetcher import Wanted
from runtime.data.stream import Stream
from runtime.loop.job import Job
from runtime.session import Session
from tests.unit.features import mlp
from tests.unit.jobs import Recorded, cross_entropy, ledger, make_job
from tests.unit.thoroughness import EXAMPLES
from tests.unit.worlds import FakeMember, Killed, World

LENGTHS = (5, 4, 7, 6)
"""Batches of each shard in epoch 0; in epoch 1 each has one more."""
SHARDS = len(LENGTHS)
STEPS = 4 + 5
"""Of two epochs: the shortest shard ends each."""


@dataclass
class Shelf:
    """The data of a job, and who has opened what."""

    opened: list[tuple[int, int, int]] = field(default_factory=list)
    closed: int = 0

    def open(self, shard: int, epoch: int, skip: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self.opened.append((shard, epoch, skip))
        return self._read(shard, epoch, skip)

    def _read(self, shard: int, epoch: int, skip: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Ragged batches, with noise from all global generators."""
        try:
            for number in range(skip, LENGTHS[shard] + epoch):
                x = torch.randn(2 + number % 3, 6, generator=torch.Generator().manual_seed(100 * shard + number))
                yield x + torch.rand(6) * random.random() * float(np.random.rand()), (x.sum(1) > 0).long()
        finally:
            self.closed += 1


def train(job: Job, shelf: Shelf, epochs: int = 2) -> str:
    """Three passes a step would read no more: here two."""
    model = mlp(nn.BatchNorm1d(8), nn.Dropout(0.2))
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    job.register(model=model, optimizer=optimizer)
    data = job.stream(shelf.open, shards=SHARDS)
    for _ in job.epochs(epochs):
        for step in job.steps(data):
            for _ in range(2):
                for x, y in step:
                    loss = cross_entropy(model(x), y)
                    loss.backward()
                    step.weigh(len(y))
                    step.log(loss=loss)
                    x.zero_()  # the next pass has a copy of its own
                optimizer.step()
                optimizer.zero_grad()
    digest = job.digest()
    job.close()
    return digest


def run(session: Session, shelf: Shelf | None = None) -> str:
    return train(make_job(session), shelf or Shelf())


def test_an_epoch_ends_for_all_with_the_last_batch_of_the_shortest_shard() -> None:
    session, shelf = Recorded(), Shelf()
    run(session, shelf)
    assert [(record.step, record.epoch) for record in session.records] == [
        *((step, 0) for step in range(4)),
        *((step, 1) for step in range(4, 9)),
    ]
    assert [record.samples for record in session.records] == [
        [{"batch": number}] * SHARDS for number in (*range(4), *range(5))
    ]
    rehearsed, owned = ([(shard, 0, 0) for shard in range(count)] for count in (2, SHARDS))
    both_passes = [*rehearsed, *owned, *owned]  # the second one's rehearsal finds them open, and lets all go
    assert shelf.opened == [*both_passes, *((shard, 1, 0) for shard in range(SHARDS))]
    assert shelf.closed == len(shelf.opened)


def fate() -> st.SearchStrategy[tuple[int, dict[str, tuple[int, int]], int, int, int]]:
    """(workers, kills, newcomers, asked at, admitted at); w0 survives, and newcomers enter the epoch they asked in."""

    def drawn(draw: st.DrawFn) -> tuple[int, dict[str, tuple[int, int]], int, int, int]:
        workers, newcomers = draw(st.integers(1, 5)), draw(st.integers(0, 2))
        first, end = draw(st.sampled_from([(0, 4), (4, STEPS)]))
        asked_at = draw(st.integers(first, end - 1))
        mortal = [f"w{i}" for i in range(1, workers)] + [f"n{i}" for i in range(newcomers)]
        moments = st.tuples(st.integers(1, 2 * STEPS), st.integers(0, 2))
        kills = {worker: draw(moments) for worker in mortal if draw(st.booleans())}
        return workers, kills, newcomers, asked_at, draw(st.integers(asked_at, end - 1))

    return st.composite(drawn)()


@cache
def quiet_run() -> tuple[str, Recorded]:
    session = Recorded()
    return run(session), session


@settings(
    max_examples=EXAMPLES or 8,
    derandomize=not EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(fate())
def test_any_fate_ends_in_the_bits_of_the_quiet_run(
    fate: tuple[int, dict[str, tuple[int, int]], int, int, int],
) -> None:
    workers, kills, newcomers, asked_at, admit_at = fate
    (digest, quiet), shelf = quiet_run(), Shelf()
    world = World(workers, kills=kills)
    world.run(lambda session: run(session, shelf), newcomers=newcomers, asked_at=asked_at, admit_at=admit_at)
    assert {type(error) for error in world.errors.values()} <= {Killed}, world.errors
    assert set(world.digests.values()) == {digest}
    for worker in world.digests:
        assert ledger(world.sessions[worker]) == ledger(quiet)[world.joined_at.get(worker, 0) :]
    if not kills:
        assert shelf.closed == len(shelf.opened)


def test_a_worker_that_skips_batches_gives_each_its_own_random_numbers() -> None:
    """An open() that reads what it skips: with islice it would draw the numbers of all these batches at once."""
    shelf = Shelf()

    def script(session: Session) -> str:
        def open(shard: int, epoch: int) -> Iterator[Any]:
            return shelf.open(shard, epoch, 0)

        whole = Shelf()
        whole.open = open  # type: ignore[method-assign,assignment]
        return train(make_job(session), whole)

    assert script(Recorded()) == quiet_run()[0]
    world = World(3, kills={"w1": (5, 0), "w0": (9, 1)})
    world.run(script)
    assert set(world.digests.values()) == {quiet_run()[0]}
    assert {skip for _, _, skip in shelf.opened} == {0}


def test_a_third_parameter_with_a_default_and_another_name_is_an_option_of_the_script() -> None:
    def with_option(shard: int, epoch: int, size: int = 2) -> Iterator[list[int]]:
        for begin in range(0, 12, size):
            yield list(range(begin, begin + size))

    def with_skip(shard: int, epoch: int, skip: int = 0) -> Iterator[list[int]]:
        for begin in range(2 * skip, 12, 2):
            yield [begin, begin + 1]

    for open in (with_option, with_skip, functools.partial(with_option, size=2)):
        stream = Stream(open, shards=1, seed=0, device=torch.device("cpu"))
        assert [stream.batch(Wanted(0, step, 0, 0), None) for step in (0, 3)] == [[0, 1], [6, 7]]


def test_who_inherits_a_shard_opens_it_behind_what_is_used_up() -> None:
    """Operations 1 and 2 are the passes of step 0, and so on: w1 dies in step 2, w2 keeps what it reads."""
    shelf = Shelf()
    world = World(3, kills={"w1": (5, 0)})
    world.run(lambda session: train(make_job(session), shelf, epochs=1))
    assert set(world.digests) == {"w0", "w2"}
    inherited = [(shard, skip) for shard, _, skip in shelf.opened if skip]
    assert inherited and {skip for _, skip in inherited} == {2} | {skip for _, skip in inherited if skip > 2}
    first = [shard for shard, _, skip in shelf.opened if not skip]
    assert sorted(set(first)) == list(range(SHARDS))


def test_what_a_worker_does_not_read_any_more_is_closed_before_the_epoch_ends() -> None:
    """A newcomer takes a shard over from w0, whose iterator would stay open as long as the epoch."""
    shelf, seen = Shelf(), []

    def script(session: Session) -> str:
        job = make_job(session)
        model = nn.Linear(6, 2)
        job.register(model=model)
        for step in job.steps(job.stream(shelf.open, shards=SHARDS)):
            for x, _ in step:
                model(x).sum().backward()
            model.zero_grad()
            seen.append((step.index, len(shelf.opened) - shelf.closed))
        job.close()
        return ""

    world = World(1)
    world.run(script, newcomers=1, asked_at=0, admit_at=0)
    assert world.errors == {}
    assert next(count for index, count in seen if index == 2) == SHARDS
    assert shelf.closed == len(shelf.opened)


def test_a_resumed_run_opens_the_shards_where_its_checkpoint_is(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def configure(**changes: Any) -> None:
        chosen = Settings(root=str(tmp_path), job="train", job_id="feed", every="6 steps", **changes)
        for name, value in chosen.to_environment().items():
            monkeypatch.setenv(name, value)

    class Dies(Exception):
        pass

    class Dying(Shelf):
        """In the middle of step 7, batch 3 of epoch 1; before step 6 there is a checkpoint."""

        def _read(self, shard: int, epoch: int, skip: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for number, batch in enumerate(super()._read(shard, epoch, skip), skip):
                if (shard, epoch, number) == (1, 1, 4):
                    raise Dies
                yield batch

    quiet = Recorded()
    digest = run(quiet)
    configure()
    dying = make_job(Recorded())
    with pytest.raises(Dies) as raised:
        train(dying, Dying())
    assert raised.value.__notes__ == ["job.stream: batch 4 of shard 1 in epoch 1 raised"]
    dying._training.checkpoints.finish()
    dying._detach()
    found, _ = Series(storage_at(str(tmp_path))).newest("feed")
    assert found is not None and found.name.step == 6
    configure(resume=str(found.name))
    again, shelf = Recorded(), Shelf()
    assert run(again, shelf) == digest
    assert ledger(again) == ledger(quiet)[6:]
    assert shelf.opened == [(shard, 1, 2) for shard in range(SHARDS)]


def one_step(open: Any, **arguments: Any) -> None:
    job = make_job()
    model = nn.Linear(6, 2)
    job.register(model=model)
    try:
        for step in job.steps(job.stream(open, shards=2), **arguments):
            for batch in step:
                model(torch.as_tensor(batch).float().expand(6)).sum().backward()
            model.zero_grad()
    finally:
        job._detach()


def test_a_bare_loop_is_one_epoch_that_ends_by_total_or_with_the_data() -> None:
    read = []

    def open(shard: int, epoch: int, skip: int) -> Iterator[int]:
        for number in range(skip, 5):
            read.append((shard, epoch, number))
            yield number

    one_step(open)
    assert len(read) == 2 * 5 + 2 * 2, "a rehearsal reads two batches of each shard"
    read.clear()
    one_step(open, total=2)
    assert max(number for _, _, number in read) == 2, "one ahead"


def test_a_stream_says_what_it_does_not_know() -> None:
    job = make_job()
    model = nn.Linear(6, 2)
    job.register(model=model)
    shelf = Shelf()
    for _ in job.epochs(1):
        steps = job.steps(job.stream(shelf.open, shards=SHARDS))
        with pytest.raises(TypeError, match="no length"):
            len(steps)
        last = []
        for step in steps:
            for x, _ in step:
                model(x).sum().backward()
            model.zero_grad()
            with pytest.raises(UsageError, match="nobody knows their steps"):
                step.total  # noqa: B018
            last.append(step.last_in_epoch)
        assert last == [False, False, False, True]
    job.close()


@pytest.mark.parametrize(
    ("open", "words"),
    [
        (range(3), "was given a range; give it a function"),
        (lambda shard, epoch, skip: iter(()), "gave no batch; every shard needs at least one"),
        (lambda shard, epoch, skip: 5, "'int' object is not iterable"),
    ],
)
def test_what_is_no_stream_is_refused(open: Any, words: str) -> None:
    with pytest.raises((ConfigError, TypeError), match=words):
        one_step(open)


def test_epochs_of_a_stream_belong_into_the_outer_loop() -> None:
    with pytest.raises(ConfigError, match=r"outside job\.epochs\(\) a stream is one epoch"):
        one_step(lambda *_: iter([1]), epochs=3)


def test_a_shard_that_is_shorter_when_it_is_opened_again_is_named() -> None:
    """As by a directory listing in another order: the heir finds nothing at its place."""

    def script(session: FakeMember) -> str:
        def open(shard: int, epoch: int, skip: int) -> Iterator[float]:
            return iter([1.0] * (9 - skip if session.worker_id == "w1" else 0) or ([1.0] if not skip else []))

        job = make_job(session)
        model = nn.Linear(6, 2)
        job.register(model=model)
        for step in job.steps(job.stream(open, shards=1)):
            for batch in step:
                model(torch.as_tensor(batch).expand(6)).sum().backward()
            model.zero_grad()
        job.close()
        return ""

    world = World(2, kills={"w1": (4, 0)})
    world.members.reverse()  # w1 has the only shard
    world.run(script)
    assert isinstance(world.errors["w0"], UsageError)
    assert "must have the same batches each time it is opened" in str(world.errors["w0"])


def test_an_exception_of_open_says_for_what_it_was_called() -> None:
    def open(shard: int, epoch: int, skip: int) -> Iterator[int]:
        raise FileNotFoundError("shard-0.tar")

    with pytest.raises(FileNotFoundError) as raised:
        one_step(open)
    assert raised.value.__notes__ == ["job.stream: open(shard=0, epoch=0, skip=0) raised"]
