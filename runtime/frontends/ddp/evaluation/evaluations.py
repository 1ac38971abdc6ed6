"""The script's evaluations: loops without gradients over the batches of all ranks.

Each worker runs the loop over the batches of its ranks, one rank after another; those of a lost worker's ranks are run
by another worker. What the loop adds up is what each rank would have on the average: sums and counts of all ranks,
divided by their number. Then a sum over ranks is that of all batches, and each worker has the same, also if one is
lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

import torch

from runtime.allreduce.reduction.partial_sum import Json, Partial
from runtime.data.random_state import seed_all
from runtime.frontends.ddp import mistakes
from runtime.frontends.ddp.frames.evaluation_values import EvaluationValues, total
from runtime.frontends.ddp.frames.loop_shape import asked_in_loop
from runtime.frontends.ddp.frames.places import ScriptFrames
from runtime.frontends.ddp.rank_values import RankValue
from runtime.frontends.ddp.sampler_source import ListedSource
from runtime.frontends.ddp.script.objects import ScriptObjects
from runtime.loop.training import Training, empty_leaf
from runtime.loop.training.calls import CallResult
from runtime.session import Op, OpKind

REMEMBERED_MAX = 1024
"""Numbers of an evaluation's result that newcomers are told."""


class Script(Protocol):
    """What an evaluation asks of the script, see RankScript."""

    ranks: int
    frames: ScriptFrames
    objects: ScriptObjects
    begun: bool

    @property
    def training(self) -> Training: ...
    @property
    def turn(self) -> str: ...
    @property
    def between(self) -> bool: ...
    @property
    def passing(self) -> bool: ...
    @property
    def silent(self) -> bool: ...
    def occasion(self, call: str) -> str: ...


class LoopCalls(Protocol):
    """Collectives that are called inside the loop of an evaluation, where its framework allows them."""

    @property
    def place(self) -> int:
        """Number of the batch that was handed out last."""

    @property
    def silent(self) -> bool:
        """Whether nobody is rank 0 in the turn in progress."""

    def exchange(self, call: str, value: torch.Tensor) -> list[RankValue]:
        """As collectives.exchange."""

    def feed(self, metric: Any, add: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """A metric of a library is to add values up. add: the method that does so."""


class Evaluations:
    """Used by the script's thread only."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.collected = False
        """An evaluation has come since the last training batch: what it has collected in lists is not of one rank."""
        self.summed: set[int] = set()
        """Addresses of tensors in which that evaluation has added up: they are no rank's own."""
        self.running = False
        """An evaluation is in progress, or was left before its end."""
        self.loop: LoopCalls | None = None
        """Answers the collectives that the loop of the evaluation in progress calls. None: no evaluation is in
        progress, or its loop may call none."""
        self.forwards = 0
        """How often a model has run in the turn in progress of such a loop."""
        self.batches = 0
        """Batches that such loops have been handed out."""
        self.gathering: set[object] = set()
        """Places of loops that have called a collective for their first batch."""
        self.without_gradients = False
        """A model has run without gradients since the last training batch was handed out."""
        self._number = 0
        """Since the last training batch, as a newcomer does not know the earlier ones of its epoch."""

    def training_goes_on(self) -> None:
        """A training batch was handed out."""
        self.collected, self.without_gradients, self._number = False, False, 0

    def check_begins(self) -> None:
        """Raise MidShardCollective if no evaluation may begin here."""
        if self._script.between:
            raise mistakes.in_turn("an evaluation", self._script.turn)
        if self.running:
            raise mistakes.in_evaluation("another evaluation")

    @property
    def counts_for_nobody(self) -> bool:
        """Whether the evaluation that begins now is one of which nothing stays."""
        script = self._script
        return script.passing or script.silent or (script.begun and script.training.at.joining)

    def op(self, detail: str = "") -> Op:
        """The operation of all workers for the evaluation that begins now, or for the part of it that `detail` says."""
        training = self._script.training
        label = f"evaluation {self._number}{detail}"
        return Op(OpKind.EVALUATE, self._script.ranks, training.at.epoch, training.at.step, label=label)

    def begin(self) -> None:
        """An evaluation that counts begins."""
        self.collected = True

    def end(self) -> None:
        """It has run to its end, behind the beginning of training."""
        self.running = False
        self._number += 1
        training = self._script.training
        seed_all(training.seed, training.at.step, f"evaluation {self._number - 1}")

    def owned_first(self) -> int:
        """The rank of which this worker evaluates the first batch; 0 if it has none."""
        script = self._script
        owned = script.training.session.owned(script.ranks) if script.begun else None
        return owned[0] if owned else 0

    def whole(self, source: ListedSource, start: EvaluationValues, occasion: str, done: int) -> Iterator[Any]:
        """The batches of this worker's ranks, of a loop that calls no collective.

        start: the values when it began. done: the rank whose first batch the loop has had since then.
        """
        script = self._script
        self.begin()
        found: list[dict[str, float]] = []
        fresh = False

        def turn(rank: int) -> Iterator[Any]:
            nonlocal fresh
            if fresh or rank != done:
                start.put_back(objects=False)
            begin, fresh = int(not fresh and rank == done), True
            yield from source.of_rank(rank, begin)

        def added(rank: int) -> dict[str, float]:
            start.check_longer()
            return start.added(rank, len(source))

        if not script.begun:
            for rank in range(script.ranks):
                yield from turn(rank)
                found.append(added(rank))
        else:
            training = script.training
            self.running = True
            buffers = script.objects.versions_of_buffers()
            results: list[CallResult] = []

            def said(rank: int) -> Partial:
                leaf = empty_leaf(rank)
                leaf.scalars = {name: ("sum", value, 0.0) for name, value in added(rank).items()}
                return leaf

            for rank in training.calls.in_turns(self.op(), said, results):
                yield from turn(rank)
                self.check_buffers(buffers)
            found += [result.scalars for result in results]
            self.end()
        if not asked_in_loop(script.frames.standing()[::-1]):
            raise mistakes.collected("A list(), a sum() or a comprehension")
        start.put_back(objects=False)
        totals = total(found)
        start.add(totals, script.ranks)
        if script.begun and len(totals) <= REMEMBERED_MAX:
            script.training.replies.remember(occasion, cast(Json, totals))

    def check_buffers(self, before: dict[str, int]) -> None:
        """Raise BufferChanged if a buffer has changed since the versions of all were those."""
        if changed := sorted(before.items() ^ self._script.objects.versions_of_buffers().items()):
            raise mistakes.buffer_in_evaluation(changed[0][0])
