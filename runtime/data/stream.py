"""job.stream: data that can only be read from front to back, one stream per shard.

A batch has the name (epoch, number in its shard). A worker holds an open iterator for each shard that it read in the
last step; a worker that takes over a shard opens it again after the batches that are used up. One batch is read ahead,
because all workers must know that an epoch ends before its last step is over.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from elastic.errors import ConfigError, UsageError
from runtime.data.loader import check_count, seed_fetch, to_device
from runtime.data.parquet import ParquetShards, ParquetStream
from runtime.data.prefetcher import Wanted

Open = Callable[[int, int, int], Iterable[Any]] | Callable[[int, int], Iterable[Any]]
"""open(shard, epoch, skip): the batches of a shard in an epoch, without the first `skip`. open(shard, epoch): all of
them."""

_END = object()
_OPENING = -1
"""Replaces the batch's number in the seed for `open`."""


@dataclass(slots=True)
class _Reading:
    """An open shard: its batch `number` of this epoch, and the next batch, or _END."""

    epoch: int
    number: int
    iterator: Iterator[Any]
    batch: Any
    ahead: Any


class Stream:
    """The batches of iterable data, one stream per shard. Made by `job.stream`. It has no length."""

    def __init__(self, open: Open | ParquetStream, *, shards: int, seed: int, device: torch.device) -> None:
        about: dict[str, Any] = {}
        if isinstance(open, ParquetStream):
            about, open = open.about(), ParquetShards(open, check_count("shards", shards))
        if not callable(open):
            raise ConfigError(
                f"job.stream() was given a {type(open).__name__}; give it a function open(shard, epoch, skip) that "
                "returns an iterator over the batches of that shard behind the first `skip`, or open(shard, epoch) for "
                "all of them, or a ParquetStream"
            )
        self.shards = check_count("shards", shards)
        self._open: Callable[..., Iterable[Any]] = open
        self._skips = _skips(open)
        self._about = about
        self._seed = seed
        self._device = device
        self._readings: dict[int, _Reading] = {}

    def about(self) -> dict[str, Any]:
        """All that is known about a step's data, as JSON."""
        return {"order": "stream", "shards": self.shards, **self._about}

    def describe(self) -> str:
        """One line for the user: how the batch is split."""
        return f"a step = {self.shards} shards x one batch of its stream"

    def weight(self, shard: int) -> float:
        """The weight of a shard that was not weighed: 1, because the sizes of other workers' batches are not known."""
        return 1.0

    def samples(self, epoch: int, step: int) -> list[Any]:
        """Per shard which batch it gets, for the ledger."""
        return [{"batch": step} for _ in range(self.shards)]

    def batch(self, wanted: Wanted, own: tuple[int, ...] | None) -> Any:
        """Batch number wanted.step of the shard, on the job's device; each pass gets its own copy.

        Raises ConfigError for a shard without any batch, UsageError for a shard that ends too early, and what the
        script's iterator raises. Leaves the global RNGs seeded by the position, as Loader.batch does.
        """
        reading = self._readings.get(wanted.shard)
        if reading is None or reading.epoch != wanted.epoch or wanted.step not in (reading.number, reading.number + 1):
            reading = self._begin(wanted)
        elif wanted.step == reading.number + 1:
            self._advance(reading, wanted.shard)
        seed_fetch(self._seed, wanted.epoch, wanted.step, wanted.shard)
        return to_device(copy.deepcopy(reading.batch), self._device)

    def ends(self, shard: int) -> bool:
        """Whether the last batch of this shard that was given is the last of the epoch."""
        return self._readings[shard].ahead is _END

    def begin_step(self, epoch: int, step: int) -> None:
        """Close the shards that this worker did not read in the last step: they have other owners now."""
        for shard, reading in list(self._readings.items()):
            if (reading.epoch, reading.number) not in ((epoch, step - 1), (epoch, step)):
                self._close(shard)

    def release(self) -> None:
        """Close all iterators: an epoch is over, or a rehearsal, whose shards other workers may own."""
        for shard in list(self._readings):
            self._close(shard)

    def close(self) -> None:
        """The job is over: close all iterators. The stream can be used again."""
        self.release()

    def _begin(self, wanted: Wanted) -> _Reading:
        shard, epoch, skip = wanted.shard, wanted.epoch, wanted.step
        self._close(shard)
        seed_fetch(self._seed, epoch, _OPENING, shard)
        called = f"job.stream: open(shard={shard}, epoch={epoch}, skip={skip})"
        try:
            iterator = iter(self._open(*(shard, epoch, skip)[: 3 if self._skips else 2]))
        except Exception as error:
            error.add_note(f"{called} raised")
            raise
        for number in () if self._skips else range(skip):  # each with its own random numbers, as when it was used
            self._read(iterator, epoch, number, shard)
        reading = _Reading(epoch, skip, iterator, _END, _END)
        self._readings[shard] = reading
        reading.batch = self._read(iterator, epoch, skip, shard)
        if reading.batch is _END and skip == 0:
            raise ConfigError(f"{called} gave no batch; every shard needs at least one in every epoch")
        if reading.batch is _END:
            raise UsageError(
                f"{called} gave no batch, and the worker that had the shard before found one at this place. A shard "
                "must have the same batches each time it is opened: sort file names, and shuffle with a generator that "
                "is made in open() from shard and epoch"
            )
        reading.ahead = self._read(iterator, epoch, skip + 1, shard)
        return reading

    def _advance(self, reading: _Reading, shard: int) -> None:
        if reading.ahead is _END:
            raise RuntimeError(f"shard {shard} ended with batch {reading.number} of epoch {reading.epoch}")
        reading.number, reading.batch = reading.number + 1, reading.ahead
        reading.ahead = self._read(reading.iterator, reading.epoch, reading.number + 1, shard)

    def _read(self, iterator: Iterator[Any], epoch: int, number: int, shard: int) -> Any:
        seed_fetch(self._seed, epoch, number, shard)
        try:
            return next(iterator, _END)
        except Exception as error:
            error.add_note(f"job.stream: batch {number} of shard {shard} in epoch {epoch} raised")
            raise

    def _close(self, shard: int) -> None:
        reading = self._readings.pop(shard, None)
        close = getattr(reading.iterator, "close", None) if reading is not None else None
        if close is not None:
            close()


def _skips(open: Callable[..., Any]) -> bool:
    """Whether it takes the number of batches to skip: as its third parameter, which is an option of the script's own if
    it has a default and another name."""
    try:
        signature = inspect.signature(open)
        third = list(signature.bind(0, 0, 0).arguments)[-1]
    except TypeError:
        return False
    except ValueError:  # it has no signature that Python can see
        return True
    parameter = signature.parameters[third]
    return parameter.default is parameter.empty or third == "skip"
