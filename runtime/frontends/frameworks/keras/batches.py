"""The batches of Keras's own data adapters, by epoch and step, and the part of each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from elastic.errors import ConfigError
from runtime.data.prefetcher import Wanted
from runtime.data.random_state import randomness_kept, seed_all


class Part(NamedTuple):
    """What one rank has of a batch. data: as train_step() gets it; None if the batch has fewer samples than ranks."""

    data: Any
    samples: int


class WholeBatches:
    """The data of a pass, see passes.ShardSource. A shard is a rank's part of the batch, in order of the samples.

    Each worker reads every batch: data adapters give batches one after the other, and random numbers that they draw
    depend on the place of a batch only. A newcomer reads what comes before its first batch in the pass over the data.
    """

    def __init__(
        self,
        epochs: Any,
        ranks: int,
        seed: int,
        steps_per_epoch: int | None,
        tree: Any,
        placed: Callable[[], bool],
        first: int = 0,
    ) -> None:
        """epochs: an EpochIterator of Keras. steps_per_epoch: as fit() got it: if given, an epoch may begin in the
        middle of the data. tree: the module keras.tree. placed: whether this worker knows which epoch the job is in;
        what it computes before that is thrown away. first: epoch with which the data begin."""
        self._adapter = epochs.data_adapter
        self._open_pass: Callable[[], Any] = epochs._get_iterator
        self._ranks = ranks
        self._seed = seed
        self._steps = steps_per_epoch
        self._tree = tree
        self._placed = placed
        self._first = first
        self._pass = -1
        self._next = 0
        """Number, in the pass over the data, of the batch that comes next."""
        self._batches: Iterator[Any] = iter(())
        self._last: Any = None

    @property
    def limit(self) -> int | None:
        """Steps of an epoch; None: until the data end."""
        return self._steps or self._adapter.num_batches

    def at(self, epoch: int, step: int) -> Any:
        """The batch of a step; None if the data have ended."""
        number, place = self._place(epoch, step)
        if self._adapter.num_batches and place >= self._adapter.num_batches:
            return None
        if number != self._pass or place < self._next - 1:
            self._begin(number)
        return self._last if self._read(place + 1) else None

    def _read(self, batches: int) -> bool:
        """Read so many batches of the pass, if it has them."""
        while self._next < batches:
            with randomness_kept():
                seed_all(self._seed, "keras batches", self._pass, self._next)
                self._last = next(self._batches, None)
            if self._last is None:
                return False
            self._next += 1
        return True

    @property
    def place(self) -> tuple[int, int]:
        """(pass over the data, batches of it that were read)"""
        return self._pass, self._next

    def pass_by(self, number: int, batches: int) -> None:
        """Leave the data as a fit() does that has come to this place: a data set that shuffles itself, and a generator,
        go on from there in the next one."""
        if number >= 0:
            self._begin(number)
            if self._adapter.num_batches is None:
                self._read(batches)

    def _place(self, epoch: int, step: int) -> tuple[int, int]:
        """(number of the pass over the data, number of the batch in it)"""
        epoch -= self._first
        if self._steps is None:
            return epoch, step
        if not (batches := self._adapter.num_batches):
            return 0, epoch * self._steps + step
        epochs = -(-batches // self._steps)  # the last one in a pass ends with the data, as in Keras
        return epoch // epochs, epoch % epochs * self._steps + step

    def _begin(self, number: int) -> None:
        """Begin a pass over the data. A data set of Keras may shuffle itself when an epoch begins or ends."""
        with randomness_kept():
            for passed in range(max(self._pass, 0), number):
                seed_all(self._seed, "keras epoch", passed)
                if passed > self._pass:
                    self._adapter.on_epoch_begin()
                self._adapter.on_epoch_end()
            seed = seed_all(self._seed, "keras batches", number)
            if number > self._pass:
                self._adapter.on_epoch_begin()
            self._pass, self._next, self._last = number, 0, None
            batches = self._open_pass()
            for generator in _own_generators(batches):
                generator.manual_seed(seed)
            self._batches = iter(batches)

    def close(self) -> None:
        """The last pass is over. A PyDataset has threads or processes of its own during a pass."""
        if self._pass >= 0:
            with randomness_kept():
                seed_all(self._seed, "keras epoch", self._pass)
                self._adapter.on_epoch_end()

    def samples_at(self, epoch: int, step: int) -> int:
        """How many samples the batch of a step has."""
        return self._size(self.at(epoch, step))

    def _size(self, batch: Any) -> int:
        return next(int(leaf.shape[0]) for leaf in self._tree.flatten(batch) if leaf is not None)

    # What a pass asks

    def about(self) -> None:
        """The script draws the samples: no plan says which ones a step has."""

    def order(self, epoch: int) -> dict[str, Any]:
        return {}

    def weight(self, shard: int) -> float:
        """A rank says how many samples it has."""
        return 1.0

    def samples(self, epoch: int, step: int) -> list[Any]:
        """Adapters do not say which samples a batch has."""
        return []

    def begin_step(self, epoch: int, step: int) -> None:
        """Nothing is open between two steps."""

    def batch(self, wanted: Wanted, own: tuple[int, ...] | None) -> Part:
        whole = self.at(wanted.epoch, wanted.step) if self._placed() else self.at(self._first, 0)
        size = self._size(whole)
        first, end = size * wanted.shard // self._ranks, size * (wanted.shard + 1) // self._ranks
        if first == end:
            return Part(None, 0)
        part = self._tree.map_structure(lambda leaf: None if leaf is None else leaf[first:end], whole)
        return Part(part, end - first)

    def ends(self, shard: int) -> bool:
        """The iterator that Keras asks knows how many steps an epoch has."""
        return False

    def release(self) -> None:
        """Nothing is open between two steps."""


def _own_generators(batches: Any) -> list[torch.Generator]:
    """Those from which a DataLoader of torch draws the order of its samples, instead of the global one. Their state is
    what earlier passes left, which a newcomer has not made."""
    samplers = (getattr(batches, "sampler", None), getattr(batches, "batch_sampler", None))
    places = (batches, *samplers, *(getattr(sampler, "sampler", None) for sampler in samplers))
    found = (getattr(place, "generator", None) for place in places)
    return [generator for generator in found if isinstance(generator, torch.Generator)]


def check_validation(data: Any) -> None:
    """Raise ConfigError for an iterator: each evaluation goes on where the one before it has ended, and a worker that
    comes later has not read what came before. Its callbacks would decide otherwise than those of the others."""
    if isinstance(data, Iterator):
        raise ConfigError(
            f"validation_data={type(data).__name__} cannot be used in place: a worker that joins has not read what the "
            "others have. Give fit() arrays, a PyDataset or a DataLoader that does not shuffle"
        )


def read_in_order(adapter: Any) -> bool:
    """Let a PyDatasetAdapter of Keras read without threads of its own, if these would shuffle the batches: they draw
    the order from a generator that the script's thread uses too. Returns whether it was so."""
    shuffles = getattr(adapter, "enqueuer", None) is not None and adapter.shuffle and bool(adapter.num_batches)
    if shuffles:
        adapter.enqueuer = None
    return shuffles


class PlaceIterator:
    """In the place of the iterator that fit() makes over its training data: it gives places instead of batches."""

    def __init__(self, own: Any, made: Callable[[Any], None], places: Callable[[], Iterator[int]]) -> None:
        """made: called with `own` when everything that is trained was built. places: the steps of this epoch."""
        self._own = own
        self._made = made
        self._places = places
        self._begun = False

    @property
    def num_batches(self) -> int | None:
        found: int | None = self._own.num_batches
        return found

    def reset(self) -> None:
        """fit() calls it once, behind the building of the model."""
        self._own.reset()
        self._begun = True
        self._made(self._own)

    def __iter__(self) -> Iterator[Any]:
        if not self._begun:  # the first batch, by which the model is built
            return iter(self._own)
        return ((step, step, [step]) for step in self._places())
