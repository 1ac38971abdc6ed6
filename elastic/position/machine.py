"""`step`: every event to the one function that knows what it means."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from elastic.messages import Kind, Left, Publish, Quiesce
from elastic.position.actions import Outcome, Say
from elastic.position.events import (
    Acknowledged,
    Begin,
    Copied,
    CopyBegun,
    CopyEnded,
    Done,
    Event,
    Fetched,
    FetchFailed,
    GraceOver,
    HeadersHeld,
    Joined,
    Obtained,
    ReadHeader,
    RingBuilt,
    RingFailed,
    RingLost,
    Started,
    Used,
)
from elastic.position.generations import enter_loss, give_way, joined, overtaken, planned, quiesce
from elastic.position.joins import to_carry
from elastic.position.moves import Exchange, move
from elastic.position.operations import begin, done, fetch_failed, fetched, headers_held, obtained, used
from elastic.position.rings import ring_changed
from elastic.position.state import Phase, Position


def step(p: Position, event: Event) -> Outcome:
    """Apply one event; events of older generations and of other phases are ignored, not errors."""
    if p.phase is Phase.GONE:
        return p, ()
    match event:
        case Begin():
            return begin(p, event)
        case Started(unit):
            return replace(p, running=unit, todo=tuple(u for u in p.todo if u != unit)), ()
        case Done():
            return done(p, event)
        case ReadHeader():
            # It leaves now, or is not read: newcomers may copy only as long as it is not.
            numbers = tuple(generation.number for generation in to_carry(p))
            return (replace(p, carry=numbers) if isinstance(move(p), Exchange) else p), ()
        case Obtained(generation, carried):
            return obtained(p, generation, carried)
        case Fetched(op):
            return fetched(p, op)
        case FetchFailed(op):
            return fetch_failed(p, op)
        case RingBuilt() | RingFailed() | RingLost():
            return ring_changed(p, event)
        case HeadersHeld(generation, op):
            return headers_held(p, generation, op)
        case Used(op):
            return used(p, op)
        case CopyBegun(newcomer):
            return replace(p, copying=_with(p.copying, newcomer), holders=_without(p.holders, newcomer)), ()
        case CopyEnded(newcomer, op, complete):
            held = complete and p.phase is Phase.COLLECTING and op == p.reduced
            holders = _with(p.holders, newcomer) if held else _without(p.holders, newcomer)
            return replace(p, copying=_without(p.copying, newcomer), holders=holders), ()
        case GraceOver():
            return replace(p, lingered=True), ()
        case Copied(op, at_step):
            refused = p.phase is not Phase.FRESH or p.quiesced
            return (p if refused else replace(p, copied=op, copied_step=at_step)), ()
        case Joined(generation, op):
            return joined(p, generation, op)
        case Acknowledged():
            return (p, (Say(Left(p.me, p.leaving)),)) if p.leaving else (p, ())
        case Quiesce():
            return quiesce(p, event)
        case Publish(_, generation):
            if overtaken(p, generation):
                return give_way(p, generation)
            return planned(p, generation) if generation.kind is Kind.PLANNED else enter_loss(p, generation)


def _with(names: tuple[str, ...], name: str) -> tuple[str, ...]:
    return tuple(sorted({*names, name}))


def _without(names: Iterable[str], name: str) -> tuple[str, ...]:
    return tuple(other for other in names if other != name)
