"""What each worker did last, in words, and who waits for whom, by the flights of a job's workers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from elastic.records.flight_recorder import Flight, FlightEvent, FlightNote
from elastic.records.journal import Line


@dataclass(frozen=True, slots=True)
class LastNote:
    """What a worker did last. rank: in that generation; None: not known. since_s: seconds since that note. awaited:
    others wait for it."""

    worker_id: str
    rank: int | None
    pid: int
    generation: int
    operation: int
    said: str
    since_s: float
    awaited: bool

    @property
    def who(self) -> str:
        return self.worker_id if self.rank is None else f"rank {self.rank} ({self.worker_id})"


def ranks(lines: Iterable[Line]) -> dict[tuple[str, int], int]:
    """(worker id, generation) -> rank, by the lines `entered` of journals."""
    known = (line for line in lines if line["event"] == "entered" and "rank" in line)
    return {(line["worker_id"], line["generation"]): line["rank"] for line in known}


def last_notes(flights: Iterable[Flight], now_ns: int | None, ranks: Mapping[tuple[str, int], int]) -> list[LastNote]:
    """The last note of the newest worker of each slot, by worker id. now_ns: nanoseconds since 1970; None: the time of
    the last note of all. ranks: those of `ranks`.

    A worker is waited for if it is in the generation of those that wait, and has not come as far as they: it is in an
    earlier operation, or in the same one and still computes its part. One in an earlier generation was lost.
    """
    newest: dict[str, Flight] = {}
    for flight in flights:
        slot, _, incarnation = flight.worker_id.rpartition(".")
        known = newest.get(slot)
        if flight.notes and (known is None or int(known.worker_id.rpartition(".")[2]) < int(incarnation)):
            newest[slot] = flight
    lasts = [(flight, flight.notes[-1]) for flight in newest.values()]
    end_ns = now_ns or max((note.t_ns + flight.offset_ns for flight, note in lasts), default=0)
    waits = [note for _, note in lasts if note.event in (FlightEvent.WAITS, FlightEvent.GATHERED)]
    generation, furthest = max(((note.generation, note.operation) for note in waits), default=(-1, -1))
    return [
        LastNote(
            flight.worker_id,
            ranks.get((flight.worker_id, note.generation)),
            flight.pid,
            note.generation,
            note.operation,
            said(note),
            (end_ns - note.t_ns - flight.offset_ns) / 1e9,
            note.generation == generation
            and (note.operation < furthest or (note.operation == furthest and note not in waits)),
        )
        for flight, note in sorted(lasts, key=lambda it: it[0].worker_id)
    ]


def text(lasts: Iterable[LastNote]) -> str:
    """A line for each worker, and one for what holds them up."""
    told = list(lasts)
    width = max((len(last.who) for last in told), default=0)
    lines = [
        f"{last.who:<{width}}  generation {last.generation}, operation {last.operation}: {last.said}, for "
        f"{last.since_s:.3g} s"
        for last in told
    ]
    late = [last for last in told if last.awaited]
    if late:
        first = min(late, key=lambda last: (last.operation, -last.since_s))
        lines.append(
            f"the others wait for {', '.join(last.who for last in late)}; the first to look at is {first.who}: it "
            f"{first.said}, for {first.since_s:.3g} s"
        )
    return "\n".join(lines)


def said(note: FlightNote) -> str:
    """What the worker does since this note."""
    match note.event:
        case FlightEvent.DECLARED:
            return f'is at "{note.text}"'
        case FlightEvent.BEGUN:
            return f"begins {note.text}"
        case FlightEvent.COMPUTES:
            return f"computes {note.text}"
        case FlightEvent.COMPUTED:
            return "has computed a part, and looks for the next one"
        case FlightEvent.WAITS:
            return f"waits for the others in {note.text}"
        case FlightEvent.GATHERED:
            return "exchanges the sums"
        case FlightEvent.REDUCED:
            return "has the sums"
        case FlightEvent.DONE:
            return "runs the script between two operations"
        case FlightEvent.BROKEN:
            return f"has left the ring: {note.text}"
