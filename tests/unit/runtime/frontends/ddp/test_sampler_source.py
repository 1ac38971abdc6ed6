"""Each logical rank's batches are those that torch's own DataLoader gives that rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    get_worker_info,
)

from elastic.errors import ConfigError
from runtime.data.prefetcher import Wanted
from runtime.frontends.ddp.rank_source import Position
from runtime.frontends.ddp.sampler_source import SamplerSource, WorkerInit, sampler_of
from runtime.frontends.ddp.script.epochs import ScriptEpochs

RANKS = 4
DATA = TensorDataset(torch.arange(46), torch.arange(46) * 2.0)


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> int:
        return index * index


class Fetched(Numbers):
    """Of which many samples are asked for at once."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [1000 + index for index in indices]


class Noisy(Numbers):
    def __getitem__(self, index: int) -> Any:
        return torch.rand(2)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def of_torch(
    dataset: Any, rank: int, epoch: int | None, how: dict[str, Any], batched: bool, **loader: Any
) -> list[Any]:
    return list(made(dataset, rank, epoch, how, batched, **loader))


def made(
    dataset: Any, rank: int, epoch: int | None, how: dict[str, Any], batched: bool, **loader: Any
) -> DataLoader[Any]:
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, RANKS, rank, **how)
    if epoch is not None:
        sampler.set_epoch(epoch)
    if batched:
        return DataLoader(dataset, batch_sampler=BatchSampler(sampler, 3, drop_last=False), **loader)
    return DataLoader(dataset, sampler=sampler, **loader)


def source_of(loader: DataLoader[Any], position: Position | None = None) -> SamplerSource:
    sampler = sampler_of(loader)
    assert sampler is not None
    return SamplerSource(loader, sampler, RANKS, position or Position())


