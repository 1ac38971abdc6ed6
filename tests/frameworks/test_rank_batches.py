"""The batches that a DistributedSampler gives each rank."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

from elastic.errors import ConfigError
from elastic.records.exactly_once import prove
from runtime.data.prefetcher import Wanted
from runtime.data.random_state import drawn_from, seed_all
from runtime.frontends.frameworks.hugging_face_evaluation import Evaluation, _Batches
from runtime.frontends.frameworks.lightning.evaluation import EvaluationPlaces
from runtime.frontends.frameworks.rank_batches import RankBatches, collated, orders
from runtime.frontends.frameworks.step_loop import StepLoop

RANKS, SEED = 3, 5
DATA = TensorDataset(torch.arange(20))


class Drawn(DistributedSampler[Any]):
    """Draws all samples anew in each rank, as Lightning's wrapper of a random sampler does."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(20).tolist()[self.rank :: RANKS][: self.num_samples])


def loader(sampler: Sampler[Any]) -> DataLoader[Any]:
    return DataLoader(DATA, batch_sampler=BatchSampler(sampler, 4, drop_last=False))


def sampler(rank: int = 0) -> DistributedSampler[Any]:
    return DistributedSampler(DATA, num_replicas=RANKS, rank=rank, seed=SEED)


def test_each_rank_has_what_its_own_sampler_gives_it() -> None:
    for epoch in (0, 3):
        given = orders(loader(sampler()), RANKS, epoch, SEED)
        for rank in range(RANKS):
            own = sampler(rank)
            own.set_epoch(epoch)
            assert given[rank] == list(BatchSampler(own, 4, drop_last=False))


def test_a_sampler_without_epochs_draws_the_same_for_all_ranks() -> None:
    drawn = loader(Drawn(DATA, num_replicas=RANKS, rank=0))
    seed_all("what was drawn before")
    given = orders(drawn, RANKS, 1, SEED)
    flat = [index for batches in given for batch in batches for index in batch]
    assert sorted(set(flat)) == sorted(flat), "no sample is in two ranks"
    assert orders(drawn, RANKS, 1, SEED) == given
    assert orders(drawn, RANKS, 2, SEED) != given


class Masks:
    """A collator with generators of its own."""

    def __init__(self) -> None:
        self.torch, self.numpy = torch.Generator().manual_seed(1), np.random.default_rng(1)
        self.old, self.python = np.random.RandomState(1), random.Random(1)

    def __call__(self, samples: list[Any]) -> list[float]:
        drawn = torch.rand(1, generator=self.torch)
        return [float(drawn), self.numpy.random(), self.old.random(), self.python.random()]


class Wrapped:
    """As transformers wraps a collator to remove columns."""

    def __init__(self, within: Any) -> None:
        self.within = within

    def __call__(self, samples: list[Any]) -> list[float]:
        found: list[float] = self.within(samples)
        return found


def test_a_batch_has_the_numbers_of_its_place_also_from_generators_of_its_collator() -> None:
    def made() -> RankBatches:
        batches = BatchSampler(sampler(), 4, drop_last=False)
        return RankBatches(DataLoader(DATA, batch_sampler=batches, collate_fn=Wrapped(Masks())), RANKS, 1, SEED)

    here, newcomer = made(), made()
    places = [(epoch, step, rank) for epoch in range(2) for step in range(2) for rank in range(RANKS)]
    found = [here._fetch(*place)[0] for place in places]
    assert [newcomer._fetch(*place)[0] for place in reversed(places)] == found[::-1]
    assert len({number for numbers in found for number in numbers}) == 4 * len(places)


def test_the_order_of_an_epoch_is_that_of_its_number_also_from_a_generator_of_the_sampler() -> None:
    def made() -> tuple[DataLoader[Any], torch.Generator]:
        own = torch.Generator().manual_seed(3)
        return loader(WeightedRandomSampler([1.0] * 20, 20, generator=own)), own

    (here, own), (newcomer, _) = made(), made()
    before = own.get_state()
    given = [orders(here, 1, epoch, SEED) for epoch in range(3)]
    assert orders(newcomer, 1, 2, SEED) == given[2]
    assert orders(newcomer, 1, 0, SEED) == given[0]
    assert given[0] != given[1] != given[2]
    assert torch.equal(own.get_state(), before)
    assert given[0] == [[list(batch) for batch in made()[0].batch_sampler or ()]], "as without elastic-ring"


