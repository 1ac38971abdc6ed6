"""job.loader: one batch per (epoch, step, shard), the same in every worker and in any order of calls.

There is no iterator state. A fetch first seeds the RNGs from (seed, epoch, step, shard), so random transforms give the
same samples in every worker, with or without loader processes.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from numpy.typing import ArrayLike
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, IterableDataset, default_collate

from elastic.errors import ConfigError
from elastic.protocol.sampling import SamplePlan, Tail, Weights, hash_of
from runtime.data.prefetcher import Habit, Prefetcher, Wanted
from runtime.data.random_state import seed_generators

_STREAM = (
    ", or read it from front to back: job.stream(open, shards=...), open(shard, epoch, skip) -> iterator of batches"
)
SAMPLES_LISTED_MAX = 4096
"""A step's record lists its samples up to this number, and hashes of them above."""


class Loader:
    """The batches of a map-style dataset, cut into the shards of each step. Made by `job.loader`.

    `len()` is the number of steps of one epoch.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shards: int,
        shuffle: bool,
        seed: int,
        collate: Callable[[list[Any]], Any] | None,
        transform: Callable[[Any], Any] | None,
        tail: Tail,
        weights: ArrayLike | torch.Tensor | None,
        workers: int,
        device: torch.device,
    ) -> None:
        check_map_style(dataset, "job.loader()", _STREAM)
        check_count("batch_size", batch_size)
        check_count("shards", shards)
        check_seed(seed)
        if workers != 0:
            check_count("workers", workers)
        drawn = None if weights is None else Weights(_on_the_host(weights))
        self.plan = SamplePlan(len(dataset), batch_size, shards, seed, shuffle, tail, drawn)
        self._parts = 1
        """Into how many batches, of one inner step each, a shard of a step is cut."""
        self._dataset = dataset
        self._collate = collate or default_collate
        self._transform = transform
        self._device = device
        read = dataset, self._collate, self._transform
        self._prefetcher = Prefetcher(self.fetch, workers, *read) if workers else None

    def __len__(self) -> int:
        return self.plan.steps

    @property
    def shards(self) -> int:
        return self.plan.shards

    def about(self) -> dict[str, Any]:
        """All that decides which samples a step has, as JSON."""
        return self.plan.about()

    def weight(self, shard: int) -> float:
        """The weight of a shard that was not weighed: its number of samples, or 1 if all shards have as many."""
        if self.plan.batch_size % self.plan.shards == 0:
            return 1.0
        first, end = self.plan.share(shard)
        return float(end - first)

    def weight_of_parts(self, shard: int, parts: int) -> float:
        """The number of samples in so many parts of a shard, the first ones; see `in_rounds`."""
        first, end = self.plan.share(shard)
        return float((end - first) * parts // self._parts)

    def samples(self, epoch: int, step: int) -> list[Any]:
        """Per shard the dataset indices that it gets; in large steps {"n", "sha256"} (of little-endian int64)."""
        given = [self.plan.indices(epoch, step, shard) for shard in range(self.shards)]
        if self.plan.batch_size <= SAMPLES_LISTED_MAX:
            return given
        return [{"n": len(indices), "sha256": hash_of(indices)} for indices in given]

    def begin_step(self, epoch: int, step: int) -> None:
        """Do nothing: a loader keeps nothing from step to step."""

    def ends(self, shard: int) -> bool:
        """False: all workers know from the start how many steps an epoch has."""
        return False

    def release(self) -> None:
        """Do nothing: nothing is open between two batches, and batches fetched ahead stay."""

    def describe(self) -> str:
        """One line for the user: how the batch is split."""
        size, extra = divmod(self.plan.batch_size, self.plan.shards)
        each = f"{size}" if not extra else f"{size} or {size + 1}"
        return f"{self.plan.batch_size} samples a step = {self.plan.shards} shards x {each}"

    def batch(self, wanted: Wanted, own: tuple[int, ...] | None) -> Any:
        """The collated batch of one shard, on the job's device. own: the shards of this worker, from which the next
        batches are guessed, without an effect on bits; None: a newcomer's, for which nothing is guessed.

        Leaves the global RNGs seeded by the position; the caller seeds them again for the shard's computation.
        """
        if self._prefetcher is None or own is None:
            batch = self.fetch(wanted.epoch, wanted.step, wanted.shard)
        else:
            batch = self._prefetcher.get(wanted, Habit(own, len(self)))
        return to_device(batch, self._device)

    def in_rounds(self, parts: int) -> Loader:
        """The same data for steps with so many times the samples, in whose shards `part` takes one part after the
        other. Raises ConfigError."""
        if self._prefetcher is not None:
            raise ConfigError("job.loader(workers=...) fetches whole shards ahead; with outer= leave workers= out")
        rounds = copy.copy(self)
        rounds.plan = replace(self.plan, batch_size=self.plan.batch_size * parts)
        rounds._parts = parts
        return rounds

    def part(self, epoch: int, step: int, shard: int, part: int) -> Any:
        """The collated batch of a part of one shard, on the job's device; see `in_rounds`."""
        return to_device(self.fetch(epoch, step, shard, part), self._device)

    def fetch(self, epoch: int, step: int, shard: int, part: int = 0) -> Any:
        """The collated batch of one shard, or a part of it, on the CPU. An error of the dataset gets a note with the
        sample's index."""
        indices = self.plan.indices(epoch, step, shard)
        indices = indices[len(indices) * part // self._parts : len(indices) * (part + 1) // self._parts]
        seed_fetch(self.plan.seed, epoch, step, shard, part)
        samples = []
        try:
            for index in indices:
                what = f"dataset[{index}]"
                samples.append(self._dataset[index])
            if self._transform is not None:
                for at, index in enumerate(indices):
                    what = f"transform(dataset[{index}])"
                    samples[at] = self._transform(samples[at])
            what = f"collate of {len(indices)} samples"
            return self._collate(samples)
        except Exception as error:
            error.add_note(f"job.loader: {what} raised, for shard {shard} of step {step} in epoch {epoch}")
            raise

    def close(self) -> None:
        """End the processes that fetch ahead. The loader can be used again."""
        if self._prefetcher is not None:
            self._prefetcher.close()


def seed_fetch(seed: int, epoch: int, step: int, shard: int, part: int = 0) -> int:
    """Seed torch, numpy and random for the loading of one shard, or of a part of it; returns the seed."""
    text = f"{seed},{epoch},{step},{shard}" + (f",{part}" if part else "")
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"fetch").digest()
    value = int.from_bytes(digest, "little")
    seed_generators(value)
    return value


