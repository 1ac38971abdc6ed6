"""Evaluations of Lightning: batches are spread over the workers, and each worker's loop goes through all results.

The loop gets the places of batches. At the first place, all batches are computed, each by one worker. For each place,
the strategy then gives what the step has returned, and has on this worker what it has logged and added up.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from runtime.data.random_state import randomness_kept, seed_all
from runtime.frontends.ddp.sampler_source import WorkerInit, sampler_of
from runtime.frontends.frameworks.lightning import parts
from runtime.frontends.frameworks.lightning.attributes import detached
from runtime.frontends.frameworks.rank_batches import collated, orders
from runtime.loop.training.gathering import gather


class BatchPlace:
    """The place of one batch of a loader; it holds no data."""

    def __init__(self, loader: Any, number: int) -> None:
        self.loader = loader
        self.number = number


class EvaluationPlaces:
    """The batches of an evaluation, those of all ranks."""

    def __init__(self, loader: DataLoader[Any], ranks: int, seed: int, *, by_rank: bool) -> None:
        """by_rank: the ranks have the samples that a DistributedSampler would give them, but none is evaluated twice;
        else the batches are the loader's."""
        self.loader, self.dataset = loader, loader.dataset
        self.sampler, self.batch_sampler = loader.sampler, loader.batch_sampler
        self._ranks, self._seed, self._by_rank = ranks, seed, by_rank
        self._worker = WorkerInit(loader, seed)
        self.order: list[list[int]] = []
        """The samples of each batch."""
        self.rows: list[Any] | None = None
        """What was computed for each batch."""

    def __len__(self) -> int:
        return len(self.order or self._drawn())

    def __iter__(self) -> Iterator[BatchPlace]:
        self.order, self.rows = self._drawn(), None
        with randomness_kept():
            self._worker.begin()
        return (BatchPlace(self, number) for number in range(len(self.order)))

    def _drawn(self) -> list[list[int]]:
        sampler, batches = sampler_of(self.loader), self.batch_sampler
        epoch = getattr(sampler, "epoch", 0)
        with randomness_kept():
            if sampler is not None:
                ranks = orders(self.loader, self._ranks, epoch, self._seed)
                return [batch for together in zip(*ranks, strict=True) for batch in together]
            seed_all(self._seed, epoch, "order of samples")
            if not self._by_rank or type(batches) is not BatchSampler:
                return [list(batch) for batch in batches or ()]
            samples = list(batches.sampler)
        parts_of = [_cut(samples[rank :: self._ranks], batches) for rank in range(self._ranks)]
        return [batch for together in zip_longest(*parts_of) for batch in together if batch]


def _cut(samples: list[int], like: BatchSampler) -> list[list[int]]:
    """The batches of the rank that has these samples."""
    size = like.batch_size
    batches = [samples[first : first + size] for first in range(0, len(samples), size)]
    return [batch for batch in batches if len(batch) == size or not like.drop_last]


def evaluated(strategy: Any, stage: str, place: BatchPlace, args: tuple[Any, ...]) -> Any:
    """What a step of an evaluation has returned for a batch, computed by this worker or by another one. args: what
    follows the batch."""
    trainer, module, script = strategy._trainer, strategy.lightning_module, strategy.script
    loop = trainer._active_loop
    loop = loop.epoch_loop.val_loop if hasattr(loop, "epoch_loop") else loop
    loader, index = place.loader, args[1] if len(args) > 1 else 0
    keeps = stage == "predict" or _looks_at_outputs(trainer, f"on_{stage}_batch_end")
    step: Callable[..., Any] = getattr(strategy.base, f"{stage}_step")

    def compute(number: int) -> list[Any]:
        # Not by the job's step: a worker that passes an earlier fit() by comes here in a later one.
        seed_all(script.training.seed, script.training.loops.number, trainer.global_step, stage, index, number)
        batch = strategy.transferred(collated(loader.loader, loader.order[number]), index)
        own = (number, *args[1:]) if args else ()
        if stage == "predict":
            return [None, detached(step(strategy, batch, *own))]
        with parts.recording(trainer, module, loop, batch_size_of(trainer, batch)) as record:
            output = step(strategy, batch, *own)
        return [record.plain(), detached(output) if keeps else None]

    alone = trainer.sanity_checking or not script.begun or script.passing
    if loader.rows is None:
        count = min(len(loader.order), loop.max_batches[index])
        label = f"{stage} of {count} batches"
        loader.rows = [None] * count if alone else gather(script.training, label, count, compute)
    row = loader.rows[place.number]
    if row is None:
        with randomness_kept():
            row = compute(place.number)
    if row[0] is not None:
        parts.have(module, parts.Record.of(row[0]))
        loop._results.batch_size = len(loader.order[place.number])
    return row[1]


def batch_size_of(trainer: Any, batch: Any) -> Callable[[], int]:
    """Infers the size of a batch as Lightning does, of whose package the trainer is."""
    base = next(kind for kind in type(trainer).__mro__ if kind.__module__.endswith(".trainer.trainer"))
    utilities: Any = sys.modules[base.__module__.removesuffix("trainer.trainer") + "utilities.data"]
    return functools.partial(utilities.extract_batch_size, batch)


def _looks_at_outputs(trainer: Any, hook: str) -> bool:
    """Whether code of a user gets what a step of an evaluation returns."""
    found = [getattr(type(each), hook, None) for each in (*trainer.callbacks, trainer.lightning_module)]
    own = ("lightning.pytorch.", "pytorch_lightning.")
    return any(method is not None and not method.__module__.startswith(own) for method in found)