class Owner:
    """Its method collates, as that of a trainer, which also has the loader."""

    def __init__(self, own: torch.Generator) -> None:
        batches = BatchSampler(WeightedRandomSampler([1.0] * 20, 20, generator=own), 4, drop_last=False)
        self.loader: DataLoader[Any] = DataLoader(DATA, batch_sampler=batches, collate_fn=self.collated)

    def collated(self, samples: list[Any]) -> list[Any]:
        return samples


def test_a_fetch_leaves_the_generator_of_the_sampler_alone() -> None:
    own = torch.Generator().manual_seed(3)
    source = RankBatches(Owner(own).loader, 1, 1, SEED)
    source._fetch(0, 1, 0)
    assert torch.equal(own.get_state(), torch.Generator().manual_seed(3).get_state())


class Curriculum(Dataset[int]):
    """Its samples depend on the epoch."""

    epoch = -1

    def __len__(self) -> int:
        return 20

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> int:
        return 1000 * self.epoch + index


@pytest.mark.parametrize("processes", [0, 1])
def test_a_batch_is_fetched_from_the_dataset_of_its_own_epoch(processes: int) -> None:
    """A lost worker's rank is behind what a process has fetched ahead, which is of the next epoch."""
    batches = BatchSampler(sampler(), 4, drop_last=False)
    source = RankBatches(DataLoader(Curriculum(), batch_sampler=batches, num_workers=processes), RANKS, 1, SEED)
    places = [(0, 0, 1), (0, 1, 1), (0, 0, 2), (0, 1, 2), (1, 0, 2), (0, 1, 0), (2, 0, 0), (1, 1, 0)]
    try:
        found = [source.batch(Wanted(epoch, step, 0, rank), (rank,)) for epoch, step, rank in places]
    finally:
        source.close()
    for (epoch, step, rank), (batch,) in zip(places, found, strict=True):
        listed = source.samples(epoch, step)[rank]
        assert batch.tolist() == [1000 * epoch + index for index in listed], (epoch, step, rank)


class Scaled:
    def __init__(self) -> None:
        self.scale = 1.0

    def __call__(self, samples: list[Any]) -> list[float]:
        return [self.scale * float(x) for (x,) in samples]

    def collated(self, samples: list[Any]) -> list[float]:
        return self(samples)


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize(
    "how", [lambda own: own, lambda own: own.collated, partial], ids=["object", "method", "partial"]
)
def test_what_a_callback_changes_in_the_collator_holds_from_the_next_step_on(how: Any, processes: int) -> None:
    own, batches = Scaled(), BatchSampler(sampler(), 4, drop_last=False)
    loader = DataLoader(DATA, batch_sampler=batches, collate_fn=how(own), num_workers=processes)
    source = RankBatches(loader, RANKS, 1, SEED)
    try:
        for epoch, step in ((epoch, step) for epoch in range(3) for step in range(2)):
            own.scale = 1.0 + epoch
            for rank in (0, 1):
                (batch,) = source.batch(Wanted(epoch, step, 0, rank), (0, 1))
                assert batch == [own.scale * index for index in source.samples(epoch, step)[rank]]
    finally:
        source.close()


class Opened(Dataset[Any]):
    """It has to be opened in each process, and draws from a generator that it has since then."""

    def __init__(self) -> None:
        self.base, self.opened = -1.0, 0
        self.drawn: random.Random | None = None

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> list[float]:
        return [self.base + index, self.drawn.random() if self.drawn else 0.0]

    def open(self, worker: int) -> None:
        np.random.seed(0)
        self.base, self.opened, self.drawn = 100.0, self.opened + 1, random.Random()


def opened(processes: int) -> tuple[Opened, DataLoader[Any]]:
    data, batches = Opened(), BatchSampler(sampler(), 4, drop_last=False)
    return data, DataLoader(data, batch_sampler=batches, num_workers=processes, worker_init_fn=data.open)


