"""The batches of a script's own DataLoader, for any logical rank: those that its DistributedSampler gives that rank."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torch.utils.data._utils import worker

from elastic.errors import ConfigError
from elastic.protocol.sampling import hash_of, hash_of_ranks
from runtime.data.loader import SAMPLES_LISTED_MAX, seed_fetch
from runtime.data.prefetcher import Habit, Prefetcher, Wanted
from runtime.data.random_state import (
    GENERATORS,
    derived_seed,
    generator_state,
    randomness_kept,
    seed_generators,
    set_generator_state,
)
from runtime.frontends.ddp.rank_source import Position, RankSource

BATCHES_MORE = 1000
"""An epoch may have twice as many batches as its loader says, and so many more; what has more has no end."""
VALUES = (bool, int, float, str, list, set, dict, deque, np.ndarray, torch.Tensor)


def sampler_of(loader: DataLoader[Any]) -> DistributedSampler[Any] | None:
    """The loader's DistributedSampler, also one of a class of the script's own that has its attributes, also inside a
    batch sampler, or such a batch sampler; None if it has none."""
    for found in (loader.sampler, getattr(loader.batch_sampler, "sampler", None), loader.batch_sampler):
        if isinstance(found, DistributedSampler) or all(hasattr(found, name) for name in ("num_replicas", "rank")):
            return cast(DistributedSampler[Any], found)
    return None


def seed_again(seed: int, again: int) -> int:
    """The seed of the random numbers that the batches of a loop draw. seed: that of the epoch's first loop. again: how
    often a loop has begun in the same epoch of the sampler or loader before: the order of the samples may repeat then,
    but the random numbers of a batch are new."""
    return derived_seed(b"epoch again", f"{seed},{again}".encode()) if again else seed


class WorkerInit:
    """The worker_init_fn of a loader, for which torch would have processes. It is called in each process that fetches,
    also in the worker itself, which fetches what was not guessed: a batch must not depend on who fetches it."""

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        """seed: of the random numbers that it draws."""
        self._loader = loader
        self._seed = seed
        self._begun_in = 0
        """The process in which it was called."""

    def begin(self) -> bool:
        """Call it, if this process has not; says whether it did. Changes the state of the global generators."""
        loader = self._loader
        if loader.worker_init_fn is None or not loader.num_workers or os.getpid() == self._begun_in:
            return False
        seed_generators(self._seed)
        with self._as_worker():
            loader.worker_init_fn(0)
        self._begun_in = os.getpid()
        return True

    @contextmanager
    def _as_worker(self) -> Iterator[None]:
        """torch.utils.data.get_worker_info() gives what it gives in the first process of this loader: a worker_init_fn
        may ask it. It may set the number of threads, which decides bits of the steps of this process: that is kept."""
        loader, threads = self._loader, torch.get_num_threads()
        info = worker.WorkerInfo(id=0, num_workers=loader.num_workers, seed=self._seed, dataset=loader.dataset)
        before, worker._worker_info = worker._worker_info, info
        try:
            yield
        finally:
            worker._worker_info = before
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)


class ListedSource(RankSource):
    """One epoch of a DataLoader. The samples of each batch are known for all ranks."""

    def __init__(self, loader: DataLoader[Any], batches: list[list[list[int]]], position: Position) -> None:
        """batches: rank -> its batches of this epoch, each a list of indices. Raises ConfigError if the ranks have
        unequally many."""
        if len({len(own) for own in batches}) != 1:
            raise ConfigError(
                f"the ranks have {[len(own) for own in batches]} batches; a DistributedSampler gives each as many"
            )
        super().__init__(len(batches), position)
        self._loader = loader
        self._worker = WorkerInit(loader, self.seed)
        self._batches = batches
        self._prefetcher: Prefetcher | None = None

    @property
    @abstractmethod
    def seed(self) -> int:
        """Seed of the random numbers that a batch draws when it is fetched."""

    def __len__(self) -> int:
        return len(self._batches[0])

    def about(self) -> dict[str, Any]:
        """drawn: how many samples all ranks have."""
        ranks = [[index for batch in batches for index in batch] for batches in self._batches]
        return {
            "order": "sampler",
            "shards": self.shards,
            "samples": len(self._loader.dataset),  # type: ignore[arg-type]  # it is no IterableDataset
            "drawn": sum(map(len, ranks)),
            "batches": len(self),
            "sampler_epoch": self.epoch,
            "sha256": hash_of_ranks(ranks),
        }

    def samples(self, epoch: int, step: int) -> list[Any]:
        given = [
            [index for batch in batches[self.first : self.first + self.used] for index in batch]
            for batches in self._batches
        ]
        if sum(map(len, given)) <= SAMPLES_LISTED_MAX:
            return given
        return [{"n": len(indices), "sha256": hash_of(indices)} for indices in given]

    def fetch_ahead(self, number: int, rank: int, own: tuple[int, ...] | None) -> Any:
        """By the processes that the loader asks for with num_workers, whoever is lost: what the script changes in the
        dataset or collate_fn meanwhile holds from the next epoch on, as with torch's processes, which have copies of
        them from the beginning of the epoch."""
        if not self._loader.num_workers or own is None:
            return self.fetch(number, rank)
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(lambda _, *batch: self.fetch(*batch), self._loader.num_workers, here=False)
        return self._prefetcher.get(Wanted(0, number, 0, rank), Habit(own, len(self)))

    def fetch(self, number: int, rank: int) -> Any:
        """The collated batch, with random numbers that depend on the sampler's seed and epoch, number and rank only."""
        self._worker.begin()
        number = min(number, len(self) - 1)  # what is guessed behind the end of the epoch is never asked for
        seed_fetch(self.seed, self.epoch, number, rank)
        dataset: Any = self._loader.dataset
        indices = self._batches[rank][number]
        if self._loader.batch_sampler is None:
            return self._loader.collate_fn(dataset[indices[0]])
        if getattr(dataset, "__getitems__", None):
            return self._loader.collate_fn(dataset.__getitems__(indices))
        return self._loader.collate_fn([dataset[index] for index in indices])

    def of_rank(self, rank: int, first: int = 0) -> Iterator[Any]:
        """The batches of a rank from this number on, in order."""
        for number in range(first, len(self)):
            yield self.fetch(number, rank)

    def fetch_now(self, number: int, rank: int) -> Any:
        """As `fetch`, where the script wants the batch."""
        return self.to_device(self.fetch(number, rank))

    def to_device(self, batch: Any) -> Any:
        """The batch where the script wants it: a plain DataLoader leaves it where it is."""
        return batch

    def close(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()


def _batches_of(loader: DataLoader[Any]) -> int:
    """As the loader says; a batch sampler need not say it, and has one sample at least in each batch."""
    try:
        return len(loader)
    except TypeError:
        return len(loader.dataset)  # type: ignore[arg-type]  # it is no IterableDataset


class SamplerStates:
    """What the samplers of a loader have now in their attributes: plain values, lists and the like, and generators."""

    def __init__(self, loader: DataLoader[Any], *samplers: object) -> None:
        owners = {id(one): vars(one) for one in samplers if hasattr(one, "__dict__")}.values()
        self._kept = [
            (attributes, {name: _copied(value) for name, value in attributes.items() if value is not loader.dataset})
            for attributes in owners
        ]
        self._generators = [
            (value, generator_state(value))
            for attributes in owners
            for value in attributes.values()
            if isinstance(value, GENERATORS)
        ]

    def restore(self) -> None:
        """Also what was not there is not there any more."""
        for attributes, kept in self._kept:
            for name in [name for name, value in attributes.items() if name not in kept and isinstance(value, VALUES)]:
                del attributes[name]
            attributes |= {name: _copied(value) for name, value in kept.items()}
        for generator, state in self._generators:
            set_generator_state(generator, state)


def _copied(value: Any) -> Any:
    """A copy of a collection with all collections in it; everything else itself."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in (list, set, deque):
        return type(value)(map(_copied, value))
    return {key: _copied(entry) for key, entry in value.items()} if type(value) is dict else value


class SamplerSource(ListedSource):
    """One epoch of a DataLoader that has a DistributedSampler."""

    def __init__(
        self, loader: DataLoader[Any], sampler: DistributedSampler[Any], ranks: int, position: Position, again: int = 0
    ) -> None:
        """again: how often a loop has begun with the sampler's epoch before this one. Raises ConfigError for a loader
        whose ranks have unequally many batches, that draws for another world, or whose epoch has no end."""
        if isinstance(loader.dataset, IterableDataset):
            raise ConfigError("a DataLoader with a DistributedSampler needs a dataset with random access")
        if sampler.num_replicas != ranks:
            raise ConfigError(
                f"the DistributedSampler was made for {sampler.num_replicas} ranks, and the job has {ranks}: leave "
                f"num_replicas= out, or start the script with --ranks {sampler.num_replicas}"
            )
        self._sampler = sampler
        self._again = again
        states = SamplerStates(loader, sampler, loader.sampler, loader.batch_sampler)
        batches = []
        with randomness_kept():
            for rank in range(ranks):
                states.restore()  # each rank of torchrun has a sampler of its own, which draws once
                batches.append(self._drawn(loader, rank))
        drawn = {index for own in batches for batch in own for index in batch}
        if ranks > 1 and len(drawn) > 1 and all(own == batches[0] for own in batches):
            raise ConfigError(
                f"{type(sampler).__name__} gives every rank the same samples: let it look at its rank in each __iter__"
            )
        super().__init__(loader, batches, position)

    def _drawn(self, loader: DataLoader[Any], rank: int) -> list[list[int]]:
        """The samples of each of a rank's batches in this epoch."""
        own = self._sampler.rank
        try:
            self._sampler.rank = rank
        except AttributeError as error:
            raise ConfigError(
                f"the rank of {type(self._sampler).__name__} cannot be set: let `rank` be a plain attribute of it, as "
                "a worker draws the samples of several ranks"
            ) from error
        seed_fetch(self.seed, self.epoch, -1, 0)  # some draw from the global generators, alike in all ranks
        try:
            if loader.batch_sampler is None:
                return [[index] for index in loader.sampler]
            most = 2 * _batches_of(loader) + BATCHES_MORE
            batches = [list(batch) for batch in islice(loader.batch_sampler, most + 1)]
            if len(batches) > most:
                raise ConfigError(
                    f"the batch sampler of the training loader ({type(loader.batch_sampler).__name__}) has no end, as "
                    "it begins again behind each epoch: use a plain DataLoader, whose loop is over with the epoch"
                )
            return batches
        finally:
            self._sampler.rank = own

    @property
    def seed(self) -> int:
        return seed_again(int(getattr(self._sampler, "seed", 0)), self._again)

    @property
    def epoch(self) -> int:
        """As the script has set it by `sampler.set_epoch`."""
        return int(getattr(self._sampler, "epoch", 0))
