"""How often a checkpoint is taken ("10 min", "500 steps", "auto" or "off"), and which checkpoints are kept."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from elastic.checkpoints.naming import EntryName
from elastic.errors import ConfigError

PRIOR_MTBF_S = 86_400.0
"""Before the job's own history says otherwise, it is expected to lose every copy of its state once a day."""

FIRST_S = 60.0
"""With `auto`, seconds until the first checkpoint, after which its cost is known."""

LEAST_S = 10.0
"""With `auto`, the least seconds between two checkpoints."""

SNAPSHOT_LEAST_S = 5.0
"""With `auto`, the least seconds between two snapshots, and before the first."""

SNAPSHOT_COST = 0.01
"""With `auto`, the part of the training time that snapshots may take."""

_UNIT_S = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}
_EVERY = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*(steps?|s|sec|min|h)")


class Unit(StrEnum):
    STEPS = "steps"
    SECONDS = "seconds"
    AUTO = "auto"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Every:
    """An interval. amount: steps or seconds; 0 for the other units."""

    unit: Unit
    amount: float = 0.0

    @classmethod
    def parse(cls, text: str, what: str = "checkpoint") -> Self:
        """Parse an interval. what: its kind, for the message. Raises ConfigError."""
        text = text.strip()
        if text in (Unit.AUTO, Unit.OFF):
            return cls(Unit(text))
        match = _EVERY.fullmatch(text)
        if match is not None:
            amount, unit = float(match[1]), match[2]
            if unit in _UNIT_S and amount > 0:
                return cls(Unit.SECONDS, amount * _UNIT_S[unit])
            if unit.startswith("step") and amount >= 1 and amount.is_integer():
                return cls(Unit.STEPS, amount)
        raise ConfigError(f'{what} every {text!r}: write "10 min", "30 s", "2 h", "500 steps", "auto" or "off"')

    def at_step(self, step: int) -> bool:
        """Whether all members take a checkpoint before this step, by its number alone."""
        return self.unit is Unit.STEPS and step > 0 and step % self.amount == 0

    def wait_s(self, cost_s: float | None, mtbf_s: float) -> float:
        """Seconds between two checkpoints if time decides, else infinity. cost_s: None before the first checkpoint."""
        return self._wait_s(FIRST_S if cost_s is None else max(LEAST_S, best_interval_s(cost_s, mtbf_s)))

    def snapshot_wait_s(self, cost_s: float | None) -> float:
        """Seconds between two snapshots if time decides, else infinity. `auto` limits their cost, because failures come
        without warning. cost_s: training time that a snapshot costs."""
        return self._wait_s(max(SNAPSHOT_LEAST_S, (cost_s or 0.0) / SNAPSHOT_COST))

    def _wait_s(self, auto_s: float) -> float:
        return {Unit.SECONDS: self.amount, Unit.AUTO: auto_s}.get(self.unit, math.inf)


def best_interval_s(cost_s: float, mtbf_s: float) -> float:
    """The seconds between checkpoints that lose least to writing them and to repeating work after a failure.

    cost_s: training time that one checkpoint costs. mtbf_s: mean time between failures that need one. Young 1974 gives
    sqrt(2 C M); this is the higher order estimate of J. T. Daly, "A higher order estimate of the optimum checkpoint
    interval for restart dumps", FGCS 22 (2006), equation 37: with x = C / 2M, sqrt(2 C M) (1 + sqrt(x) / 3 + x / 9) - C
    while C < 2 M, and M above.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    x = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - cost_s


def mtbf_s(observed_s: float, interruptions: int) -> float:
    """Expected seconds between losses of everything: the job's own history, with one loss a day as prior."""
    return (PRIOR_MTBF_S + observed_s) / (1 + interruptions)


_KEEP = re.compile(r"(?:last\s+)?(\d{1,15})(?:\s*,\s*every\s+(\d{1,15})(?:\s+steps)?)?")


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep the newest `last` ones, and for ever the first of each `every` steps (0: none for ever)."""

    last: int = 2
    every: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read "last 3", "3" or "last 3, every 10000 steps". Raises ConfigError."""
        match = _KEEP.fullmatch(text.strip())
        if match is None or int(match[1]) < 1 or match[2] == "0":
            raise ConfigError(f'keep={text!r}: write "last 2", or "last 2, every 10000 steps"; at least one is kept')
        return cls(int(match[1]), int(match[2] or 0))

    def __str__(self) -> str:
        return f"last {self.last}" + (f", every {self.every} steps" if self.every else "")


def superfluous(keep: Keep, complete: Iterable[EntryName], unfinished: Iterable[EntryName]) -> list[EntryName]:
    """The entries to remove, oldest first. An unfinished entry that is older than a complete one is never needed."""
    ordered = sorted(complete)
    stay = set(ordered[-keep.last :])
    if keep.every:
        first: dict[int, EntryName] = {}
        for name in ordered:
            first.setdefault(name.step // keep.every, name)
        stay |= set(first.values())
    newest = ordered[-1] if ordered else None
    gone = [name for name in unfinished if newest is not None and name.step < newest.step]
    return sorted([name for name in ordered if name not in stay] + gone)
