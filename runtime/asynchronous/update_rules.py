"""What an update does to a piece: delayed Nesterov momentum, and what a late update counts; slow momentum of a worker.

The first two are element by element, so the pieces of a model may be changed one by one, in any order of pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

Late: TypeAlias = Literal["drop", "scale"]


@dataclass(slots=True)
class PieceState:
    """A piece: float32 vectors on the CPU, shape (elements,). version: how many updates were applied to it. momentum:
    that of the last delayed step. pending: the sum of the differences since then."""

    values: torch.Tensor
    momentum: torch.Tensor
    pending: torch.Tensor
    version: int = 0

    def clone(self) -> PieceState:
        """A copy with memory of its own."""
        return PieceState(self.values.clone(), self.momentum.clone(), self.pending.clone(), self.version)


@dataclass(frozen=True, slots=True)
class DelayedNesterov:
    """Delayed Nesterov updates of the outer parameters, after the idea of Liu et al., "Asynchronous Local-SGD Training
    for Language Modeling", 2024: each difference is applied when it comes, divided by `delay`, and the momentum is
    renewed by the mean of `delay` differences, in the last of their updates alone. (Their momentum activation is 0.)

    So `delay` updates that start from one place do what one step of SGD with Nesterov momentum does with the mean of
    their differences.
    """

    lr: float
    momentum: float
    delay: int

    def apply(self, piece: PieceState, difference: torch.Tensor, weight: float) -> None:
        """Change the piece. difference: outer minus own parameters, shape (elements,), float32. weight: what it counts;
        an update of weight 0 was dropped, and is none."""
        if weight == 0:
            return
        difference = difference * weight if weight != 1 else difference
        piece.pending += difference
        piece.version += 1
        piece.values.sub_(difference, alpha=self.lr / self.delay)
        if piece.version % self.delay == 0:
            piece.momentum.mul_(self.momentum).add_(piece.pending, alpha=1 / self.delay)
            piece.values.sub_(piece.momentum, alpha=self.lr * self.momentum)
            piece.pending.zero_()


class SlowMomentum:
    """Momentum of one worker over its units, after the idea of SlowMo without an exact average (Wang, Tantia, Ballas,
    Rabbat, "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum", 2020). In the long run a
    worker moves 1 / (1 - momentum) times as far as its inner steps do.

    Here it has only what its own inner steps have moved. With what others have pulled it to as well, as in SlowMo,
    workers that average in pairs by a changing schedule get further and further apart with a momentum of 0.9.
    Values are float32, 1-D, and not changed by anybody later.
    """

    def __init__(self, momentum: float) -> None:
        """momentum: from 0, which is none, to less than 1."""
        self._momentum = momentum
        self._at = self._progress = self._moved = torch.zeros(0)

    def begin(self, values: torch.Tensor) -> None:
        """A unit begins here, without a momentum."""
        self._at, self._progress, self._moved = values, torch.zeros_like(values), torch.zeros_like(values)

    def trained(self, values: torch.Tensor) -> None:
        """Inner steps have led here."""
        self._progress += values - self._at
        self._at = values

    def pulled(self, values: torch.Tensor) -> None:
        """Others have led here."""
        self._at = values

    def step(self) -> torch.Tensor:
        """The unit is over. Returns by how much the worker goes on."""
        further = self._moved * self._momentum
        self._moved = further + self._progress
        self._progress = torch.zeros_like(further)
        return further


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """How late an update may be. updates: how many others a piece may have had since the worker took it. age_s: seconds
    since then. late: what becomes of an update that is later: "drop" it, or "scale" it by 1 / (1 + updates beyond the
    bound), which is the hinge of FedAsync (Xie et al., 2019) with a = 1. Beyond age_s it is always dropped."""

    updates: int
    age_s: float
    late: Late

    def weight(self, staleness: int, age_s: float) -> float:
        """What an update counts."""
        if age_s > self.age_s:
            return 0.0
        beyond = staleness - self.updates
        if beyond <= 0:
            return 1.0
        return 0.0 if self.late == "drop" else 1.0 / (1 + beyond)