def same(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return torch.equal(torch.as_tensor(one), torch.as_tensor(other))


@pytest.mark.parametrize("epoch", [None, 0, 3])
@pytest.mark.parametrize(
    "how", [{"shuffle": False}, {"shuffle": True, "seed": 5}, {"shuffle": True, "drop_last": True}]
)
@pytest.mark.parametrize(
    "loader", [{"batch_size": 5}, {"batch_size": 5, "drop_last": True}, {"batch_size": None}, {"batched": True}]
)
def test_each_rank_has_what_torch_gives_it(loader: dict[str, Any], how: dict[str, Any], epoch: int | None) -> None:
    arguments = {"batched": False, **loader}
    source = source_of(made(DATA, 2, epoch, how, **arguments))
    for rank in range(RANKS):
        expected = of_torch(DATA, rank, epoch, how, **arguments)
        assert same(list(source.of_rank(rank)), expected)
        assert len(source) == source.left == len(expected)


def test_the_sampler_is_left_as_it_was() -> None:
    loader = made(DATA, 2, 0, {}, False, batch_size=5)
    source_of(loader)
    assert same(list(loader), of_torch(DATA, 2, 0, {}, False, batch_size=5))


def test_each_epoch_is_that_of_the_moment_when_it_began() -> None:
    loader = made(DATA, 0, 1, {}, False, batch_size=5)
    source = source_of(loader)
    sampler = sampler_of(loader)
    assert sampler is not None
    sampler.set_epoch(2)
    assert same(list(source.of_rank(3)), of_torch(DATA, 3, 1, {}, False, batch_size=5))
    assert same(list(source_of(loader).of_rank(3)), of_torch(DATA, 3, 2, {}, False, batch_size=5))


@pytest.mark.parametrize("dataset", [Numbers(), Fetched()])
def test_samples_are_asked_for_and_collated_as_torch_does(dataset: Numbers) -> None:
    loader = made(dataset, 0, 0, {}, False, batch_size=3, collate_fn=tuple)
    for rank in range(RANKS):
        assert list(source_of(loader).of_rank(rank)) == of_torch(
            dataset, rank, 0, {}, False, batch_size=3, collate_fn=tuple
        )


def test_a_process_that_fetches_ahead_gives_the_same() -> None:
    loader = made(DATA, 0, 1, {}, False, batch_size=5, num_workers=1)
    source = source_of(loader)
    try:
        for number in range(len(source)):
            for rank in (1, 3):
                expected = of_torch(DATA, rank, 1, {}, False, batch_size=5)[number]
                assert same(source.fetch_ahead(number, rank, (1, 3)), expected)
    finally:
        source.close()


def test_random_samples_depend_on_the_rank_and_the_number_only() -> None:
    first, second = (source_of(made(Noisy(), home, 0, {}, False, batch_size=3)) for home in (0, 3))
    torch.manual_seed(1)
    expected = first.fetch(1, 2)
    torch.manual_seed(2)
    assert torch.equal(second.fetch(1, 2), expected)
    assert not torch.equal(second.fetch(1, 1), expected)
    assert not torch.equal(second.fetch(0, 2), expected)


def test_what_was_offered_is_given_once_and_to_its_rank_only() -> None:
    position = Position()
    source = source_of(made(DATA, 0, 0, {}, False, batch_size=5), position)
    offered = source.offer(0, 1, (1,))
    assert source.batch(Wanted(0, 0, 0, 1), (1,)) is offered
    again = source.batch(Wanted(0, 0, 0, 1), (1,))
    assert again is not offered and same(again, offered)
    offered = source.offer(0, 1, (1,))
    assert same(source.batch(Wanted(0, 0, 0, 2), (1,)), of_torch(DATA, 2, 0, {}, False, batch_size=5)[0])
    assert source.batch(Wanted(0, 0, 0, 1), (1,)) is not offered


def test_what_was_offered_is_not_that_of_a_later_step_or_pass() -> None:
    source = source_of(made(DATA, 0, 0, {}, False, batch_size=5))
    expected = of_torch(DATA, 1, 0, {}, False, batch_size=5)
    source.offer(0, 1, None)
    source.before = 1
    assert same(source.batch(Wanted(0, 0, 1, 1), None), expected[1])
    source.used = 2
    source.end_step()
    assert (source.first, source.left) == (2, 1)
    assert same(source.offer(2, 1, None), expected[2])
    assert same(source.batch(Wanted(0, 0, 0, 1), None), expected[2])


def test_a_sampler_for_another_world_is_refused() -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(DATA, 2, 0)
    with pytest.raises(ConfigError, match="made for 2 ranks, and the job has 4"):
        SamplerSource(DataLoader(DATA, sampler=sampler), sampler, RANKS, Position())


def test_a_dataset_without_random_access_is_refused() -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(DATA, RANKS, 0)
    with pytest.raises(ConfigError, match="random access"):
        SamplerSource(DataLoader(Stream()), sampler, RANKS, Position())


class Own:
    """A sampler of the script's own."""

    def __init__(self, rank: int = 0) -> None:
        self.num_replicas, self.rank = RANKS, rank

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 46, RANKS))

    def __len__(self) -> int:
        return 12


class Kept(DistributedSampler[int]):
    """Draws from what it keeps, in each way in which a sampler may keep something from one epoch to the next."""

    def __init__(self, how: str) -> None:
        super().__init__(range(44), RANKS, 0)  # type: ignore[arg-type]
        self.how, self.times = how, 0
        self.generator = torch.Generator().manual_seed(3)
        self.numpy = np.random.RandomState(3)
        self.indices = [list(range(44))]

    def __iter__(self) -> Iterator[int]:
        if self.how == "generator":
            order = torch.randperm(44, generator=self.generator).tolist()
        elif self.how == "numpy":
            order = self.numpy.permutation(44).tolist()
        elif self.how == "list":
            np.random.RandomState(5).shuffle(self.indices[0])
            order = self.indices[0]
        else:
            self.times += 1
            order = np.random.RandomState(self.times).permutation(44).tolist()
        return iter(order[self.rank :: RANKS])


@pytest.mark.parametrize("how", ["generator", "numpy", "list", "number"])
def test_a_sampler_with_a_state_of_its_own_gives_each_sample_once(how: str) -> None:
    """As under torchrun, where each rank has a sampler of its own, which draws once in an epoch."""
    here, of_ranks = Kept(how), [Kept(how) for _ in range(RANKS)]
    loader = DataLoader(TensorDataset(torch.arange(44)), 4, sampler=here)
    for _ in range(3):
        source = SamplerSource(loader, here, RANKS, Position())
        found = [[int(x) for (batch,) in source.of_rank(rank) for x in batch] for rank in range(RANKS)]
        for rank, sampler in enumerate(of_ranks):
            sampler.rank = rank
        assert found == [list(sampler) for sampler in of_ranks]
        assert sorted(sample for own in found for sample in own) == list(range(44))


