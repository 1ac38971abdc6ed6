"""The first batch of an evaluation over a DistributedSampler, which shows whether its loop calls collectives.

A loop that adds up and reduces behind it is run once for each rank. One that reduces for each batch, as timm's and
Swin's, has to be run batch by batch, because a collective must have the values of all ranks for this batch. A worker
learns which it is from the first batch of its first rank, and remembers it with the place of the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from runtime.frontends.ddp import mistakes
from runtime.frontends.ddp.evaluation.gathering_loop import ADDED, SUMS, GatheringLoop
from runtime.frontends.ddp.evaluation.loop_values import LoopValues
from runtime.frontends.ddp.rank_script import RankScript
from runtime.frontends.ddp.rank_values import RankValue
from runtime.frontends.ddp.sampler_source import ListedSource


class FirstBatch:
    """Answers what the loop calls for its first batch. Used by the script's thread only."""

    place = 0
    silent = False

    def __init__(self, script: RankScript, *, alone: bool) -> None:
        """alone: the batch counts for nobody."""
        self._ranks = range(script.ranks)
        self._alone = alone
        self._fed: list[Callable[[], None]] = []
        self.gathers = False
        """The loop has called a collective."""

    def exchange(self, call: str, value: torch.Tensor) -> list[RankValue]:
        """Zeros for all ranks, or what this worker brings. Raises MidShardCollective for a collective that no
        evaluation's loop may call."""
        if self._alone or call == "dist.barrier":
            return [RankValue(tuple(self._ranks), value.detach().clone())]
        if not call.startswith(SUMS):
            raise mistakes.in_evaluation(call)
        self.gathers = True
        return [RankValue(tuple(self._ranks), torch.zeros_like(value))]

    def feed(self, metric: Any, add: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """A metric gets its values when it is known that they are those of this rank."""
        self._fed.append(partial(add, *args, **kwargs))
        if self._alone:
            self.fed()

    def fed(self) -> None:
        """It is known."""
        while self._fed:
            self._fed.pop(0)()


class PlainLoader:
    """What GatheringLoop tells a loader of accelerate, of one that is not told."""

    iteration = 0
    end_of_dataloader = False

    def begin(self) -> None:
        """The evaluation begins."""

    def end(self) -> None:
        """It has run to its end."""


def evaluate(script: RankScript, source: ListedSource) -> Iterator[Any]:
    """The batches that this worker's loop has. Raises MidShardCollective, NotInPlace, BufferChanged."""
    evaluations = script.evaluations
    evaluations.check_begins()
    start, occasion = LoopValues.read(script.frames), script.occasion("an evaluation")
    evaluations.summed = start.summed
    if evaluations.counts_for_nobody:
        told: Any = script.training.replies.shared.get(occasion)
        if told is not None and ADDED in told:
            yield from GatheringLoop(script, PlainLoader(), source).batches(occasion)
            return
        yield from _answered(script, FirstBatch(script, alone=True), source, 0)
        if told is not None:
            start.added(0, 1)
            start.put_back(objects=False)
            start.add(told, script.ranks)
        return
    place = tuple((frame.f_code, frame.f_lineno) for frame in script.frames.standing())
    rank = evaluations.owned_first()
    if place not in evaluations.gathering and len(source) > 0:
        first = FirstBatch(script, alone=False)
        buffers = script.objects.versions_of_buffers() if script.begun else None
        evaluations.running = script.begun  # until it ends: a loop that is left here is not over for the others
        yield from _answered(script, first, source, rank)
        evaluations.running = False
        if buffers is not None:
            evaluations.check_buffers(buffers)
        if not first.gathers:
            first.fed()
            yield from evaluations.whole(source, start, occasion, rank)
            return
        evaluations.gathering.add(place)
        start.put_back(objects=False)
    yield from GatheringLoop(script, PlainLoader(), source).batches(occasion)


def _answered(script: RankScript, first: FirstBatch, source: ListedSource, rank: int) -> Iterator[Any]:
    """The first batch of a rank, with an answer for what the loop calls."""
    script.evaluations.loop = first
    script.evaluations.batches += 1
    try:
        # Also where it counts for nobody: so that names are bound which the loop binds, and a count is not 0.
        yield source.fetch(0, rank)
    finally:
        script.evaluations.loop = None
