"""The batches that a DistributedSampler gives each rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler, TensorDataset

from elastic.errors import ConfigError
from elastic.records.exactly_once import prove
from runtime.data.random_state import seed_all
from runtime.frontends.frameworks.rank_batches import RankBatches, orders

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
