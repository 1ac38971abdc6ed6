"""`step` passes every event to the one function that handles it.

This module also handles what becomes of a ring: of the entered generation or of a pending one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from elastic.protocol.messages import (
    BuildFailedReport,
    Kind,
    Left,
    Publish,
    Quiesce,
    RingBrokenReport,
    RingState,
    RingUp,
)
from elastic.protocol.worker_state.events import (
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
    LinksClosed,
    Obtained,
    Outcome,
    ReadHeader,
    RingBuilt,
    RingFailed,
    RingLost,
    Say,
    Started,
    Used,
)
from elastic.protocol.worker_state.generation_change import (
    enter_loss,
    give_way,
    joined,
    links_closed,
    overtaken,
    planned,
    quiesce,
)
from elastic.protocol.worker_state.next_move import Exchange, next_move
from elastic.protocol.worker_state.operation import begin, done, fetch_failed, fetched, headers_held, obtained, used
from elastic.protocol.worker_state.pending import to_carry
from elastic.protocol.worker_state.state import Phase, WorkerState


def step(p: WorkerState, event: Event) -> Outcome:
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
            # The header is sent now, or is not read at all: newcomers may copy only until it is read.
            numbers = tuple(generation.number for generation in to_carry(p))
            return (replace(p, carry=numbers) if isinstance(next_move(p), Exchange) else p), ()
        case Obtained(generation, carried):
            return obtained(p, generation, carried)
        case Fetched(op):
            return fetched(p, op)
        case FetchFailed(op):
            return fetch_failed(p, op)
        case RingBuilt() | RingFailed() | RingLost():
            return ring_changed(p, event)
        case LinksClosed():
            return links_closed(p, event)
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


def ring_changed(p: WorkerState, event: RingBuilt | RingFailed | RingLost) -> Outcome:
    match event:
        case RingBuilt(generation):
            if generation == p.entered and p.ring is RingState.BUILDING and not p.quiesced:
                return replace(p, ring=RingState.LIVE), (Say(RingUp(p.me, generation)),)
            if any(g.number == generation for g in p.pending):
                return replace(p, built=(*p.built, generation)), (Say(RingUp(p.me, generation)),)
        case RingFailed(generation, unreachable):
            failed = Say(BuildFailedReport(p.me, generation, unreachable))
            if generation == p.entered and p.ring is RingState.BUILDING:
                return replace(p, ring=RingState.ABORTED), (failed,)
            if any(g.number == generation for g in p.pending):
                return p, (failed,)
        case RingLost(generation, because):
            if generation == p.entered and p.ring is not RingState.ABORTED:
                return replace(p, ring=RingState.ABORTED), (Say(RingBrokenReport(p.me, generation, because)),)
    return p, ()
