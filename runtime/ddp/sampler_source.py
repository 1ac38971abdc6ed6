"""The batches of a script's own DataLoader, for any logical rank: those that its DistributedSampler gives that rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, cast

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from elastic.errors import ConfigError
from elastic.protocol.sampling import hash_of, hash_of_ranks
from runtime.data.loader import SAMPLES_LISTED_MAX, seed_fetch
from runtime.data.prefetcher import Habit, Prefetcher, Wanted
from runtime.data.random_state import randomness_kept
from runtime.ddp.frames.plain_values import Plain


def sampler_of(loader: DataLoader[Any]) -> DistributedSampler[Any] | None:
    """The loader's DistributedSampler, also one of a class of the script's own that has its attributes, also inside a
    batch sampler; None if it has none."""
    for found in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(found, DistributedSampler) or all(hasattr(found, name) for name in ("num_replicas", "rank")):
            return cast(DistributedSampler[Any], found)
    return None


class Position:
    """Where the script was when the step in progress began. It is registered, so that newcomers copy it and checkpoints
    have it."""

    def __init__(self) -> None:
        self.batch = 0
        """How many batches of this epoch each rank has had."""
        self.values: dict[str, Plain] = {}
        """The plain values of the script's frames that change while it trains (see frames/plain_values.py)."""
        self.copied = False
        """It was, and the script has not got these values yet."""

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self.batch, "values": dict(self.values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batch, self.values, self.copied = state["batch"], dict(state["values"]), True


class SamplerSource:
    """One epoch of a loader, as the pass over a step's shards sees it (see Loader): shard r is logical rank r.

    A step has at least one batch of each rank. used: how many it has had so far; before: how many when the pass in
    progress began.
    """

    def __init__(
        self, loader: DataLoader[Any], sampler: DistributedSampler[Any], ranks: int, position: Position
    ) -> None:
        """Raises ConfigError for a loader whose ranks have unequally many batches, or that draws for another world."""
        if isinstance(loader.dataset, IterableDataset):
            raise ConfigError("a DataLoader with a DistributedSampler needs a dataset with random access")
        if sampler.num_replicas != ranks:
            raise ConfigError(
                f"the DistributedSampler was made for {sampler.num_replicas} ranks, and the job has {ranks}: leave "
                f"num_replicas= out, or start the script with --ranks {sampler.num_replicas}"
            )
        self.shards = ranks
        self.used = self.before = 0
        self._position = position
        self._pid = self._begun_in = os.getpid()
        self._loader = loader
        self._sampler = sampler
        with randomness_kept():
            self._batches = [self._drawn(rank) for rank in range(ranks)]
        drawn = {index for batches in self._batches for batch in batches for index in batch}
        if ranks > 1 and len(drawn) > 1 and all(batches == self._batches[0] for batches in self._batches):
            raise ConfigError(
                f"{type(sampler).__name__} gives every rank the same samples: let it look at its rank in each __iter__"
            )
        if len({len(batches) for batches in self._batches}) != 1:
            raise ConfigError(
                f"the ranks have {[len(batches) for batches in self._batches]} batches; a DistributedSampler gives "
                "each as many"
            )
        self._prefetcher: Prefetcher | None = None
        self._offered: tuple[tuple[int, int], Any] | None = None

    def _drawn(self, rank: int) -> list[list[int]]:
        """The samples of each of a rank's batches in this epoch."""
        own, self._sampler.rank = self._sampler.rank, rank
        seed_fetch(self.seed, self.epoch, -1, 0)  # some draw from the global generators, alike in all ranks
        try:
            if self._loader.batch_sampler is None:
                return [[index] for index in self._loader.sampler]
            return [list(batch) for batch in self._loader.batch_sampler]
        finally:
            self._sampler.rank = own

    def __len__(self) -> int:
        """Batches of one rank."""
        return len(self._batches[0])

    @property
    def first(self) -> int:
        """Number of the first batch of the step in progress."""
        return self._position.batch

    def end_step(self) -> None:
        """The batches that the step had are used up."""
        self._position.batch += self.used
        self.used = self.before = 0

    @property
    def left(self) -> int:
        """Batches that each rank has behind those which were used."""
        return len(self) - self.first - self.used

    @property
    def seed(self) -> int:
        return int(getattr(self._sampler, "seed", 0))

    @property
    def epoch(self) -> int:
        """As the script has set it by `sampler.set_epoch`."""
        return int(getattr(self._sampler, "epoch", 0))

    def about(self) -> dict[str, Any]:
        """All that decides which samples a step has, as JSON. drawn: how many samples all ranks have."""
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

    def weight(self, shard: int) -> float:
        """DistributedDataParallel takes the mean over ranks, however many samples each has."""
        return 1.0

    def samples(self, epoch: int, step: int) -> list[Any]:
        """As Loader.samples, of all that the step in progress has had so far."""
        given = [
            [index for batch in batches[self.first : self.first + self.used] for index in batch]
            for batches in self._batches
        ]
        if sum(map(len, given)) <= SAMPLES_LISTED_MAX:
            return given
        return [{"n": len(indices), "sha256": hash_of(indices)} for indices in given]

    def begin_step(self, epoch: int, step: int) -> None:
        """Where a step begins is said by `first`."""

    def ends(self, shard: int) -> bool:
        """All know how many batches an epoch has."""
        return False

    def release(self) -> None:
        """Nothing is open between two batches."""

    def batch(self, wanted: Wanted, own: tuple[int, ...] | None) -> Any:
        """The first batch of a rank in a pass of the step in progress."""
        wish, offered = (self.first + self.before, wanted.shard), self._offered
        self._offered = None
        return offered[1] if offered is not None and offered[0] == wish else self.fetch_ahead(*wish, own)

    def offer(self, number: int, rank: int, own: tuple[int, ...] | None) -> Any:
        """As `fetch_ahead`, of the batch that a pass will probably ask for next."""
        self._offered = ((number, rank), self.fetch_ahead(number, rank, own))
        return self._offered[1]

    def fetch_ahead(self, number: int, rank: int, own: tuple[int, ...] | None) -> Any:
        """A rank's batch of that number in the epoch, by the processes that the loader asks for with num_workers.
        own: the ranks of this worker, from which it is guessed what comes next."""
        if not self._loader.num_workers or own is None:
            return self.fetch(0, number, rank)
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(self.fetch, self._loader.num_workers)
        return self._prefetcher.get(Wanted(0, number, 0, rank), Habit(own, len(self)))

    def fetch(self, epoch: int, number: int, rank: int) -> Any:
        """The collated batch, with random numbers that depend on the sampler's seed and epoch, number and rank only."""
        if self._loader.worker_init_fn is not None and os.getpid() not in (self._pid, self._begun_in):
            self._begun_in = os.getpid()
            self._loader.worker_init_fn(0)
        number = min(number, len(self) - 1)  # what is guessed behind the end of the epoch is never asked for
        seed_fetch(self.seed, self.epoch, number, rank)
        dataset: Any = self._loader.dataset
        indices = self._batches[rank][number]
        if self._loader.batch_sampler is None:
            return self._loader.collate_fn(dataset[indices[0]])
        if getattr(dataset, "__getitems__", None):
            return self._loader.collate_fn(dataset.__getitems__(indices))
        return self._loader.collate_fn([dataset[index] for index in indices])

    def of_rank(self, rank: int) -> Iterator[Any]:
        """All batches of a rank, in order."""
        for number in range(len(self)):
            yield self.fetch(0, number, rank)

    def close(self) -> None:
        """End the processes that fetch ahead."""
        if self._prefetcher is not None:
            self._prefetcher.close()
