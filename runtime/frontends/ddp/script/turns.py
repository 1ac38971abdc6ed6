"""One pass over the logical ranks of which the script's own loop computes this worker's part, a turn for each rank.

A pass ends inside the script's backward(), where DistributedDataParallel would reduce: the backward() of the last turn
leaves the gradients of all ranks in place. Each worker runs at least one turn in each pass, so that its script comes to
its optimizer. A worker that has no rank, or has got the result from other members, computes the turn of rank 0, and its
gradients are dropped.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import nn

from elastic.errors import BufferChanged, StateChanged, UsageError
from elastic.protocol.loop_state import ScriptStage
from runtime.data.random_state import seed_shard
from runtime.frontends.ddp import mistakes
from runtime.frontends.ddp.rank_source import RankSource
from runtime.loop.passes import Pass, RunningPass
from runtime.loop.training import Training
from runtime.recovery.state.change_detection import StateMarks
from runtime.script_files import innermost_frame


class TurnTrials:
    """Turns of a pass that count for nobody."""

    keeps_fingerprint = True

    def __init__(self, training: Training, running: RunningPass) -> None:
        self._training = training
        self._running = running
        self.turns = 0
        """How many turns have had their last backward()."""
        self._joins = training.at.joining
        """The first turn is a newcomer's, whose script does not know the values of the others yet: it may take more or
        fewer batches than they, and end the step where they go on. So it has another one."""

    def rehearsals(self) -> int:
        """One turn if this worker's first one cannot count."""
        at, owned = self._training.at, self._training.session.owned(self._running.work.shards)
        return int(at.joining or at.behind or not owned)

    def untried(self, skipped: Set[int]) -> int | None:
        """A turn for nobody, so that each pass costs each worker a turn."""
        again = self._joins and self._training.at.stage is not ScriptStage.REHEARSING
        return 0 if self.turns == int(again) else None

    def told(self, why: UsageError, before: StateMarks | None) -> UsageError:
        """In the words of a script for DistributedDataParallel."""
        if isinstance(why, BufferChanged):
            return mistakes.changed_buffer(why)
        assert isinstance(why, StateChanged)
        was = {} if before is None else before.marks
        now = self._training.carrier.watch_rates()
        rates = {name: (was[name], rate) for name, rate in now.items() if name in was and was[name] != rate}
        return mistakes.changed_state(why, rates, innermost_frame())


class Turns:
    """Used by the user's thread only: `begin`, then `following` and `backward_ended` until it is `over`."""

    def __init__(self, training: Training, running: RunningPass, source: RankSource) -> None:
        self._training = training
        self._running = running
        self._trials = TurnTrials(training, running)
        self._pass = Pass(training, running, self._trials)
        self._source = source
        self._next: int | None = None
        self._batches = 0
        """How many batches the turn in progress has handed out."""
        source.before = source.used
        self.fresh = True
        """The turn in progress has had no backward()."""
        self._gradients: list[tuple[nn.Parameter, torch.Tensor | None]] = []
        """Those that the pass has found: the script adds up those of several passes, or is still to drop them. A copy
        of the state, which comes in a turn, may say that others are trained."""
        self.over = False
        """The result of all is in place."""
        self.rank: int | None = None
        """Whose turn this is, or was; None of one that counts for nobody."""
        self.batch_of: int | None = None
        """Whose batch it needs: also of a turn that counts for nobody, if its gradients are compared; None: any."""

    def _found_gradients(self) -> list[tuple[nn.Parameter, torch.Tensor | None]]:
        return [(parameter, parameter.grad) for _, parameter in self._training.carrier.parameters()]

    def begin(self) -> None:
        """Find out whose turn the first one is."""
        self._gradients = self._found_gradients()
        self._next = self._pass.next_shard()

    def following(self) -> Any:
        """The batch of the next turn, or, if its script has had another batch, of the same one."""
        assert self._next is not None, "each pass has a turn at least"
        self._batches, self.fresh = 1, True
        batch = self._pass.begin_shard(self._next)
        self.rank = self._next if self._pass.collects else None
        self.batch_of = self._next if self._pass.verifying else self.rank
        self._put_back()
        return batch

    def more(self, *, void: bool) -> Any:
        """Give the turn in progress one more batch, because its last backward() did not reduce. void: the script has
        begun this turn with a batch of another step, and will repeat the turn; if it asks for more batches than the
        epoch has, it gets the last batch again. Raises LeftPass if the epoch has no other batch and the turn counts."""
        assert self._running.shard is not None
        number, rank = self._source.first + self._source.before + self._batches, self._running.shard.index
        if number >= len(self._source):
            if not void:
                raise mistakes.unreduced(self._source.left, len(self._source))
            number = len(self._source) - 1
        own = self._training.session.owned(self._running.work.shards)
        batch = self._source.fetch_ahead(number, rank, own)
        seed_shard(self._training.seed, self._running.place.index, self._pass.number, rank, self._batches)
        self._batches += 1
        return batch

    def settle_rates(self) -> None:
        """The script may set a learning rate at the top of a turn, the same in all turns of the pass."""
        if self._trials.turns == 0:
            self._pass.settle_rates(self._training.carrier.watch_rates())

    @property
    def number(self) -> int:
        """The number, in the epoch, of the batch that was handed out last."""
        return self._source.first + self._source.before + self._batches - 1

    def set_gradients_aside(self) -> None:
        """Those that were there before the turn's first backward(), which the turn's are kept apart from. Raises
        StrayGradient for what the step before has left."""
        self._gradients = self._found_gradients()
        for parameter, _ in self._gradients:
            parameter.grad = None
        self.fresh = False
        if self._pass.number == 0:
            for (name, _), (_, gradient) in zip(self._training.carrier.parameters(), self._gradients, strict=True):
                if gradient is not None and bool(gradient.any()):
                    raise mistakes.left_gradient(name, self._pass.where)
            # Zeros would turn -0.0 into 0.0, and a newcomer has none.
            self._gradients = [(parameter, None) for parameter, _ in self._gradients]

    def _put_back(self) -> None:
        for parameter, gradient in self._gradients:
            parameter.grad = gradient

    def go_on_with(self, frozen: nn.Parameter, gradient: torch.Tensor) -> None:
        """A weight that is not trained any more has this gradient, whatever the turns do."""
        frozen.grad = gradient
        self._gradients = [entry for entry in self._gradients if entry[0] is not frozen]

    def backward_ended(self) -> None:
        """The turn's gradients are complete. Computes nothing, but may wait for the others' turns."""
        self._trials.turns += 1
        self._source.used = self._source.before + self._batches
        self._next = self._pass.next_shard()
        if self._next is not None:
            return
        for parameter, before in self._gradients:
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
        self.over = True
