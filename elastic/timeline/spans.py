"""Spans and instants of a job, from its journals and from the flights of its workers.

Pure. Times are nanoseconds since 1970, so that those of several machines can stand beside each other, as far as their
clocks agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from elastic.protocol.worker_id import node_of
from elastic.records.flight_recorder import Flight, FlightEvent, FlightNote
from elastic.records.journal import PHASES, Line, recoveries
from elastic.records.last_notes import said
from elastic.records.story import HIDDEN, SENTENCES, Known

JOB = "job"
"""The track of what concerns all workers."""
_INSTANTS = frozenset(
    {
        *("fault_injected", "member_lost", "worker_frozen", "worker_thawed", "expelled", "stuck", "straggler"),
        *("notice", "node_leaves", "drain_asked", "drained", "joined", "state_restored", "script_failed", "job_ended"),
        *("leading", "deposed", "worker_started", "worker_exited", "slot_given_up", "scaled", "stop_asked"),
    }
)
_WRITTEN = frozenset({"checkpoint_part_written", "snapshot_part_written"})
_COPY_ENDS = frozenset({"state_copied", "copy_failed", "worker_exited"})


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time. track: JOB, or a worker. node: of the worker; "" of the job's. kind: for colours and
    filters."""

    node: str
    track: str
    kind: str
    name: str
    start_ns: int
    end_ns: int
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Instant:
    """Something that happened. As Span."""

    node: str
    track: str
    kind: str
    name: str
    at_ns: int
    about: dict[str, Any] = field(default_factory=dict)


def of_job(lines: Sequence[Line], flights: Iterable[Flight]) -> list[Span | Instant]:
    """By time. lines: of all journals, by time."""
    found: list[Span | Instant] = [*_generations(lines), *_recoveries(lines), *_copies(lines), *_written(lines)]
    found += _instants(lines)
    for flight in flights:
        found += of_flight(flight)
    return sorted(found, key=lambda it: it.start_ns if isinstance(it, Span) else it.at_ns)


# Journals


def _at(line: Line) -> int:
    return int(line["t_wall"] * 1e9)


def _track(worker_id: str) -> tuple[str, str]:
    return (node_of(worker_id), worker_id) if worker_id else ("", JOB)


def _generations(lines: Sequence[Line]) -> Iterator[Span]:
    """From the moment at which the first member enters a generation until one enters a later one, or the job ends."""
    begun: Line | None = None
    for line in lines:
        later = line["event"] == "entered" and (begun is None or line["generation"] > begun["generation"])
        if begun is not None and (later or line["event"] == "job_ended"):
            yield _generation(begun, line)
            begun = None
        if later:
            begun = line
    if begun is not None:
        yield _generation(begun, lines[-1])


def _generation(begun: Line, end: Line) -> Span:
    members = list(begun.get("members", ()))
    name = f"generation {begun['generation']}, {len(members)} workers"
    return Span("", JOB, "generation", name, _at(begun), _at(end), {"members": members})


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


def _copies(lines: Iterable[Line]) -> Iterator[Span]:
    """A newcomer's way from its invitation to the state."""
    invited: dict[str, Line] = {}
    for line in lines:
        worker = line["worker_id"]
        if line["event"] == "invited":
            invited.setdefault(worker, line)
        elif line["event"] in _COPY_ENDS and worker in invited:
            how = {"event": line["event"], "because": line.get("because", "")}
            yield Span(*_track(worker), "copy", "copies the state", _at(invited.pop(worker)), _at(line), how)


def _written(lines: Iterable[Line]) -> Iterator[Span]:
    for line in lines:
        if line["event"] in _WRITTEN:
            what = str(line["event"]).partition("_")[0]
            start_ns = _at(line) - int(float(line.get("seconds", 0)) * 1e9)
            about: dict[str, Any] = {key: line[key] for key in ("entry", "bytes", "stall_ms") if key in line}
            yield Span(*_track(line["worker_id"]), what, f"writes its part of a {what}", start_ns, _at(line), about)


def _instants(lines: Iterable[Line]) -> Iterator[Instant]:
    for line in lines:
        event = str(line["event"])
        if event in _INSTANTS and event not in HIDDEN:
            name = SENTENCES.get(event, event.replace("_", " ")).format_map(Known(line))
            about = {"because": line["because"]} if line.get("because") else {}
            yield Instant(*_track(line["worker_id"]), event, name, _at(line), about)


# Flights

_ENDS = {
    FlightEvent.COMPUTES: "computes",
    FlightEvent.WAITS: "waits",
    FlightEvent.GATHERED: "exchange",
    FlightEvent.DONE: "script",
    FlightEvent.DECLARED: "script",
}
"""Moments that begin a span which the next note ends -> its kind."""


def of_flight(flight: Flight) -> Iterator[Span | Instant]:
    """What a worker did, from note to note. What its last note has begun has no end, and is an instant."""
    node, track = _track(flight.worker_id)
    for note, after in pairwise(flight.notes):
        if note.event is FlightEvent.BROKEN:
            yield Instant(node, track, "broken", note.text, note.t_ns + flight.offset_ns, _about(note))
        elif (kind := _ENDS.get(note.event)) is not None:
            start_ns, end_ns = note.t_ns + flight.offset_ns, after.t_ns + flight.offset_ns
            yield Span(node, track, kind, said(note), start_ns, end_ns, _about(note))
    if flight.notes:
        last = flight.notes[-1]
        yield Instant(node, track, "last", f"last note: {said(last)}", last.t_ns + flight.offset_ns, _about(last))


def _about(note: FlightNote) -> dict[str, Any]:
    return {"generation": note.generation, "operation": note.operation}
