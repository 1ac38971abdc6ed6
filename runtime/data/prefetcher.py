"""Batches fetched ahead by other processes, which live as long as the loader and do not depend on the world.

The next batches are guessed: this worker's shards in order, step after step, as long as the world does not change. A
wrong guess costs one fetch, and its batch is dropped. The batches have the same bits either way, because a fetch
depends on (epoch, step, shard) only, and on what the script has changed in the data: either the processes start anew
behind such a change, or it holds for none of them, and this process fetches nothing itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain
from types import MethodType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from elastic.errors import DataWorkerDied
from runtime.data.fetch_process import Fetcher, FetcherEnded, FetchOutcome

AHEAD = 2
"""The number of batches that each process may be ahead, with those that are here and wait to be wanted."""
ENTRIES_MAX = 64
"""Entries of a list or dict that is searched for plain attributes; a longer one holds data."""
NO_DATA = ("builtins", "logging")
"""Modules whose objects are not searched: a logger knows how many others there are, and decides no sample."""


@dataclass(frozen=True, order=True, slots=True)
class Wanted:
    """A batch. step: counted within the epoch. Several passes of a step want the same batch, each its own copy."""

    epoch: int
    step: int
    pass_no: int
    shard: int


@dataclass(frozen=True, slots=True)
class Habit:
    """The basis of the guesses. own: this worker's shards, in order. steps: of an epoch. passes: of a step, as
    known."""

    own: tuple[int, ...]
    steps: int
    passes: int = 1

    def after(self, last: Wanted) -> Iterator[Wanted]:
        """The batches that will probably be wanted after that one, without end."""
        own = self.own or (last.shard,)
        yield from (replace(last, shard=shard) for shard in own if shard > last.shard)
        first = last.pass_no + 1
        epoch, step = last.epoch, last.step
        while True:
            for pass_no in range(first, self.passes):
                yield from (Wanted(epoch, step, pass_no, shard) for shard in own)
            first, step = 0, step + 1
            if step == self.steps:
                epoch, step = epoch + 1, 0


class Prefetcher:
    """Starts its processes with the first batch that is asked for; they end with `close`, or with this process."""

    def __init__(self, fetch: Callable[[int, int, int], Any], processes: int, *read: object, here: bool = True) -> None:
        """fetch(epoch, step, shard): see Loader.fetch. processes: at least 1. read: the objects that it reads. If the
        script changes a plain attribute of them, processes start anew, because they have copies. here: whether what
        was not guessed is fetched in this process; else one of the processes does it, so that all batches are made of
        the copies, which are those of the first batch."""
        self._fetch = fetch
        self._here = here
        self._read = read
        self._mark: list[object] = []
        """What the attributes were when the processes started."""
        self._processes = processes
        self._fetchers: list[Fetcher] = []
        self._received: dict[Wanted, FetchOutcome] = {}
        self._guesses: Iterator[Wanted] = iter(())
        self._expected: set[Wanted] = set()
        """What was guessed and is still to come, under way or received. The rest was asked for before the guesses
        changed."""
        self._habit: Habit | None = None
        self._passes = 1
        self._last: Wanted | None = None

    def get(self, wanted: Wanted, habit: Habit) -> Any:
        """The batch, on the CPU. habit.passes is learned here. Raises DataWorkerDied, and what the dataset raises."""
        last, habit = self._last, replace(habit, passes=self._passes_of_a_step(wanted))
        new_step = last is None or (last.epoch, last.step) != (wanted.epoch, wanted.step)
        if new_step and (mark := _mark_of(self._read)) != self._mark:
            self.close()
            self._mark = mark
        try:
            return self._get(wanted, habit)
        except FetcherEnded as ended:
            self.close()
            raise DataWorkerDied(
                f"a process of job.loader(workers={self._processes}) has ended: {ended}. Out of memory? Lower "
                "workers= or batch_size=, or load less at once."
            ) from ended

    def close(self) -> None:
        """End the processes."""
        while self._fetchers:
            self._fetchers.pop().end()
        self._received, self._habit = {}, None

    def _get(self, wanted: Wanted, habit: Habit) -> Any:
        while len(self._fetchers) < self._processes:
            self._fetchers.append(Fetcher(self._fetch, self._fetchers))
        for fetcher in self._fetchers:
            while fetcher.asked and fetcher.ready():
                self._receive(fetcher)
        holder = next((fetcher for fetcher in self._fetchers if wanted in fetcher.asked), None)
        guessed = holder is not None or wanted in self._received
        if habit != self._habit or wanted not in self._expected:
            self._habit, self._guesses, self._expected = habit, habit.after(wanted), set()
        self._expected = {key for key in self._expected if key > wanted}
        if not guessed and not self._here:
            holder, guessed = min(self._fetchers, key=lambda fetcher: len(fetcher.asked)), True
            holder.ask((wanted.epoch, wanted.step, wanted.shard), wanted)
        self._ask()
        while holder is not None and wanted not in self._received:
            self._receive(holder)
        if guessed:
            outcome = self._received[wanted]
        else:
            unchanged = _mark_of(self._read) == self._mark
            outcome = FetchOutcome(self._fetch(wanted.epoch, wanted.step, wanted.shard))
            if unchanged:  # else the next step finds what the script has changed in the middle of this one
                self._mark = _mark_of(self._read)  # what the fetch itself counts is no change by the script
        self._received = {key: value for key, value in self._received.items() if key in self._expected}
        return outcome.get()

    def _ask(self) -> None:
        """Ask for what is expected next, without batches that are under way or here already. Batches under way that
        nobody expects do not count, up to a limit: a habit that changes with every batch must not pile up work."""
        known = self._received.keys() | {key for fetcher in self._fetchers for key in fetcher.asked}
        while len(self._expected) < AHEAD * self._processes:
            fetcher = min(self._fetchers, key=lambda fetcher: len(fetcher.asked))
            if len(fetcher.asked) >= 2 * AHEAD:
                return
            wanted = next(self._guesses)
            self._expected.add(wanted)
            if wanted not in known:
                fetcher.ask((wanted.epoch, wanted.step, wanted.shard), wanted)

    def _receive(self, fetcher: Fetcher) -> None:
        """Receive the next batch of that process; waits for it."""
        wanted, outcome = fetcher.take()
        self._received[wanted] = outcome

    def _passes_of_a_step(self, wanted: Wanted) -> int:
        """The passes of the last complete step, or those of the present step so far, if more."""
        last, self._last = self._last, wanted
        if last is not None and (last.epoch, last.step) != (wanted.epoch, wanted.step):
            self._passes = last.pass_no + 1
        return max(self._passes, wanted.pass_no + 1)


Plain: TypeAlias = bool | int | float | complex | str | bytes | Enum | np.generic | None


def _shown(value: Plain) -> object:
    """What can be compared with anything: a numpy scalar may answer with an array."""
    return (value.dtype.str, value.tobytes()) if isinstance(value, np.generic) else value


def _mark_of(things: Iterable[object], depth: int = 3) -> list[object]:
    """The plain attributes of these objects and of what they hold, down to `depth`; of a tensor itself and its
    version. Of the owner of a method only plain values, and nothing of what trains: a model or a trainer counts
    its own steps, and with each of them the processes would begin anew."""
    found: list[object] = []
    for thing in things:
        if isinstance(thing, Plain):
            found.append(_shown(thing))
        elif isinstance(thing, torch.Tensor):
            trained = thing.requires_grad  # as of a model that a collator has: each step writes into it
            found.append((id(thing), None if trained or thing.is_inference() else thing._version))
        elif isinstance(thing, list | tuple | dict):
            entries = thing.values() if isinstance(thing, dict) else thing
            found += _mark_of(entries, depth - 1) if depth and len(thing) <= ENTRIES_MAX else [len(thing)]
        elif isinstance(thing, MethodType):
            trains = hasattr(thing.__self__, "train")
            owned = () if trains else getattr(thing.__self__, "__dict__", {}).values()
            found += [_shown(value) for value in owned if isinstance(value, Plain)]
        elif isinstance(thing, functools.partial):
            found += _mark_of((thing.func, thing.args, thing.keywords), depth)
        elif isinstance(thing, nn.Module) and next(chain(thing.parameters(), thing.buffers()), None) is not None:
            continue  # a model, which each step and each evaluation change, unlike a transform
        elif depth and hasattr(thing, "__dict__") and type(thing).__module__ not in NO_DATA:
            found += _mark_of(vars(thing).values(), depth - 1)
    return found
