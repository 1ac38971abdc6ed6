"""`step` passes every event to the one function that handles it.

This module also handles what becomes of a ring: of the entered generation or of a pending one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from elastic.protocol import messages
from elastic.protocol.worker_state import events, generation_change
from elastic.protocol.worker_state.next_move import Exchange, next_move
from elastic.protocol.worker_state.operation import begin, done, fetch_failed, fetched, headers_held, obtained, used
from elastic.protocol.worker_state.pending import to_carry
from elastic.protocol.worker_state.state import Phase, WorkerState


def step(p: WorkerState, event: events.Event) -> events.Outcome:
    """Apply one event; events of older generations and of other phases are ignored, not errors."""
    if p.phase is Phase.GONE:
        return p, ()
    match event:
        case events.Begin():
            return begin(p, event)
        case events.Started(unit):
            return replace(p, running=unit, todo=tuple(u for u in p.todo if u != unit)), ()
        case events.Done():
            return done(p, event)
        case events.ReadHeader():
            # The header is sent now, or is not read at all: newcomers may copy only until it is read.
            numbers = tuple(generation.number for generation in to_carry(p))
            return (replace(p, carry=numbers) if isinstance(next_move(p), Exchange) else p), ()
        case events.Obtained(generation, carried):
            return obtained(p, generation, carried)
        case events.Fetched(op):
            return fetched(p, op)
        case events.FetchFailed(op):
            return fetch_failed(p, op)
        case events.RingBuilt() | events.RingFailed() | events.RingLost():
            return ring_changed(p, event)
        case events.LinksClosed():
            return generation_change.links_closed(p, event)
        case events.HeadersHeld(generation, op):
            return headers_held(p, generation, op)
        case events.Used(op):
            return used(p, op)
        case events.CopyBegun(newcomer):
            return replace(p, copying=_with(p.copying, newcomer), holders=_without(p.holders, newcomer)), ()
        case events.CopyEnded(newcomer, op, complete):
            held = complete and p.phase is Phase.COLLECTING and op == p.reduced
            holders = _with(p.holders, newcomer) if held else _without(p.holders, newcomer)
            return replace(p, copying=_without(p.copying, newcomer), holders=holders), ()
        case events.GraceOver():
            return replace(p, lingered=True), ()
        case events.Copied(op, at_step):
            refused = p.phase is not Phase.FRESH or p.quiesced
            return (p if refused else replace(p, copied=op, copied_step=at_step)), ()
        case events.Joined(generation, op):
            return generation_change.joined(p, generation, op)
        case events.Acknowledged():
            return (p, (events.Say(messages.Left(p.me, p.leaving)),)) if p.leaving else (p, ())
        case messages.Quiesce():
            return generation_change.quiesce(p, event)
        case messages.Publish(_, generation):
            if generation_change.overtaken(p, generation):
                return generation_change.give_way(p, generation)
            return (
                generation_change.planned(p, generation)
                if generation.kind is messages.Kind.PLANNED
                else generation_change.enter_loss(p, generation)
            )


def _with(names: tuple[str, ...], name: str) -> tuple[str, ...]:
    return tuple(sorted({*names, name}))


def _without(names: Iterable[str], name: str) -> tuple[str, ...]:
    return tuple(other for other in names if other != name)


def ring_changed(p: WorkerState, event: events.RingBuilt | events.RingFailed | events.RingLost) -> events.Outcome:
    match event:
        case events.RingBuilt(generation):
            if generation == p.entered and p.ring is messages.RingState.BUILDING and not p.quiesced:
                return replace(p, ring=messages.RingState.LIVE), (events.Say(messages.RingUp(p.me, generation)),)
            if any(g.number == generation for g in p.pending):
                return replace(p, built=(*p.built, generation)), (events.Say(messages.RingUp(p.me, generation)),)
        case events.RingFailed(generation, unreachable, because):
            failed = events.Say(messages.BuildFailedReport(p.me, generation, unreachable, because))
            if generation == p.entered and p.ring is messages.RingState.BUILDING:
                return replace(p, ring=messages.RingState.ABORTED), (failed,)
            if any(g.number == generation for g in p.pending):
                return p, (failed,)
        case events.RingLost(generation, because):
            if generation == p.entered and p.ring is not messages.RingState.ABORTED:
                return replace(p, ring=messages.RingState.ABORTED), (
                    events.Say(messages.RingBrokenReport(p.me, generation, because)),
                )
    return p, ()
