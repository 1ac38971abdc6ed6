"""Spans and instants of a job, from its journals and from the flights of its workers.

Pure. Times are nanoseconds since 1970, so that those of several machines can stand beside each other, as far as their
clocks agree.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from elastic.protocol.worker_id import node_of
from elastic.records.events import story, table
from elastic.records.flight_recorder import Flight, FlightEvent, FlightNote
from elastic.records.journal import PHASES, Line, recoveries
from elastic.records.last_notes import LastNote, last_notes, ranks, said

JOB = "job"
"""The track of what concerns all workers."""
_WRITTEN = frozenset({"checkpoint_part_written", "snapshot_part_written"})
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_COPY_ENDS = frozenset({"state_copied", "copy_failed", "worker_exited"})


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time. track: JOB, or a worker. node: of the worker; "" of the job's. kind: for colours and
    filters. open: it goes on, and end_ns is when it was looked at."""

    node: str
    track: str
    kind: str
    name: str
    start_ns: int
    end_ns: int
    about: dict[str, Any] = field(default_factory=dict)
    open: bool = False


@dataclass(frozen=True, slots=True)
class Instant:
    """Something that happened. As Span."""

    node: str
    track: str
    kind: str
    name: str
    at_ns: int
    about: dict[str, Any] = field(default_factory=dict)


def of_job(
    lines: Sequence[Line], flights: Sequence[Flight], living: Collection[str] = (), now_ns: int = 0
) -> list[Span | Instant]:
    """By time. lines: of all journals, by time. living: the workers whose processes live at now_ns, since 1970: what
    they do then is open."""
    found: list[Span | Instant] = [*_recoveries(lines), *_written(lines), *_instants(lines)]
    found += [*_generations(lines, now_ns if living else None), *_copies(lines, living, now_ns)]
    lasts = last_notes([flight for flight in flights if flight.worker_id in living], now_ns, ranks(lines))
    found += _awaited(lasts, now_ns)
    exits = {line["worker_id"]: _at(line) for line in lines if line["event"] == "worker_exited"}
    for flight in flights:
        if flight.worker_id in living:
            last = next((one for one in lasts if one.worker_id == flight.worker_id), None)
            found += of_flight(flight, now_ns, _relations(last, lasts), open=True)
        else:
            found += of_flight(flight, exits.get(flight.worker_id))
    return sorted(found, key=lambda it: it.start_ns if isinstance(it, Span) else it.at_ns)


# Journals


def _at(line: Line) -> int:
    return int(line["t_wall"] * 1e9)


def _track(worker_id: str) -> tuple[str, str]:
    return (node_of(worker_id), worker_id) if worker_id else ("", JOB)


def _generations(lines: Sequence[Line], now_ns: int | None) -> Iterator[Span]:
    """From the moment at which the first member enters a generation until one enters a later one, or the job ends.
    now_ns: of a job that goes on."""
    begun: Line | None = None
    for line in lines:
        later = line["event"] == "entered" and (begun is None or line["generation"] > begun["generation"])
        if begun is not None and (later or line["event"] == "job_ended"):
            yield _generation(begun, _at(line), open=False)
            begun = None
        if later:
            begun = line
    if begun is not None:
        yield _generation(begun, now_ns or _at(lines[-1]), open=now_ns is not None)


def _generation(begun: Line, end_ns: int, *, open: bool) -> Span:
    members = list(begun.get("members", ()))
    name = f"generation {begun['generation']}, {len(members)} workers"
    return Span("", JOB, "generation", name, _at(begun), end_ns, {"members": members}, open)


def _recoveries(lines: Sequence[Line]) -> Iterator[Span]:
    """Each with its phases. A phase that came more than once in an episode is shown as one."""
    offset_ns = {
        line["t_mono_ns"]: _at(line) - line["t_mono_ns"] for line in lines if line["event"] == "quiesce_started"
    }
    for told in recoveries(lines):
        at_ns = told["started_ns"] + offset_ns[told["started_ns"]] - int(told["detect_ms"] * 1e6)
        about = {"lost": told["lost"], "because": told["because"], "complete": told["complete"]}
        end_ns = at_ns + int(sum(told[f"{phase}_ms"] for phase in PHASES) * 1e6)
        name = f"recovery of {', '.join(told['lost']) or 'the ring'}"
        yield Span("", "recoveries", "recovery", name, at_ns, end_ns, about)
        for phase in PHASES:
            spent_ns = int(told[f"{phase}_ms"] * 1e6)
            if spent_ns:
                yield Span("", "phases", phase, phase, at_ns, at_ns + spent_ns, {"of": name})
            at_ns += spent_ns


