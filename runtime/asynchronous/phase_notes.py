"""What each worker says at the end of a phase, and what follows from that: units that are done, updates that are lost.

All workers compute it alike, from what the others have said; newcomers that are late, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from elastic.protocol.local_phase import LOST, PIECES_FELL_BACK, STALENESS, UPDATES
from runtime.asynchronous.units_left import UnitsLeft, finished_by


class PhaseSummary(NamedTuple):
    """left, begun: as of LocalTraining. gone: workers that have not seen the end of the phase, of which an update in
    flight may be lost each. end_s: seconds that the end of the phase took whoever came last. values: those of the
    oldest worker, see OwnValues. metrics: means of what the script has logged, and the counts of the phase."""

    left: UnitsLeft
    begun: dict[str, int]
    gone: tuple[str, ...]
    end_s: float
    values: dict[str, Any]
    metrics: dict[str, float]


def note(
    done: Sequence[int], begun: int | None, logged: Mapping[str, tuple[float, int]], counts: Mapping[str, Any]
) -> Any:
    """JSON. done, begun: units of this worker in the phase. logged: name -> sum, number of values. counts: as of
    LocalTraining.counts."""
    return {
        "done": list(done),
        "begun": begun,
        "logged": {name: list(value) for name, value in logged.items()},
        **counts,
    }


def summary(
    notes: Mapping[str, Any], ends: Mapping[str, Any], roster: Sequence[str], left: UnitsLeft, begun: Mapping[str, int]
) -> PhaseSummary:
    """notes: by worker, before all have summed what they hold. ends: what each has said behind that. roster: the
    workers with which the phase began. left, begun: at its begin."""
    done = [unit for said in notes.values() for unit in said["done"]]
    gone = tuple(worker for worker in roster if worker not in notes)
    for worker in gone:
        known = max((said["applied"].get(worker, 0) for said in notes.values()), default=0)
        done += finished_by(worker, known, left, roster, begun)
    metrics: dict[str, float] = {}
    for name in sorted({name for said in notes.values() for name in said["logged"]}):
        values = [said["logged"][name] for said in notes.values() if name in said["logged"]]
        metrics[name] = sum(total for total, _ in values) / sum(count for _, count in values)
    for name in sorted({name for said in notes.values() for name in said["sums"]}):
        metrics[name] = float(sum(said["sums"].get(name, 0.0) for said in notes.values()))
    for name in sorted({name for said in notes.values() for name in said["most"]}):
        metrics[name] = float(max(said["most"].get(name, 0.0) for said in notes.values()))
    metrics[LOST] = float(len(gone) + _lost_of_pieces(ends))
    if fallen := {piece for said in ends.values() for piece, _, _ in said.get("fell_back", ())}:
        metrics[PIECES_FELL_BACK] = float(len(fallen))
    if STALENESS in metrics:
        metrics[STALENESS] /= metrics[UPDATES]
    doing = {worker: said["begun"] for worker, said in notes.items() if said["begun"] is not None}
    end_s = min(said["ended_s"] for said in ends.values())
    oldest = next(notes[worker]["values"] for worker in roster if worker in notes)
    return PhaseSummary(left.without(done), doing, gone, end_s, oldest, metrics)


def _lost_of_pieces(ends: Mapping[str, Any]) -> int:
    """The most updates that a piece has lost with owner and mirror, by the newest version that a survivor has seen."""
    most = 0
    for said in ends.values():
        for piece, lineage, version in said.get("fell_back", ()):
            seen = (
                known
                for other in ends.values()
                for of, older, known in other.get("seen", ())
                if of == piece and older < lineage
            )
            most = max(most, max(seen, default=version) - version)
    return most
