"""The batches of a DataLoader that accelerate has prepared: each rank has those that accelerate gives it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from elastic.errors import ConfigError
from runtime.frontends.frameworks.accelerate_batches import drawn
from runtime.frontends.frameworks.rank_batches import split

accelerate = pytest.importorskip("accelerate", reason="frameworks are installed by `make test-frameworks`")
data_loader = pytest.importorskip("accelerate.data_loader")


def sharded(samples: int, ranks: int, rank: int, **options: Any) -> Any:
    drop_last = options.pop("drop_last", False)
    batches = BatchSampler(SequentialSampler(range(samples)), 4, drop_last)
    return data_loader.BatchSamplerShard(batches, ranks, rank, **options)


@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"split_batches": True}], ids=str)
@pytest.mark.parametrize("samples", [1, 3, 8, 16, 17, 19, 26, 31, 32, 33])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_has_what_accelerate_gives_it(ranks: int, samples: int, options: dict[str, Any]) -> None:
    """Also at the end of an epoch, where accelerate fills up with samples of its beginning."""
    wanted = [[list(batch) for batch in sharded(samples, ranks, rank, **options)] for rank in range(ranks)]
    assert split(sharded(samples, ranks, 0, **options), ranks) == wanted


class Prepared:
    """What `drawn` asks of a DataLoader."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler
        self.dataset = range(20)


def test_skipped_batches_are_skipped_in_each_rank() -> None:
    skipped = data_loader.SkipBatchSampler(data_loader.SkipBatchSampler(sharded(26, 2, 0), 1), 1)
    whole = drawn(Prepared(sharded(26, 2, 0)), 2)
    assert drawn(Prepared(skipped), 2) == [batches[2:] for batches in whole]


def test_an_epoch_draws_once_whatever_the_number_of_ranks() -> None:
    def orders(ranks: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(7)
        sampler = BatchSampler(RandomSampler(range(16), generator=generator), 16 // ranks, drop_last=False)
        loader = Prepared(data_loader.BatchSamplerShard(sampler, ranks, 0) if ranks > 1 else sampler)
        return [[index for own in drawn(loader, ranks) for batch in own for index in batch] for _ in range(3)]

    epochs = orders(1)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert orders(2) == epochs
    assert orders(4) == epochs


def test_a_loader_that_is_not_split_is_refused() -> None:
    loader = Prepared(BatchSampler(SequentialSampler(range(20)), 4, drop_last=False))
    with pytest.raises(ConfigError, match="not split the batches of this DataLoader of range"):
        drawn(loader, 2)
    with pytest.raises(ConfigError, match="prepared for 2 processes, and the job has 4"):
        drawn(Prepared(sharded(20, 2, 0)), 4)
