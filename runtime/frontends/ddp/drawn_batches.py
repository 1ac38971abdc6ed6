"""Batches that a script draws itself, without a DataLoader: `elastic.ddp.batches()`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from elastic.errors import ConfigError
from runtime.data.loader import check_count, check_seed, seed_fetch
from runtime.data.random_state import randomness_kept
from runtime.frontends.ddp.batches import TrainingBatches
from runtime.frontends.ddp.rank_script import RankScript
from runtime.frontends.ddp.rank_source import Position, RankSource

Draw = Callable[..., Any]


def batches(draw: Draw, steps: int, *, seed: int = 0) -> Iterator[Any]:
    """One epoch of `steps` training batches for each rank, in a script that draws its batches itself.

    draw: `draw()` draws a batch from the global random generators of torch, numpy and Python, and from nothing else; or
    `draw(number, rank)` gives the batch of that number, 0..steps-1, of that rank. steps: batches of one rank, those of
    an accumulated step counted singly. seed: of what `draw()` draws, together with epoch, number and rank.

    With logical ranks the generators are seeded before each call, so a rank's batches do not depend on which worker
    computes the rank. Under torchrun, and in a script of one process, `draw` is called and nothing else is done.
    Raises ConfigError if steps < 1, if `draw` takes other arguments, and if it gives another batch for the same
    arguments and random numbers, because it keeps a position.
    """
    check_count("ddp.batches(steps=)", steps)
    check_seed(seed)
    wanted = _wanted(draw)
    script = RankScript.current()
    if script is not None:
        return TrainingBatches(script, lambda position: DrawnSource(draw, steps, seed, script, position))
    rank = int(os.environ.get("RANK") or "0")
    return (draw(*(number, rank)[:wanted]) for number in range(steps))


def _wanted(draw: Draw) -> int:
    """How many arguments it takes: 0 or 2."""
    named = (
        [of for of in inspect.signature(draw).parameters.values() if of.default is of.empty] if callable(draw) else []
    )
    if not callable(draw) or len(named) not in (0, 2) or any(of.kind is of.KEYWORD_ONLY for of in named):
        raise ConfigError(
            f"ddp.batches({_name(draw)}): give a function without arguments, which draws a batch from the random "
            "generators, or one of (number, rank)"
        )
    return len(named)


def _name(draw: Any) -> str:
    return getattr(draw, "__name__", repr(draw))


class DrawnSource(RankSource):
    """One epoch of batches that the script draws."""

    def __init__(self, draw: Draw, steps: int, seed: int, script: RankScript, position: Position) -> None:
        """Raises ConfigError for a function that gives another batch when it is called again."""
        super().__init__(script.ranks, position)
        self._draw = draw
        self._wanted = _wanted(draw)
        self._steps = steps
        self._seed = seed
        self._epoch = script.epochs.now + 1
        with randomness_kept():
            if not _equal(self.fetch(0, 0), self.fetch(0, 0)):
                raise ConfigError(
                    f"ddp.batches({_name(draw)}): called twice with the same random numbers, it gives two different "
                    "batches: it keeps a position, or a generator of its own. Then nobody knows which batch is whose. "
                    "Let it take (number, rank), and give the batch of that number, 0, 1, ..., of that rank, from "
                    "nothing else"
                )

    def __len__(self) -> int:
        return self._steps

    @property
    def epoch(self) -> int:
        return self._epoch

    def about(self) -> None:
        """Only the script knows which samples a batch has."""

    def samples(self, epoch: int, step: int) -> list[Any]:
        return []

    def fetch(self, number: int, rank: int) -> Any:
        """With random numbers that depend on the seed, the epoch, number and rank only."""
        seed_fetch(self._seed, self._epoch, number, rank)
        return self._draw(*(number, rank)[: self._wanted])


def _equal(first: Any, second: Any) -> bool:
    """Whether two batches hold the same values; of what is no tensor and no collection, what it prints."""
    (one, shape), (other, other_shape) = tree_flatten(first), tree_flatten(second)
    return shape == other_shape and all(
        torch.equal(a.nan_to_num(), b.nan_to_num())
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        else repr(a) == repr(b)
        for a, b in zip(one, other, strict=True)
    )
