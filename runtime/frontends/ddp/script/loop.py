"""The loop in which a script takes its training batches, by the text of the script."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any

from elastic.agent.worker.examination import EPOCH_STEPS
from runtime.frontends.ddp import mistakes
from runtime.frontends.ddp.frames.loop_shape import (
    CountingLoop,
    Loop,
    asked_by_head,
    counting_loop,
    inside,
    loop_around,
)
from runtime.frontends.ddp.frames.places import ScriptFrames
from runtime.loop.training import Training


class BatchLoop:
    """The training loop of one script in one worker."""

    def __init__(self, frames: ScriptFrames) -> None:
        self._frames = frames
        self._iterator: Callable[[], Any] = lambda: None
        self._loop: tuple[CodeType, Loop] | None = None
        """The loop in which the script took the batch that it has."""
        self._counting: CountingLoop | None = None
        """The loop that has asked for the first batch of an epoch, if it counts what it asks for."""

    def begin(self, iterator: Any) -> None:
        """The script begins to iterate over its training batches."""
        self._iterator = weakref.ref(iterator)

    def offered(self, *, first: bool) -> None:
        """The script asks for the first batch of a step. first: it is the first one of an epoch, too."""
        standing = self._frames.standing()[::-1]
        self._loop = loop_around(standing)
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

    def ends_early(self, training: Training) -> bool:
        """Whether this epoch ends behind this step in an examination, which is to see several epochs in few steps."""
        if training.examiner is None or training.examiner.whole_epochs:
            return False
        steps = training.at.step + 1 - training.at.epoch_start
        return steps >= EPOCH_STEPS and asked_by_head(self._frames.standing()[::-1])