def check_map_style(dataset: Any, call: str, instead: str = "") -> None:
    """Raise ConfigError for an object without `dataset[i]` and `len(dataset)`. instead: what else to write."""
    if isinstance(dataset, DataLoader):
        raise ConfigError(
            f"{call} was given a torch DataLoader; give it the dataset (dataloader.dataset), and batch_size, shuffle "
            "and collate as arguments, because the job decides which worker gets which samples"
        )
    if isinstance(dataset, Loader):
        raise ConfigError(f"{call} was given a job.loader(); give it the dataset itself")
    missing = [name for name in ("__getitem__", "__len__") if not hasattr(dataset, name)]
    if isinstance(dataset, IterableDataset) or missing:
        raise ConfigError(
            f"{call} needs a map-style dataset, and {type(dataset).__name__} has no "
            f"{' and no '.join(missing) or 'random access'}; put the samples into a list or another class with "
            f"__getitem__ and __len__{instead}"
        )


def check_count(name: str, value: object) -> int:
    """The value, if it is an int of at least 1. Raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r} must be an integer of at least 1")
    return value


def check_number(name: str, value: object, must: str, holds: Callable[[float], bool]) -> float:
    """The value, if it is an int or float of which `holds` is true. must: that in words. Raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not holds(value):
        raise ConfigError(f"{name}={value!r} must be a number {must}")
    return float(value)


def check_seed(seed: object) -> None:
    """Raise ConfigError unless the seed is an int that every generator takes."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 63:
        raise ConfigError(f"seed={seed!r} must be an integer from 0 to 2**63 - 1")


def _on_the_host(weights: ArrayLike | torch.Tensor) -> ArrayLike:
    return weights.detach().double().cpu().numpy() if isinstance(weights, torch.Tensor) else weights


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor in its lists, tuples and dicts moved to the device; other leaves stay."""
    match batch:
        case torch.Tensor() if device.type == "cuda" and batch.layout is torch.strided and batch.device.type == "cpu":
            # From other memory the host waits until the GPU has come to the copy, and the GPU then for the host.
            return batch.pin_memory().to(device, non_blocking=True)
        case torch.Tensor():
            return batch.to(device)
        case str() | bytes():
            return batch
        case PackedSequence():  # its sizes stay on the CPU
            return cast(Any, batch).to(device)
        case tuple() if hasattr(batch, "_fields"):
            return type(batch)(*(to_device(item, device) for item in batch))
        case tuple() | list():
            return type(batch)(to_device(item, device) for item in batch)
        case MutableMapping() if type(batch) is not dict:  # as BatchEncoding of transformers, which has methods
            moved = copy.copy(batch)
            for key, item in batch.items():  # some, as ModelOutput, have no update()
                moved[key] = to_device(item, device)
            return moved
        case Mapping():
            return {key: to_device(item, device) for key, item in batch.items()}
    return batch


def unpack(batch: Any) -> Sequence[Any]:
    """The arguments for `fn(*batch)`: a tuple or list is spread, anything else is one argument."""
    return batch if isinstance(batch, (tuple, list)) else (batch,)
