"""A fault that has begun, as the breaker keeps it until it has ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from chaos_tests.harness.ambush.points import Order
from chaos_tests.harness.blows import End
from chaos_tests.harness.catalogue import CATALOGUE
from chaos_tests.harness.faults import Fault
from chaos_tests.harness.schedule import Planned


@dataclass(slots=True)
class Running:
    """A fault that has begun. hit: workers whose end is awaited. frozen: those that it makes stand still.

    awaits_place: it is in two parts, and waits for the second. laid: an ambush into which nobody has come yet, and
    whose it is. slot: a place of which each new process is held, in `held`, until the fault ends. reach: nodes on which
    whoever begins meanwhile is hit too. until_steady: it lasts until all members are at work.
    """

    planned: Planned
    since_s: float
    awaits_place: bool = False
    laid: tuple[Order, str] | None = None
    hit: set[str] = field(default_factory=set)
    frozen: frozenset[str] = frozenset()
    until_s: float = 0.0
    until_steady: bool = False
    end: End | None = None
    slot: int | None = None
    reach: frozenset[str] = frozenset()
    held: list[str] = field(default_factory=list)
    injected: bool = False
    seen: bool = False

    @property
    def fault(self) -> Fault:
        return CATALOGUE[self.planned.kind].fault
