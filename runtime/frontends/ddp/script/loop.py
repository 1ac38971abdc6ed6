"""The loop in which a script takes its training batches, by the text of the script."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, GeneratorType
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from elastic.agent.worker.examination import EPOCH_STEPS
from runtime.frontends.ddp import mistakes
from runtime.frontends.ddp.frames.loop_shape import (
    CountingLoop,
    Loop,
    asked_by_head,
    asked_by_next,
    counting_loop,
    inside,
    loop_around,
)
from runtime.frontends.ddp.frames.places import ScriptFrames
from runtime.loop.training import Training
from runtime.script_files import is_library

_OF_LOADERS = (DataLoader, _BaseDataLoaderIter)


class BatchLoop:
    """The training loop of one script in one worker."""

    def __init__(self, frames: ScriptFrames) -> None:
        self._frames = frames
        self._iterator: Callable[[], Any] = lambda: None
        self._loop: tuple[CodeType, Loop] | None = None
        """The loop in which the script took the batch that it has."""
        self._asking: set[int] = set()
        """Ids of the frames that stood then: generators of the script that give training batches are among them."""
        self._counting: CountingLoop | None = None
        """The loop that has asked for the first batch of an epoch, if it counts what it asks for."""

    def begin(self, iterator: Any) -> None:
        """The script begins to iterate over its training batches."""
        self._iterator = weakref.ref(iterator)

    def offered(self, *, first: bool) -> None:
        """The script asks for the first batch of a step. first: it is the first one of an epoch, too."""
        standing = self._frames.standing()[::-1]
        self._loop = loop_around(standing)
        self._asking |= set(map(id, standing))
        if first:
            self._counting = counting_loop(standing)

    @property
    def left(self) -> bool:
        """Whether the script has left it since."""
        return self._iterator() is None or (self._loop is not None and not inside(self._frames.standing(), *self._loop))

    def check_counting(self) -> None:
        """Raises NotInPlace if the script asks in another loop that counts its turns, or in another turn of that one,
        than for the first batch of the epoch."""
        counting = counting_loop(self._frames.standing()[::-1])
        if counting is not None and counting != self._counting:
            raise mistakes.counted(counting.said)

    def check_asked(self) -> None:
        """Raises NotInPlace if the loop around a model's call asks an iterator that goes on in each turn, and of which
        nobody can say how far it is."""
        for spelling, iterator in asked_by_next(self._frames.standing()[::-1]):
            if self._goes_on(iterator):
                raise mistakes.goes_on(spelling, type(iterator).__name__)

    def _goes_on(self, iterator: object) -> bool:
        """What has a loader, or is a library's, may have batches, of which others take care."""
        if isinstance(iterator, GeneratorType):
            own = not is_library(iterator.gi_code.co_filename) and id(iterator.gi_frame) not in self._asking
            return own and not any(isinstance(held, _OF_LOADERS) for held in gc.get_referents(iterator))
        return isinstance(iterator, itertools.cycle | map | zip | filter) and all(
            type(held).__module__ == "builtins" and not isinstance(held, GeneratorType) for held in _within(iterator)
        )

    def ends_early(self, training: Training) -> bool:
        """Whether this epoch ends behind this step in an examination, which is to see several epochs in few steps."""
        if training.examiner is None or training.examiner.whole_epochs:
            return False
        steps = training.at.step + 1 - training.at.epoch_start
        return steps >= EPOCH_STEPS and asked_by_head(self._frames.standing()[::-1])


def _within(iterator: object) -> Iterator[object]:
    """The iterators that one of Python's own asks."""
    for held in gc.get_referents(iterator):
        if isinstance(held, Iterator):
            yield held
        if isinstance(held, tuple | map | zip | filter):
            yield from _within(held)