class Endless:
    """As the batch sampler of loaders whose processes live on: it begins again behind each epoch."""

    def __init__(self, batches: Any) -> None:
        self.sampler = batches.sampler
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield from self._batches


def test_a_loader_whose_epoch_has_no_end_is_refused() -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(DATA, RANKS, 0)
    loader = DataLoader(DATA, batch_sampler=Endless(BatchSampler(sampler, 3, drop_last=False)))
    with pytest.raises(ConfigError, match=r"Endless\) has no end"):
        SamplerSource(loader, sampler, RANKS, Position())


def test_without_set_epoch_each_epoch_draws_other_random_numbers() -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(Noisy(), RANKS, 0)
    loader, epochs = DataLoader(Noisy(), 4, sampler=sampler), ScriptEpochs()

    def begun() -> Any:
        again = epochs.again(sampler, sampler.epoch)
        return SamplerSource(loader, sampler, RANKS, Position(), again).fetch(0, 1)

    first, second = begun(), begun()
    assert not same(first, second)
    sampler.set_epoch(1)
    third = begun()
    assert same(third, SamplerSource(loader, sampler, RANKS, Position()).fetch(0, 1)), "the epoch is that of the script"
    assert not same(third, first) and not same(third, begun())
    sampler.set_epoch(0)
    assert same(begun(), first)


class Drawn(Own):
    """As each rank draws the same order from the global generator, which a script seeds alike everywhere."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(44).tolist()[self.rank :: RANKS])


class Early(Own):
    """It knows its samples from the beginning."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__(rank)
        self.indices = list(range(rank, 44, RANKS))

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)


def of_all(loader: DataLoader[Any]) -> list[int]:
    source = source_of(loader)
    return sorted(int(x) for rank in range(RANKS) for batch in source.of_rank(rank) for x in batch[0])


def test_ranks_with_unequally_many_batches_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\[12, 12, 11, 11\] batches"):
        source_of(DataLoader(DATA, sampler=Own()))


def test_a_sampler_of_the_scripts_own_is_asked_for_each_rank() -> None:
    assert of_all(DataLoader(DATA, sampler=Own(), batch_size=6)) == list(range(46))


class OwnBatches(Own):
    """A batch sampler of the script's own, without a sampler inside."""

    def __iter__(self) -> Iterator[Any]:
        own = list(super().__iter__())
        return (own[first : first + 5] for first in range(0, len(own), 5))


def test_a_batch_sampler_of_the_scripts_own_is_asked_for_each_rank() -> None:
    assert of_all(DataLoader(DATA, batch_sampler=OwnBatches(2))) == list(range(46))


def test_a_loader_without_such_a_sampler_has_none() -> None:
    assert sampler_of(DataLoader(DATA)) is None
    assert sampler_of(DataLoader(DATA, shuffle=True, batch_size=None)) is None


def test_a_sampler_that_draws_from_the_global_generator_gives_every_sample_once() -> None:
    torch.manual_seed(0)
    assert of_all(DataLoader(DATA, sampler=Drawn(), batch_size=6)) == list(range(44))


def test_a_sampler_that_ignores_its_rank_is_refused() -> None:
    with pytest.raises(ConfigError):
        of_all(DataLoader(DATA, sampler=Early(), batch_size=6))


class Fixed:
    """Its rank is given once."""

    num_replicas = RANKS
    rank = property(lambda self: 0)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 44, RANKS))


def test_a_sampler_whose_rank_cannot_be_set_is_named() -> None:
    with pytest.raises(ConfigError, match="the rank of Fixed cannot be set: let `rank` be a plain attribute"):
        source_of(DataLoader(DATA, sampler=Fixed()))


class Opened(Numbers):
    """As one with a file for each process."""

    base = -1

    def __getitem__(self, index: int) -> int:
        return self.base + index


