"""The batches of a framework's DataLoader, for any rank: those that accelerate's BatchSamplerShard, or a
DistributedSampler, gives that rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from elastic.errors import ConfigError
from elastic.protocol.sampling import hash_of, hash_of_ranks
from runtime.data.loader import SAMPLES_LISTED_MAX, seed_fetch
from runtime.data.prefetcher import Habit, Prefetcher, Wanted
from runtime.data.random_state import randomness_kept, seed_all
from runtime.frontends.ddp.sampler_source import WorkerInit, sampler_of
from runtime.frontends.frameworks import own_generators

EPOCHS_KEPT = 2
"""The order of the epoch in progress, and of the one that processes fetch ahead for."""


class RankBatches:
    """The data of a pass, see passes.ShardSource: a shard is what one rank has in one step, a list of micro-batches."""

    def __init__(
        self, loader: DataLoader[Any], ranks: int, micro_batches: int, seed: int, limit: int | None = None
    ) -> None:
        """loader: as Accelerator.prepare gives it, or with a DistributedSampler. micro_batches: of one rank in one
        step; the last step of an epoch has fewer if they do not divide. limit: batches of one rank in one epoch, at
        most. Raises ConfigError for a dataset without random access, and without a size of batches."""
        if not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is None:
            raise ConfigError(
                "the training DataLoader has no size of batches (Lightning drops a BatchSampler that a script gives): "
                "give it batch_size= and shuffle=, or sampler="
            )
        if isinstance(loader.dataset, IterableDataset):
            raise ConfigError(
                f"{type(loader.dataset).__name__} has no random access: nobody could give a lost worker's samples to "
                "another one. Use a dataset with __len__ and __getitem__"
            )
        self.shards = ranks
        self._loader = loader
        self._micro_batches = micro_batches
        self._seed = seed
        self._limit = limit
        self._worker = WorkerInit(loader, seed)
        self._generators = own_generators.owned_by(loader.collate_fn, loader.dataset)
        self._orders: dict[int, list[list[list[int]]]] = {}
        self._dataset_epoch: int | None = None
        """The epoch to which the dataset was set last."""
        self._hashes: dict[int, dict[str, Any]] = {}
        """Epoch -> what `order` has found; of the epoch that was asked for last."""
        lengths = [len(batches) for batches in self._order(0)]
        if len(set(lengths)) != 1:
            raise ConfigError(f"the ranks have {lengths} batches; leave even_batches on, or set drop_last")
        self.batches = lengths[0]
        """Of one rank in one epoch."""
        read = loader.dataset, loader.collate_fn
        self._prefetcher = Prefetcher(self._fetch, loader.num_workers, *read) if loader.num_workers > 0 else None

    def __len__(self) -> int:
        """Steps of an epoch."""
        return -(-self.batches // self._micro_batches)

    def _order(self, epoch: int) -> list[list[list[int]]]:
        """Rank -> its batches of this epoch, each a list of indices."""
        found = self._orders.pop(epoch, None)
        if found is None:
            with randomness_kept():
                drawn = orders(self._loader, self.shards, epoch, self._seed)
                self._dataset_epoch = epoch
                found = [batches[: self._limit] for batches in drawn]
        self._orders[epoch] = found  # behind those that were used before
        if len(self._orders) > EPOCHS_KEPT:
            del self._orders[next(iter(self._orders))]
        return found

    def about(self) -> dict[str, Any]:
        """All that decides which samples a step of the first epoch has."""
        return {
            "order": "sampler",
            "shards": self.shards,
            "samples": len(self._loader.dataset),  # type: ignore[arg-type]  # it is no IterableDataset
            "batches": self.batches,
            **self.order(0),
        }

    def order(self, epoch: int) -> dict[str, Any]:
        """drawn: how many samples all ranks have in this epoch. sha256: of these in their order."""
        if epoch not in self._hashes:
            ranks = [[index for batch in batches for index in batch] for batches in self._order(epoch)]
            self._hashes = {epoch: {"drawn": sum(map(len, ranks)), "sha256": hash_of_ranks(ranks)}}
        return self._hashes[epoch]

    # What a pass asks

    def weight(self, shard: int) -> float:
        """DistributedDataParallel takes the mean over ranks, however many samples each has."""
        return 1.0

    def samples(self, epoch: int, step: int) -> list[Any]:
        given = [[index for batch in self._part(batches, step) for index in batch] for batches in self._order(epoch)]
        if sum(map(len, given)) <= SAMPLES_LISTED_MAX:
            return given
        return [{"n": len(indices), "sha256": hash_of(indices)} for indices in given]

    def begin_step(self, epoch: int, step: int) -> None:
        """Nothing is open between two steps."""

    def batch(self, wanted: Wanted, own: tuple[int, ...] | None) -> list[Any]:
        if self._prefetcher is None or own is None:
            return self._fetch(wanted.epoch, wanted.step, wanted.shard)
        found: list[Any] = self._prefetcher.get(wanted, Habit(own, len(self)))
        return found

    def ends(self, shard: int) -> bool:
        """All know how many steps an epoch has."""
        return False

    def release(self) -> None:
        """Nothing is open between two steps."""

    def close(self) -> None:
        """End the processes that fetch ahead."""
        if self._prefetcher is not None:
            self._prefetcher.close()

    def _part(self, batches: list[list[int]], step: int) -> list[list[int]]:
        return batches[step * self._micro_batches : (step + 1) * self._micro_batches]

    def _fetch(self, epoch: int, step: int, rank: int) -> list[Any]:
        batches = self._part(self._order(epoch)[rank], step)
        if self._dataset_epoch != epoch:  # the order was drawn before that of another epoch
            _set_epoch(self._loader.dataset, epoch)
            self._dataset_epoch = epoch
        if self._worker.begin():  # worker_init_fn may have made generators
            self._generators = own_generators.owned_by(self._loader.collate_fn, self._loader.dataset)
        own_generators.seed(self._generators, seed_fetch(self._seed, epoch, step, rank))
        return [collated(self._loader, batch) for batch in batches]


class _Listed:
    """The batches of a batch sampler, drawn once."""

    def __init__(self, batches: list[list[int]], sampler: Any) -> None:
        self._batches = batches
        self.batch_size = getattr(sampler, "batch_size", None)
        self.drop_last = getattr(sampler, "drop_last", False)

    def __iter__(self) -> Iterator[list[int]]:
        return (list(batch) for batch in self._batches)  # accelerate lengthens the last one in place

    def __len__(self) -> int:
        return len(self._batches)


def orders(loader: DataLoader[Any], ranks: int, epoch: int, seed: int) -> list[list[list[int]]]:
    """Rank -> its batches of this epoch, each a list of indices. seed: for samplers that know no epoch. Raises
    ConfigError for a loader of all ranks alike."""
    sharded, inner = loader.batch_sampler, whole(loader)
    for part in (loader.dataset, inner, getattr(inner, "sampler", None)):
        _set_epoch(part, epoch)
    seed_all(seed, epoch, "order of samples")
    if (sampler := sampler_of(loader)) is not None:
        return [_of_rank(loader, sampler, rank, (seed, epoch)) for rank in range(ranks)]
    if sharded is inner:
        if ranks > 1:
            raise ConfigError(
                "this DataLoader gives every rank the same samples: give it a DistributedSampler, or to "
                "accelerator.prepare(), as transformers.Trainer.get_train_dataloader() does"
            )
        with own_generators.of_epoch(sharded, epoch):
            return [[list(batch) for batch in inner or ()]]
    with own_generators.of_epoch(sharded, epoch):
        return split(sharded, ranks)


def _set_epoch(part: Any, epoch: int) -> None:
    """Call set_epoch() of a dataset or sampler that has it."""
    set_epoch: Callable[[int], None] | None = getattr(part, "set_epoch", None)
    if set_epoch is not None:
        set_epoch(epoch)


def split(sharded: Any, ranks: int) -> list[list[list[int]]]:
    """Rank -> its batches, which accelerate's BatchSamplerShard gives it. The sampler within draws once."""
    listed = _Listed([list(batch) for batch in sharded.batch_sampler], sharded.batch_sampler)
    found = []
    for rank in range(ranks):
        own = copy(sharded)
        own.batch_sampler, own.process_index = listed, rank
        found.append([list(batch) for batch in own])
    return found


def _of_rank(loader: DataLoader[Any], sampler: Any, rank: int, place: tuple[int, int]) -> list[list[int]]:
    """A rank's batches. All ranks draw from the same random numbers: a sampler may draw all samples for each."""
    own, sampler.rank = sampler.rank, rank
    seed_all(*place, "order of samples")
    try:
        with own_generators.of_epoch(loader.batch_sampler, place[1]):
            return [list(batch) for batch in loader.batch_sampler or ()]
    finally:
        sampler.rank = own


def whole(loader: DataLoader[Any]) -> Any:
    """The batch sampler that accelerate has split between ranks."""
    return getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler)


def collated(loader: DataLoader[Any], indices: list[int]) -> Any:
    """The batch of these samples."""
    dataset: Any = loader.dataset
    if getattr(dataset, "__getitems__", None):
        return loader.collate_fn(dataset.__getitems__(indices))
    return loader.collate_fn([dataset[index] for index in indices])
