"""Which resources to ask Ray for, and which of the agents to start. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from elastic.errors import ConfigError


def bundle_of(per_worker: Mapping[str, float], workers: int) -> dict[str, float]:
    """Resources of one agent with so many workers, as Ray names them. Raises ConfigError."""
    for name, amount in per_worker.items():
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 <= amount < float("inf"):
            raise ConfigError(f"resources_per_worker: {name}={amount!r} must be a number of at least 0")
    if not any(per_worker.values()):
        raise ConfigError("resources_per_worker is empty; Ray places what needs something, such as {'CPU': 1}")
    return {name: amount * workers for name, amount in per_worker.items() if amount}


def actor_options(bundle: Mapping[str, float]) -> dict[str, object]:
    """The options of ray.remote for an actor that takes a whole bundle."""
    others = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU", "memory")}
    memory = {"memory": bundle["memory"]} if "memory" in bundle else {}
    return {
        "num_cpus": bundle.get("CPU", 0),
        "num_gpus": bundle.get("GPU", 0),
        "resources": others,
        "max_restarts": 0,
        **memory,
    }


class GroupState(StrEnum):
    """What Ray says of a placement group."""

    READY = "CREATED"
    WAITS = "PENDING"
    AGAIN = "RESCHEDULING"
    GONE = "REMOVED"


def state_of(table: Mapping[str, object]) -> GroupState:
    """The state of a group. table: its entry in Ray's table, which is empty if Ray does not know it. Ray reserves
    resources before it commits them (PREPARED), and another release may have more states on the way: all of them wait.
    """
    said = table.get("state", GroupState.GONE)
    return next((state for state in GroupState if state == said), GroupState.WAITS)


@dataclass(frozen=True, slots=True)
class Seat:
    """One agent, as its driver sees it. place: of its group; None: it has none. serves: its actor runs. due: it may be
    started, after whatever pause."""

    number: int
    place: GroupState | None
    serves: bool
    due: bool


@dataclass(frozen=True, slots=True)
class NextSteps:
    """Numbers of seats. ask: for a group. start: an actor."""

    ask: tuple[int, ...]
    start: tuple[int, ...]


def next_steps(seats: Collection[Seat]) -> NextSteps:
    """While the job is not over."""
    free = [seat for seat in seats if not seat.serves]
    ask = tuple(seat.number for seat in free if seat.place in (None, GroupState.GONE))
    return NextSteps(ask, tuple(seat.number for seat in free if seat.place is GroupState.READY and seat.due))
