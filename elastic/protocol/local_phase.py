"""A phase of training in which no worker waits for another one: the names of its metrics, and what is told of it. Pure.

`runtime/asynchronous` counts them; the ledger has them among the scalars of the step that the phase is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

UPDATES = "elastic.updates"
"""Updates that the workers have given to each other. One that reached a part of the pieces counts for that part."""
LOST = "elastic.lost_updates"
"""Updates in flight of workers that have gone, and those of pieces that fell back."""
DROPPED, SCALED = "elastic.dropped", "elastic.scaled"
"""Updates beyond the bound of staleness; among those that are dropped are also those which are not finite."""
STALENESS, STALENESS_MOST = "elastic.staleness", "elastic.staleness_max"
"""Updates of others between taking the parameters and giving the update: mean and most."""
PIECES_FELL_BACK = "elastic.pieces_fell_back"
"""Pieces of the parameters of which owner and mirror have died together."""
CONSENSUS = "elastic.consensus"
"""With gossip: how far the workers were from their mean at the end of the phase, the root of the mean of the squared
distances."""
DISTANCE, SKIPPED = "elastic.distance", "elastic.skipped"
"""With gossip: the mean distance of two workers that have averaged, before they did; exchanges without a partner."""

METRICS = (UPDATES, LOST, DROPPED, SCALED, STALENESS, STALENESS_MOST, PIECES_FELL_BACK, CONSENSUS, DISTANCE, SKIPPED)


def told_of(line: Mapping[str, Any]) -> dict[str, float]:
    """What a line of the ledger says of its phase, by the names above without "elastic."; {}: it is of no phase."""
    scalars = line.get("scalars", {})
    if LOST not in scalars:
        return {}
    return {name.removeprefix("elastic."): float(scalars[name]) for name in METRICS if name in scalars}


def applied_of(told: Mapping[str, float]) -> float:
    """How many updates have counted whole. told: as of `told_of`."""
    return told.get("updates", 0.0) - told.get("dropped", 0.0) - told.get("scaled", 0.0)
