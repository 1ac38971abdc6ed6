"""The statistics of the benchmark: medians, and how sure they are."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and its interval. confidence: what the interval really has, 0..1; below 6 values it is under 0.95."""

    median: float
    low: float
    high: float
    confidence: float
    n: int


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The median of the values and the narrowest symmetric interval between two of them which covers the true
    median with at least this confidence, whatever the distribution is (order statistics: the number of values below
    the median is binomial; David & Nagaraja 2003, section 7.1). Raises ValueError without values.
    """
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    n = len(ordered)
    place, missed = 1, 2 / 2**n
    while place < n // 2 and missed + 2 * math.comb(n, place) / 2**n <= 1 - confidence:
        missed += 2 * math.comb(n, place) / 2**n
        place += 1
    return Interval(statistics.median(ordered), ordered[place - 1], ordered[n - place], max(0.0, 1 - missed), n)


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Of the values measured next to each other."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]
