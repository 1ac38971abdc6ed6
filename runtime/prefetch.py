"""Batches fetched ahead by processes of their own, which live as long as the loader and know nothing of the world.

What this worker will need next is a guess: its own shards in order, step after step, as long as the world stays as it
is. A guess that was wrong costs one fetch in this process; what was fetched in vain is dropped. The batches have the
same bits either way, because a fetch depends on (epoch, step, shard) only.

The processes are those of torch's DataLoader, whose sampler here is a list of guesses that can be changed.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from elastic.errors import DataWorkerDied
from elastic.plan import default_units

AHEAD = 2
"""Batches that each process may be ahead."""

_DIED = "DataLoader worker (pid"
"""In what torch raises when one of its processes has ended; it has no type of its own."""


@dataclass(frozen=True, order=True, slots=True)
class Wanted:
    """A batch: step counts within the epoch. Several passes of a step want the same one, each its own copy."""

    epoch: int
    step: int
    pass_no: int
    shard: int


@dataclass(frozen=True, slots=True)
class Habit:
    """What the guesses are made from. passes: of a step, as far as known; steps: of an epoch."""

    shards: int
    steps: int
    rank: int
    world_size: int
    passes: int = 1

    def after(self, last: Wanted) -> Iterator[Wanted]:
        """What will probably be wanted after that one, without end."""
        own = default_units(self.shards, self.rank, self.world_size) or (last.shard,)
        yield from (replace(last, shard=shard) for shard in own if shard > last.shard)
        first = last.pass_no + 1
        epoch, step = last.epoch, last.step
        while True:
            for pass_no in range(first, self.passes):
                yield from (Wanted(epoch, step, pass_no, shard) for shard in own)
            first, step = 0, step + 1
            if step == self.steps:
                epoch, step = epoch + 1, 0


class Guesses(Sampler[Wanted]):
    """What the processes are to fetch, in order. sent: what is under way, or fetched and not yet received."""

    def __init__(self) -> None:
        self.sent: deque[Wanted] = deque()
        self._next: Iterator[Wanted] = iter(())

    def change(self, guesses: Iterator[Wanted]) -> None:
        """From now on these, but for what is under way already."""
        under_way = set(self.sent)
        self._next = (wanted for wanted in guesses if wanted not in under_way)

    def __iter__(self) -> Iterator[Wanted]:
        return self

    def __next__(self) -> Wanted:
        wanted = next(self._next)
        self.sent.append(wanted)
        return wanted


class _Fetched(Dataset[Any]):
    """Runs in the processes."""

    def __init__(self, fetch: Callable[[int, int, int], Any]) -> None:
        self._fetch = fetch

    def __getitem__(self, wanted: Wanted) -> Any:
        return self._fetch(wanted.epoch, wanted.step, wanted.shard)


class Prefetcher:
    """Starts its processes with the first batch that it is asked for; they end with `close`, or with this process."""

    def __init__(self, fetch: Callable[[int, int, int], Any], processes: int) -> None:
        """fetch(epoch, step, shard): see Loader.fetch. processes: at least 1."""
        self._fetch = fetch
        self._processes = processes
        self._guesses = Guesses()
        self._batches: Iterator[Any] | None = None
        self._received: dict[Wanted, Any] = {}
        self._habit: Habit | None = None
        self._passes = 1
        self._last: Wanted | None = None

    def get(self, wanted: Wanted, habit: Habit) -> Any:
        """That batch, on the CPU. habit.passes is learned here. Raises DataWorkerDied, and what the dataset raises."""
        habit = replace(habit, passes=self._passes_of_a_step(wanted))
        guessed = wanted in self._received or wanted in self._guesses.sent
        if habit != self._habit or not guessed:
            self._habit = habit
            self._guesses.change(habit.after(wanted))
        if self._batches is None:
            self._batches = self._start()
        if guessed:
            while wanted not in self._received:
                self._receive(wanted)
            batch = self._received[wanted]
        else:
            batch = self._fetch(wanted.epoch, wanted.step, wanted.shard)
            for _ in range(len(self._guesses.sent)):
                # Whatever is under way was guessed wrong, and only when it is received the next guess is sent.
                self._receive(wanted)
        self._received = {key: value for key, value in self._received.items() if key > wanted}
        return batch

    def close(self) -> None:
        """End the processes. Not left to the collector of garbage: it takes the queues apart before their owner, which
        then waits for processes that were never told to end."""
        self._batches, self._received, self._habit = None, {}, None
        self._guesses.sent.clear()

    def _passes_of_a_step(self, wanted: Wanted) -> int:
        """As many as the last complete step had, and the present one so far."""
        last, self._last = self._last, wanted
        if last is not None and (last.epoch, last.step) != (wanted.epoch, wanted.step):
            self._passes = last.pass_no + 1
        return max(self._passes, wanted.pass_no + 1)

    def _receive(self, wanted: Wanted) -> None:
        """The next batch from the processes. Raises DataWorkerDied, and what the dataset raised if it is this one."""
        assert self._batches is not None
        key = self._guesses.sent[0]
        try:
            self._received[key] = next(self._batches)
        except Exception as error:
            if _DIED in str(error):
                raise DataWorkerDied(
                    f"a process of job.loader(workers={self._processes}) has ended: {error}. Out of memory? Lower "
                    "workers= or batch_size=, or load less at once."
                ) from error
            if key == wanted:
                raise
            # Fetched in vain: should it ever be wanted, the fetch in this process raises the same.
        finally:
            self._guesses.sent.popleft()

    def _start(self) -> Iterator[Any]:
        loader = DataLoader(
            _Fetched(self._fetch),
            sampler=self._guesses,
            batch_size=None,
            num_workers=self._processes,
            prefetch_factor=AHEAD,
            collate_fn=_as_it_is,
            worker_init_fn=partial(_begin, torch.get_num_threads()),
        )
        # torch would have a signal handler raise, wherever the script is just then, when a process of it ends. The
        # next batch that is received from them says the same, at a place where it can be told what to do.
        outer = signal.getsignal(signal.SIGCHLD)
        batches = iter(loader)
        signal.signal(signal.SIGCHLD, outer)
        return batches


def _as_it_is(batch: Any) -> Any:
    """Collated by the loader already."""
    return batch


def _begin(threads: int, process: int) -> None:
    """In a new process: the number of threads decides bits, so it is that of the parent."""
    torch.set_num_threads(threads)
