"""What all faults of a run work on: who is in the job, what was begun and has not ended, and who is told of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from chaos_tests.harness.ambush.orders import Orders
from chaos_tests.harness.blows import End, Impossible
from chaos_tests.harness.onnodes import NodesJob
from chaos_tests.harness.running import Running
from chaos_tests.harness.schedule import Planned
from chaos_tests.harness.teller import Teller
from chaos_tests.harness.victims import Victims
from chaos_tests.harness.world import World


class NotNow(Exception):
    """It may become possible."""


@dataclass(slots=True)
class Scene:
    """mark: of the job's processes. steps: how many the job has; applied: so far. nodes: the job, if it has several."""

    world: World
    victims: Victims
    teller: Teller
    orders: Orders
    directory: Path
    mark: str
    steps: int
    nodes: NodesJob | None = None
    applied: int = 0
    running: list[Running] = field(default_factory=list)

    def on_nodes(self) -> NodesJob:
        """Raises Impossible."""
        if self.nodes is None:
            raise Impossible("it needs a job over several nodes; the presets cluster, storage and partition have one")
        return self.nodes

    def on_machine(self) -> None:
        """Raises Impossible."""
        if self.nodes is not None:
            raise Impossible("it is done to a job of one machine, and this one has several nodes")

    def lasting(
        self, planned: Planned, target: str, blow: Callable[[], End | None], for_s: float, **fields: object
    ) -> None:
        """Do something to what is no worker."""
        begun_ns = time.monotonic_ns()
        end = blow()
        self.teller.injected(planned, {}, begun_ns, target=target, **fields)
        self.lasts(planned, for_s, end, f"{target}, for {for_s:g} s" if for_s else target)

    def lasts(
        self, planned: Planned, for_s: float, end: End | None, text: str, frozen: frozenset[str] = frozenset()
    ) -> Running:
        """It has begun, and ends later. frozen: workers that stand still meanwhile."""
        self.teller.seen(planned, "it has taken hold")
        now_s = time.monotonic()
        running = Running(planned, now_s, frozen=frozen, until_s=now_s + for_s, end=end, injected=True)
        self.running.append(running)
        self.teller.told(planned, text)
        return running
