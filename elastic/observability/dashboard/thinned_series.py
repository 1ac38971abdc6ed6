"""Values over steps, or over time, in a bounded number of points, however long a job trains.

A series keeps every value until it has twice as many points as it shall keep; then two neighbours become one point, and
from there on each point stands for twice as many values. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

POINTS = 1000
"""Between so many and twice as many points are kept: about the pixels of a wide screen."""

NAMES = 32
"""Most names whose values are kept; a script may log any number of scalars."""


@dataclass(slots=True)
class _Point:
    """Neighbouring values of one name. mean: of `count` values; a point without values is a gap."""

    mean: float
    count: int
    least: float
    most: float

    def merged(self, other: _Point | None) -> _Point:
        if other is None:
            return self
        least, most, count = min(self.least, other.least), max(self.most, other.most), self.count + other.count
        mean = self.mean * (self.count / count) + other.mean * (other.count / count)  # a sum could overflow
        return _Point(min(most, max(least, mean)), count, least, most)


class ThinnedSeries:
    """points: between so many and twice as many are kept."""

    def __init__(self, points: int = POINTS) -> None:
        self._limit = 2 * points
        self._stride = 1
        """How many values each point stands for."""
        self._open = 0
        """How many of them the last point has."""
        self._at: list[float] = []
        self._values: dict[str, list[_Point | None]] = {}

    def __len__(self) -> int:
        return len(self._at)

    @property
    def last(self) -> float | None:
        """The newest place; None: there is no value yet."""
        return self._at[-1] if self._at else None

    def add(self, at: float, values: Mapping[str, float]) -> dict[str, float]:
        """Add the values at a step, or at a time, after all before it. Returns those that are kept: names beyond the
        first NAMES are left out."""
        if self._open in (0, self._stride):
            if len(self._at) >= self._limit:
                self._thin()
            self._at.append(at)
            self._open = 0
            for points in self._values.values():
                points.append(None)
        self._at[-1] = at
        self._open += 1
        for name, value in values.items():
            if name not in self._values:
                if len(self._values) >= NAMES:
                    continue
                self._values[name] = [None] * len(self._at)
            self._values[name][-1] = _Point(value, 1, value, value).merged(self._values[name][-1])
        return {name: value for name, value in values.items() if name in self._values}

    def document(self) -> dict[str, Any]:
        """{"stride", "at", "values": {name: {"mean", "min", "max"}}}, lists of equal length with None for gaps. min and
        max are left out while each point is one value. `at` is the last step, or time, of the point."""
        return {
            "stride": self._stride,
            "at": list(self._at),
            "values": {name: self._shown(points) for name, points in self._values.items()},
        }

    def _shown(self, points: list[_Point | None]) -> dict[str, list[float | None]]:
        shown = {"mean": [None if point is None else point.mean for point in points]}
        if self._stride > 1:
            shown["min"] = [None if point is None else point.least for point in points]
            shown["max"] = [None if point is None else point.most for point in points]
        return shown

    def _thin(self) -> None:
        self._at = self._at[1::2]
        for name, points in self._values.items():
            pairs = zip(points[::2], points[1::2], strict=True)
            self._values[name] = [second if first is None else first.merged(second) for first, second in pairs]
        self._stride *= 2
