"""What trl's trainers note while they compute a loss: `_metrics` and `_total_train_tokens`, as trl 1.16 has them.

They collect it from all ranks inside compute_loss(). Here each rank's part is taken away from the trainer, averaged
with the weights of the ranks, and noted once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

METRICS = "_metrics"
"""Mode, "train" or "eval" -> name -> the values since the last log."""
TOTAL = "_total_train_tokens"
TOTALS = "num_tokens"
"""The name under which that total is logged."""


class Noted:
    """What one rank notes: made before its loss is computed, `taken` behind it."""

    def __init__(self, trainer: Any, mode: str) -> None:
        self._trainer = trainer
        self._mode = mode
        self._metrics: dict[str, Any] | None = getattr(trainer, METRICS, None)
        self._total = getattr(trainer, TOTAL, 0)
        if self._metrics is not None:
            self._before = self._metrics[mode]
            self._metrics[mode] = defaultdict(list)

    def taken(self) -> tuple[dict[str, float], float]:
        """The means of what was noted, and by how much the total has grown; the trainer has them no more."""
        if self._metrics is None:
            return {}, 0.0
        new, self._metrics[self._mode] = self._metrics[self._mode], self._before
        grown = getattr(self._trainer, TOTAL, 0) - self._total
        if grown:
            setattr(self._trainer, TOTAL, self._total)
        return {name: sum(values) / len(values) for name, values in new.items() if name != TOTALS}, float(grown)


def note(trainer: Any, mode: str, means: Mapping[str, float], grown: float) -> None:
    """Note what all ranks have noted."""
    metrics = getattr(trainer, METRICS, None)
    if metrics is None:
        return
    for name, value in means.items():
        metrics[mode][name].append(value)
    if hasattr(trainer, TOTAL):
        setattr(trainer, TOTAL, getattr(trainer, TOTAL) + int(grown))
        metrics[mode][TOTALS] = [getattr(trainer, TOTAL)]
