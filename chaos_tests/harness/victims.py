"""Who can be hit now, and who is chosen."""

from __future__ import annotations

import random
from collections.abc import Sequence

from chaos_tests.harness.faults import Targeted, choose
from chaos_tests.harness.schedule import Planned
from chaos_tests.harness.world import World


class Victims:
    """frozen: who stands still by our doing. condemned: who has been hit, or will be when it comes by."""

    def __init__(self, world: World, seed: int) -> None:
        self._world, self._seed = world, seed
        self.frozen: set[str] = set()
        self.condemned: set[str] = set()

    def dice(self, planned: Planned) -> random.Random:
        """Of this fault alone, so that a replay hits the same ranks, whatever happened to the faults before it."""
        return random.Random(f"{self._seed}/{planned.number}")

    def healthy(self) -> list[str]:
        """Members that hold the state, the oldest first."""
        return [w for w in self._world.holders if w not in self.frozen and w not in self.condemned]

    def any_of(self, planned: Planned, workers: Sequence[str]) -> str:
        return self.dice(planned).choice(workers)

    def of(self, planned: Planned, fault: Targeted) -> tuple[str, ...]:
        """Nobody, if that cannot be done now."""
        newcomers = sorted(self._world.newcomers - self.condemned)
        return choose(fault, self.healthy(), newcomers, self.dice(planned))

    def pids(self, workers: Sequence[str]) -> dict[str, int]:
        return {worker: self._world.pids[worker] for worker in workers}