def test_the_worker_init_fn_is_called_once_in_each_process_that_fetches() -> None:
    """What was not guessed is fetched in the worker itself."""
    data, loader = opened(processes=1)
    source, newcomer = (RankBatches(loader, RANKS, 1, SEED) for loader in (loader, opened(processes=1)[1]))
    places = [Wanted(epoch, step, 0, rank) for epoch in range(2) for step in range(2) for rank in (0, 1)]
    try:
        found = [torch.stack(source.batch(place, (0, 1))[0]) for place in places]
    finally:
        source.close()
    assert data.opened == 1
    for place, (numbers, _) in zip(places, found, strict=True):
        assert numbers.tolist() == [100 + index for index in source.samples(place.epoch, place.step)[place.shard]]
    again = [torch.stack(newcomer.batch(place, None)[0]) for place in places[::-1]]
    assert all(map(torch.equal, again[::-1], found)), "also what is drawn from a generator that it has made"


def test_without_loader_processes_no_worker_init_fn_is_called() -> None:
    data, loader = opened(processes=0)
    RankBatches(loader, RANKS, 1, SEED)._fetch(0, 0, 0)
    list(EvaluationPlaces(loader, RANKS, SEED, by_rank=True))
    assert data.opened == 0


def test_the_worker_init_fn_is_called_before_an_evaluation_of_lightning() -> None:
    data, loader = opened(processes=1)
    before, places = drawn_from(), EvaluationPlaces(loader, RANKS, SEED, by_rank=True)
    for _ in range(2):
        assert [place.number for place in places] == list(range(6))
        assert data.opened == 1
    assert drawn_from() == before


def test_the_worker_init_fn_is_called_before_an_evaluation_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    _, loader = opened(processes=1)
    trainer = SimpleNamespace(state=SimpleNamespace(global_step=0), model=None)
    loop = SimpleNamespace(ranks=RANKS, entered=True)
    training: Any = SimpleNamespace(seed=SEED, loops=SimpleNamespace(number=0))
    evaluation = Evaluation(trainer, {}, cast(StepLoop, loop), training)
    found: list[Any] = []

    def rows(loader: Any, together: list[list[int]], *_: Any) -> list[Any]:
        found.extend(torch.stack(collated(loader, indices)).tolist() for indices in together)
        return [[{}] for _ in together]

    monkeypatch.setattr(evaluation, "_rows", rows)
    before = drawn_from()
    for _ in range(2):
        evaluation._answered(_Batches(loader, [[3, 4], [5, 6]], None), "evaluation", False, None)
    assert drawn_from() == before
    assert found[0][0] == [103, 104] and found[2:] == found[:2]


def test_a_limit_ends_the_epoch_of_each_rank() -> None:
    limited, whole = (RankBatches(loader(sampler()), RANKS, 1, SEED, limit) for limit in (1, None))
    assert (len(limited), len(whole)) == (1, 2)
    assert limited.samples(0, 0) == whole.samples(0, 0)


def test_a_loader_of_all_ranks_alike_is_refused() -> None:
    with pytest.raises(ConfigError, match="give it a DistributedSampler"):
        RankBatches(DataLoader(DATA, batch_size=4), RANKS, 1, SEED)


def test_the_samples_of_each_epoch_are_those_of_its_own_plan() -> None:
    """A framework goes through all of its epochs in one loop of the job."""
    source = RankBatches(loader(sampler()), RANKS, 1, SEED)

    def records(planned: int | None = None) -> list[dict[str, Any]]:
        places = [(epoch, step) for epoch in range(3) for step in range(len(source))]
        return [
            {
                "step": number,
                "epoch": epoch,
                "samples": source.samples(epoch, step),
                "data": {**source.about(), **source.order(epoch if planned is None else planned)},
            }
            for number, (epoch, step) in enumerate(places)
        ]

    assert [(epoch.proved, epoch.used, epoch.repeated) for epoch in prove(records())] == 3 * [(True, 20, 1)]
    assert [epoch.proved for epoch in prove(records(planned=0))] == [True, False, False]