def _copies(lines: Iterable[Line], living: Collection[str], now_ns: int) -> Iterator[Span]:
    """A newcomer's way from its invitation to the state."""
    invited: dict[str, Line] = {}
    for line in lines:
        worker = line["worker_id"]
        if line["event"] == "invited":
            invited.setdefault(worker, line)
        elif line["event"] in _COPY_ENDS and worker in invited:
            how = {"event": line["event"], "because": line.get("because", "")}
            yield Span(*_track(worker), "copy", "copies the state", _at(invited.pop(worker)), _at(line), how)
    for worker in invited.keys() & set(living):
        yield Span(*_track(worker), "copy", "copies the state", _at(invited[worker]), now_ns, open=True)


def _written(lines: Iterable[Line]) -> Iterator[Span]:
    for line in lines:
        if line["event"] in _WRITTEN:
            what = str(line["event"]).partition("_")[0]
            start_ns = _at(line) - int(float(line.get("seconds", 0)) * 1e9)
            about: dict[str, Any] = {key: line[key] for key in ("entry", "bytes", "stall_ms") if key in line}
            yield Span(*_track(line["worker_id"]), what, f"writes its part of a {what}", start_ns, _at(line), about)


def _instants(lines: Iterable[Line]) -> Iterator[Instant]:
    for line in lines:
        if table.row(line["event"]).instant:
            moment = story.moment(line)
            about = {"because": moment.because} if moment.because else {}
            yield Instant(*_track(line["worker_id"]), line["event"], moment.said, _at(line), about)


# Flights

_ENDS = {
    FlightEvent.COMPUTES: "computes",
    FlightEvent.WAITS: "waits",
    FlightEvent.GATHERED: "exchange",
    FlightEvent.DONE: "script",
    FlightEvent.DECLARED: "script",
}
"""Moments that begin a span which the next note ends -> its kind."""


def of_flight(
    flight: Flight, end_ns: int | None = None, about: Mapping[str, Any] = _NOTHING, *, open: bool = False
) -> Iterator[Span | Instant]:
    """What a worker did, from note to note. What its last note has begun lasts until end_ns, when the worker ended or,
    if it is open, was looked at; None: nobody knows for how long, so that it is an instant. about: more about that."""
    node, track = _track(flight.worker_id)
    for note, after in pairwise(flight.notes):
        if note.event is FlightEvent.BROKEN:
            yield Instant(node, track, "broken", note.text, note.t_ns + flight.offset_ns, _about(note))
        elif (kind := _ENDS.get(note.event)) is not None:
            start_ns, after_ns = note.t_ns + flight.offset_ns, after.t_ns + flight.offset_ns
            yield Span(node, track, kind, said(note), start_ns, after_ns, _about(note))
    if flight.notes:
        last = flight.notes[-1]
        start_ns, kind = last.t_ns + flight.offset_ns, _ENDS.get(last.event, "last")
        if end_ns is None:
            yield Instant(node, track, "last", f"last note: {said(last)}", start_ns, _about(last))
        else:
            more = {**_about(last), **about}
            yield Span(node, track, kind, said(last), start_ns, max(start_ns, end_ns), more, open)


def _relations(last: LastNote | None, lasts: Sequence[LastNote]) -> dict[str, Any]:
    """Who waits for whom, as far as it concerns this worker. None: another worker has its slot."""
    if last is None:
        return {}
    late = [one.who for one in lasts if one.awaited]
    of_others: dict[str, Any] = {"awaited": True} if last.awaited else {"waits_for": late} if late else {}
    return {"rank": last.rank, **of_others}


def _awaited(lasts: Iterable[LastNote], now_ns: int) -> Iterator[Span]:
    """Members for which the others wait, on a track of their own, so that nobody has to look for them."""
    for last in lasts:
        if last.awaited:
            about = {"generation": last.generation, "operation": last.operation, "rank": last.rank}
            start_ns = now_ns - int(last.since_s * 1e9)
            yield Span("", "awaited", "awaited", f"{last.who} {last.said}", start_ns, now_ns, about, open=True)


def _about(note: FlightNote) -> dict[str, Any]:
    return {"generation": note.generation, "operation": note.operation}
