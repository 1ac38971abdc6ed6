"""A round of replicas with a quorum: who takes part, when it is over, and what becomes of the late. Pure.

A *replica* trains by itself for a round, here on a worker of its own. When `min_replicas` of them have made all inner
steps of the round and the grace window is over, the round is over: the leader tells the late ones to stop after the
inner step that they are in, and all differences are averaged, each by its samples (a minimum quorum, a grace window
and a merge weighed by tokens are those of Decoupled DiLoCo, arXiv 2604.21428, 2026). So nobody waits for a slow replica
for longer than one of its inner steps, nobody is expelled for being late, and no difference is stale.

A replica whose worker dies is not computed again, unless fewer workers live than `min_replicas`: then the survivors
compute the missing ones, as without a quorum, and no round is over before all are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from elastic.errors import ConfigError

DRIFT = "elastic.drift"
"""Among the metrics of a step: how far replicas were from their mean when their differences were taken, as the root of
the mean square of these distances."""
SUMMED_BYTES = "elastic.summed_bytes"
"""Among them: the bytes of the tensors that are summed in the step. See runtime/outer/traffic.py."""
REPLICAS = "elastic.replicas"
"""With a quorum: how many replicas had a part in the outer step."""
LATE = "elastic.late"
"""With a quorum: how many of them have made fewer inner steps than the round has."""
INNER_STEPS = "elastic.inner_steps"
"""With a quorum: how many inner steps all of them have made."""
LOST = "elastic.lost"
"""With a quorum: how many replicas have ended with their workers, and were not computed again."""

METRICS = (DRIFT, SUMMED_BYTES, REPLICAS, LATE, INNER_STEPS, LOST)


def told_of(line: Mapping[str, Any]) -> dict[str, float]:
    """What a line of the ledger says of its round, by the names above without "elastic."; {}: it is of no round."""
    scalars = line.get("scalars", {})
    if DRIFT not in scalars:
        return {}
    return {name.removeprefix("elastic."): float(scalars[name]) for name in METRICS if name in scalars}


def has_quorum(line: Mapping[str, Any]) -> bool:
    """Whether a line of the ledger is of a round with a quorum, whose values depend on who was late."""
    scalars = line.get("scalars")
    return isinstance(scalars, Mapping) and REPLICAS in scalars


@dataclass(frozen=True, slots=True)
class Quorum:
    """min_replicas: how many replicas make all their inner steps in each round, at least 1. grace_s: for how many
    seconds the others are waited for after that. Raises ConfigError for other numbers."""

    min_replicas: int
    grace_s: float = 0.0

    def __post_init__(self) -> None:
        least = self.min_replicas
        if isinstance(least, bool) or not isinstance(least, int) or least < 1:
            raise ConfigError(f"min_replicas={least!r} must be an integer of at least 1: an outer step needs a replica")
        window = self.grace_s
        if isinstance(window, bool) or not isinstance(window, int | float) or not 0 <= window <= GRACE_MAX_S:
            raise ConfigError(f"grace_s={self.grace_s!r} must be from 0 to {GRACE_MAX_S:.0f} seconds")


GRACE_MAX_S = 86400.0


def is_over(min_replicas: int, grace_s: float, delivered: Iterable[tuple[int, float]]) -> bool:
    """Whether those who still compute are to stop. delivered: of each worker that has done its part, how many replicas
    made all inner steps there, and for how many seconds it has waited since."""
    missing = min_replicas
    for replicas, waited_s in sorted(delivered, key=lambda one: -one[1]):
        missing -= replicas
        if missing <= 0:
            return waited_s >= grace_s
    return False


def computes(min_replicas: int, made: int, workers: int, *, left: int, over: bool) -> bool:
    """Whether a worker trains the replica that is handed to it now; otherwise nobody does in this round. made: how many
    replicas it has trained in this round, in part or whole. workers: members that live. left: how many replicas the
    worker still gets after this one, as far as is known. over: it was told to stop.

    The last one is trained in any case if none was before, so that each living worker takes part in each round, and a
    round never ends without a difference. It is the last one, as its difference may be sent while it still trains.
    """
    return (made == 0 and left == 0) or (workers < min_replicas and not over)