DATA_OPENED = Opened()


def opens(worker: int) -> None:
    DATA_OPENED.base = 100


def test_the_loaders_worker_init_fn_is_called_wherever_a_batch_is_fetched() -> None:
    """A newcomer's first batch, and those of an evaluation are fetched in the worker itself."""
    DATA_OPENED.base = -1
    loader = made(DATA_OPENED, 0, 0, {"shuffle": False}, False, batch_size=3, num_workers=1, worker_init_fn=opens)
    source = source_of(loader)
    try:
        found = [source.fetch_ahead(number, 0, (0,)) for number in range(len(source))]
        assert torch.equal(source.fetch_ahead(0, 0, None), found[0])
        assert [batch.tolist() for batch in source.of_rank(0)] == [batch.tolist() for batch in found]
    finally:
        source.close()
    assert found[0].tolist() == [100, 104, 108] and found[-1].tolist() == [112, 116, 120]


@pytest.mark.parametrize("what", ["dataset", "collator"])
def test_a_change_in_mid_epoch_holds_from_the_next_epoch_on_whoever_fetches(what: str) -> None:
    """As in torch, whose processes have copies from the beginning of the epoch. Rank 2 is taken over from a worker that
    is lost behind the change: nobody has guessed that."""
    dataset = Opened()
    dataset.base = 0
    loader = made(dataset, 0, 0, {"shuffle": False}, False, batch_size=3, num_workers=1)
    in_torch, collate = made(dataset, 2, 0, {"shuffle": False}, False, batch_size=3, num_workers=1), loader.collate_fn

    def change() -> None:
        if what == "dataset":
            dataset.base = 500
        else:
            loader.collate_fn = in_torch.collate_fn = lambda samples: 500 + collate(samples)

    source, epoch = source_of(loader), iter(in_torch)
    try:
        assert max(source.fetch_ahead(0, 0, (0,))) < 500 and max(next(epoch)) < 500
        change()
        own = (0, 2)
        assert source.fetch_ahead(1, 2, own).tolist() == next(epoch).tolist()
        assert max(source.fetch_ahead(2, 0, own)) < 500
        after, next_epoch = source_of(loader), iter(in_torch)
        assert after.fetch_ahead(0, 2, own).tolist() == next(next_epoch).tolist()
        assert min(after.fetch_ahead(0, 0, own)) >= 500
        after.close()
    finally:
        source.close()


def test_a_worker_init_fn_is_called_once_in_a_process_as_if_in_the_first_process_of_the_loader() -> None:
    told: list[Any] = []

    def begins(worker: int) -> None:
        info: Any = get_worker_info()
        told.append((worker, info.id, info.num_workers, info.seed, info.dataset is DATA, torch.initial_seed()))
        torch.set_num_threads(threads + 1)

    init, threads = WorkerInit(DataLoader(DATA, num_workers=2, worker_init_fn=begins), 7), torch.get_num_threads()
    assert [init.begin(), init.begin()] == [True, False]
    assert told == [(0, 0, 2, 7, True, 7)]
    assert get_worker_info() is None and torch.get_num_threads() == threads


def test_a_worker_init_fn_that_has_raised_is_called_again() -> None:
    """What a process fetches ahead may never be wanted, and what it raised is not seen then."""
    failures = [OSError("no such file")]

    def opens_late(worker: int) -> None:
        if failures:
            raise failures.pop()
        DATA_OPENED.base = 100

    DATA_OPENED.base = -1
    source = source_of(made(DATA_OPENED, 0, 0, {}, False, batch_size=3, num_workers=1, worker_init_fn=opens_late))
    with pytest.raises(OSError, match="no such file"):
        source.fetch(0, 0)
    assert all(source.fetch(0, 0) >= 100)


def test_without_loader_processes_there_is_no_worker_init_fn_as_in_torch() -> None:
    DATA_OPENED.base = -1
    loader = made(DATA_OPENED, 0, 0, {"shuffle": False}, False, batch_size=3, worker_init_fn=opens)
    assert source_of(loader).fetch(0, 0).tolist() == next(iter(loader)).tolist() == [-1, 3, 7]
