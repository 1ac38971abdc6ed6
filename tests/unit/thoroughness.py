"""How many cases of a test are tried: all of them by `make test-exact`, and some by `make test`."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

EXAMPLES = int(os.environ.get("EXACT_EXAMPLES", "0"))
"""Of random trainings; 0: not `make test-exact`."""


def some(cases: Sequence[T], number: int, of: object) -> Sequence[T]:
    """`number` of the cases; all where EXACT_EXAMPLES is set. of: the test's parameter: others get other cases, the
    same in each run, so that the parameters of a test come to all cases among them."""
    if EXAMPLES or number >= len(cases):
        return cases
    first = zlib.crc32(str(of).encode()) % len(cases)
    return [cases[(first + n * len(cases) // number) % len(cases)] for n in range(number)]
