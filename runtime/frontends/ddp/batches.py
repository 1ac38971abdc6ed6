"""What iterating over a DataLoader gives: the turns of a training loop, the batches of an evaluation, or what it always
gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from runtime.frontends.ddp.frames.places import is_defined_by_script
from runtime.frontends.ddp.rank_script import RankScript
from runtime.frontends.ddp.rank_source import Position, RankSource
from runtime.frontends.ddp.sampler_source import SamplerSource, sampler_of


class TrainingBatches(Iterator[Any]):
    """One epoch of training batches. A class and not a generator, as a generator left by `break` says nothing."""

    def __init__(self, script: RankScript, source: Callable[[Position], RankSource]) -> None:
        self._script = script
        self._over = False
        script.iterate(self, source)

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        try:
            return self._script.next_batch()
        except StopIteration:
            self._over = True
            raise


def iterate(script: RankScript, original: Any, loader: DataLoader[Any]) -> Iterator[Any]:
    """DataLoader.__iter__. A loader without a DistributedSampler gives each worker the same, as ever."""
    sampler = sampler_of(loader)
    if sampler is None:
        found: Iterator[Any] = original(loader)
        return found
    if not torch.is_grad_enabled() or not all(model.training for model in script.objects.wrapped):
        return script.evaluations.run(SamplerSource(loader, sampler, script.ranks, Position()))
    return TrainingBatches(script, lambda position: SamplerSource(loader, sampler, script.ranks, position))


class Counted(enumerate):  # type: ignore[type-arg]  # generic for the type checker only
    """enumerate(), of which a training loader's batches, also inside tqdm(), zip() or a generator of the script's, are
    counted as each rank counts them: a worker that computes two ranks, or has come later, finds the numbers that the
    others find."""

    def __new__(cls, iterable: Iterable[Any], start: int = 0) -> Any:
        script = RankScript.current()
        if script is not None:
            inner = getattr(iterable, "iterable", iterable)
            if isinstance(inner, DataLoader | Iterator) or is_defined_by_script(type(inner)):
                return _numbered(script, iterable, start)
        return super().__new__(cls, iterable, start)


def _numbered(script: RankScript, iterable: Iterable[Any], start: int) -> Iterator[tuple[int, Any]]:
    """A batch that was handed out since the item before has its own number; other items are counted."""
    count, batches = start, script.handed_out
    for item in iterable:
        if script.handed_out != batches and (number := script.place_in_loop) is not None:
            count = start + number
        yield count, item
        count, batches = count + 1, script.handed_out
