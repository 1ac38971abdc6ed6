"""Data that a script splits by its own rank, without a DistributedSampler.

Under torchrun each process evaluates its own part. With logical ranks a worker knows one rank from its beginning, and
computes others: their parts would be evaluated by nobody. What can be recognised is refused; what has been cut out of
the data before cannot.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

RANK = ("rank", "_rank")
WORLD = ("num_replicas", "num_ranks", "world_size", "_world_size")
"""Attributes of what gives a rank its part."""


def own_part(loader: DataLoader[Any], rank: int, ranks: int) -> str | None:
    """What in a loader without a DistributedSampler gives this worker the samples of one rank alone; None: nothing that
    can be recognised. rank: of this worker's beginning."""
    if ranks == 1:
        return None
    for part in _parts(loader):
        held = getattr(part, "__dict__", {})
        if any(name in held for name in RANK) and any(_is(held.get(name), ranks) for name in WORLD):
            return f"{type(part).__name__}, which has a rank of its own,"
        indices = part if isinstance(part, range | list) else held.get("indices")
        if isinstance(indices, range | list | np.ndarray | torch.Tensor) and _is_every(indices, rank, ranks):
            return f"A {type(part).__name__} of the samples {rank}, {rank + ranks} and so on"
    return None


def _parts(loader: DataLoader[Any]) -> Iterator[object]:
    """All that may choose samples: samplers, subsets, and a stream. A dataset with random access may have a rank for
    other reasons."""
    yield from (loader.batch_sampler, loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    dataset: Any = loader.dataset
    while isinstance(dataset, Subset):
        yield dataset
        dataset = dataset.dataset
    if isinstance(dataset, IterableDataset):
        yield dataset


def _is(value: object, number: int) -> bool:
    return isinstance(value, int) and int(value) == number


def _is_every(indices: Any, rank: int, ranks: int) -> bool:
    """Whether these are the numbers of range(rank, ..., ranks), three at least. Mostly the first three say no."""
    first = list(indices[:3]) if isinstance(indices, range | list) else indices[:3].tolist()
    expected = [rank, rank + ranks, rank + 2 * ranks]
    if not all(isinstance(index, int | np.integer) for index in first) or first != expected:
        return False
    return [int(index) for index in indices] == list(range(rank, rank + ranks * len(indices), ranks))
