"""What trainers note while they compute a loss: rows of self.log(), and what trl's keep in `_metrics` and
`_total_train_tokens`, as trl 1.16 has them.

A rank of torchrun writes its rows where it is, and trl collects from all ranks inside compute_loss(). Here each rank's
part is taken away from the trainer, averaged with the weights of the ranks, and noted once.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from math import prod
from typing import Any, Self

from elastic.errors import ConfigError

METRICS = "_metrics"
"""Mode, "train" or "eval" -> name -> the values since the last log."""
TOTAL = "_total_train_tokens"
TOTALS = "num_tokens"
"""The name under which that total is logged."""
LOGGED = "log() "
"""In front of the names of what is logged, each with the number of the call in its rank."""


class Noted:
    """What one rank notes while its loss is computed in the body of a `with`; `taken` at the end of it."""

    def __init__(self, trainer: Any, mode: str) -> None:
        self._trainer = trainer
        self._mode = mode
        self._rows: list[dict[str, float]] = []
        self._metrics: dict[str, Any] | None = getattr(trainer, METRICS, None)
        self._total = getattr(trainer, TOTAL, 0)
        if self._metrics is not None:
            self._before = self._metrics[mode]
            self._metrics[mode] = defaultdict(list)

    def __enter__(self) -> Self:
        self._log, self._trainer.log = self._trainer.log, self._logged
        return self

    def __exit__(self, *exception: object) -> None:
        self._trainer.log = self._log

    def _logged(self, logs: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """In the place of the trainer's log(). Raises ConfigError for what has no mean."""
        for name, value in logs.items():
            of_one = hasattr(value, "item") and prod(getattr(value, "shape", ())) == 1
            if not (isinstance(value, int | float) or of_one):
                raise ConfigError(
                    f"self.log() in compute_loss() or training_step() of {type(self._trainer).__name__} has {name!r}, "
                    f"a {type(value).__name__}. All ranks log one row, with their means: log numbers there, and other "
                    "things in a callback"
                )
        self._rows.append({name: float(value) for name, value in logs.items()})

    def taken(self) -> tuple[dict[str, float], float]:
        """The means of what was noted, and by how much the total has grown; the trainer has them no more."""
        rows = enumerate(self._rows)
        logged = {LOGGED + json.dumps([number, name]): row[name] for number, row in rows for name in row}
        if self._metrics is None:
            return logged, 0.0
        new, self._metrics[self._mode] = self._metrics[self._mode], self._before
        grown = getattr(self._trainer, TOTAL, 0) - self._total
        if grown:
            setattr(self._trainer, TOTAL, self._total)
        means = {name: sum(values) / len(values) for name, values in new.items() if name != TOTALS}
        return {**means, **logged}, float(grown)


def note(trainer: Any, mode: str, means: Mapping[str, float], grown: float) -> None:
    """Note what all ranks have noted, and log their rows."""
    rows: dict[int, dict[str, float]] = defaultdict(dict)
    for name, value in means.items():
        if name.startswith(LOGGED):
            number, logged = json.loads(name.removeprefix(LOGGED))
            rows[number][logged] = value
    for number in sorted(rows):
        trainer.log(dict(sorted(rows[number].items())))
    metrics = getattr(trainer, METRICS, None)
    if metrics is None:
        return
    for name, value in means.items():
        if not name.startswith(LOGGED):
            metrics[mode][name].append(value)
    if hasattr(trainer, TOTAL):
        setattr(trainer, TOTAL, getattr(trainer, TOTAL) + int(grown))
        metrics[mode][TOTALS] = [getattr(trainer, TOTAL)]
