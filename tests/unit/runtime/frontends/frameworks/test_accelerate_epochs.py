"""Epochs of a DataLoader that accelerate has prepared, of which some were left by `break`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset

from runtime.frontends.ddp.rank_script import Turn
from runtime.frontends.ddp.rank_source import Position, RankSource
from runtime.frontends.ddp.script.epochs import ScriptEpochs
from runtime.frontends.frameworks.accelerate_batches import PreparedBatches, PreparedTraining


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(1)


class Prepared(DataLoader[torch.Tensor]):
    """What is asked of accelerate's DataLoaderShard, which counts the epochs that have come to their end."""

    iteration = 0

    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass

    def set_epoch(self, epoch: int) -> None:
        self.iteration = epoch


class Script:
    """A worker whose loops are counted. there: what others say of the epoch to which it comes."""

    def __init__(self) -> None:
        self.loader = Prepared(Noisy(), 4)
        self.there: dict[str, Any] | None = None
        self._made: list[Callable[[Position], RankSource]] = []
        self._epochs = ScriptEpochs()

    def loop(self, *, ends: bool = False) -> PreparedBatches:
        """A loop begins, and is left by `break`, or ends."""
        fake = SimpleNamespace(
            turn=Turn.OUTSIDE,
            ranks=1,
            epochs=self._epochs,
            data_of_others=self.there,
            iterate=lambda iterator, source: self._made.append(source),
        )
        PreparedTraining(cast(Any, fake), self.loader, cast(Any, None))
        self.there = None
        source = self._made[-1](Position())
        self.loader.iteration += ends
        return cast(PreparedBatches, source)


def test_the_epoch_behind_one_that_was_left_by_break_draws_other_random_numbers() -> None:
    script = Script()
    drawn = [tuple(script.loop(ends=number == 2).fetch(0, 0).flatten().tolist()) for number in range(5)]
    assert len(set(drawn)) == 5
    assert script.loader.iteration == 1


def test_whole_epochs_draw_what_they_have_drawn_before() -> None:
    """Their data say nothing more, either: a checkpoint of an earlier version goes on."""
    script = Script()
    for epoch in range(3):
        source = script.loop(ends=True)
        plain = PreparedBatches(InEpoch(epoch), 1, Position())
        assert torch.equal(source.fetch(1, 0), plain.fetch(1, 0)) and source.about() == plain.about()


class InEpoch(Prepared):
    def __init__(self, epoch: int) -> None:
        super().__init__(Noisy(), 4)
        self.iteration = epoch


def test_a_worker_that_comes_later_draws_what_the_others_draw() -> None:
    """It passes by the epochs before, and does not see that they were left early."""
    member, newcomer = Script(), Script()
    for _ in range(3):
        source = member.loop()
        newcomer.loop(ends=True)
    source = member.loop()
    newcomer.there = source.about()
    entered = newcomer.loop()
    assert entered.about() == source.about()
    assert torch.equal(entered.fetch(0, 0), source.fetch(0, 0))
    assert torch.equal(newcomer.loop().fetch(0, 0), member.loop().fetch(0, 0))
