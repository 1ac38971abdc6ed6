"""How soon a killed worker's replacement is a member that steps: forked by the fork server against cold, in turns.

The same job of three workers twice, in short steps, so that what is measured is the start and not the steps it waits
for: see kills.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench import contenders, kills

SHARD_S = 0.01
WARM_UP_STEPS = 10


@dataclass(slots=True)
class Replacements:
    """Seconds from each kill to the first step of the full world; the n-th of both came one after the other."""

    forked_s: list[float] = field(default_factory=list)
    cold_s: list[float] = field(default_factory=list)


def measure(home: Path, rounds: int, seed: int, say: Callable[[str], None]) -> Replacements:
    dice = random.Random(seed)
    found = Replacements()
    with (
        contenders.ballast("forked", home / "forked", kills.WORKERS, 1, SHARD_S) as forked,
        contenders.ballast("cold", home / "cold", kills.WORKERS, 1, SHARD_S, "--cold-start") as cold,
    ):
        for job in (forked, cold):
            job.run(WARM_UP_STEPS, kills.WORKERS)
        for number in range(rounds):
            for job, seconds in ((forked, found.forked_s), (cold, found.cold_s)):
                seconds.append(kills.kill_one(job, dice).to_full_s)
                say(f"replacement {number + 1}/{rounds}, {job.name}: full world after {seconds[-1]:.2f} s")
    return found
