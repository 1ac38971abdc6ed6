"""An operation, from its beginning to its result."""

from __future__ import annotations

from dataclasses import replace

from elastic.protocol.messages import Generation, Kind
from elastic.protocol.recovery_plan import default_units_of
from elastic.protocol.reduction_tree import leaves
from elastic.protocol.worker_state import events
from elastic.protocol.worker_state.generation_change import enter_planned
from elastic.protocol.worker_state.pending import newcomers_in, taking_effect
from elastic.protocol.worker_state.state import Phase, WorkerState


def begin(p: WorkerState, event: events.Begin) -> events.Outcome:
    if p.phase is not Phase.READY or p.record is None:
        raise AssertionError(f"{p.me} begins operation {p.reduced} while {p.phase}")
    p = replace(
        p,
        phase=Phase.COLLECTING,
        units=event.units,
        joinable=event.joinable,
        parts=event.parts,
        running=None,
        roots=(),
        todo=() if p.quiesced else _owned(p, p.record, event.units),
        carry=None,
        copying=(),
        holders=(),
        lingered=False,
    )
    return p, ()


def _owned(p: WorkerState, record: Generation, units: int) -> tuple[int, ...]:
    """The units of operation ``reduced`` for this worker: as a loss generation's plan says, else the default block."""
    if record.kind is Kind.LOSS and record.plan.op == p.reduced and record.plan.units:
        share = record.plan.share_of(p.me)
        assert share is not None
        return share.units
    return default_units_of(p.me, record, units)


def done(p: WorkerState, event: events.Done) -> events.Outcome:
    """Keep a computed unit, unless a plan has taken the unit, or a root that it was folded with, meanwhile."""
    if p.running != event.unit:
        return p, ()
    if not set(event.consumed) <= set(p.roots):
        return replace(p, running=None, todo=(event.unit, *p.todo)), ()
    roots = tuple(sorted({*p.roots} - {*event.consumed} | {event.root}))
    return replace(p, running=None, roots=roots), ()


def obtained(p: WorkerState, generation: int, carried: tuple[tuple[int, ...], ...]) -> events.Outcome:
    if p.quiesced or generation != p.entered or p.phase is not Phase.COLLECTING:
        return p, ()
    op = p.reduced
    p = _complete(p)
    chosen = taking_effect(p, carried)
    if chosen is None:
        return p, ()
    record = p.record
    assert record is not None
    p = replace(p, effect=(op, chosen.number), owed=op if newcomers_in(chosen, record) else p.owed)
    leavers = tuple(worker for worker in record.ids if worker not in chosen.ids)
    if chosen.member(p.me) is None:
        stayers = tuple(worker for worker in chosen.ids if worker in record.ids)
        return replace(p, leaving=chosen.number), (events.AwaitAcknowledgements(generation, op, stayers),)
    entered, retired = enter_planned(p, chosen)
    acknowledged = (events.Acknowledge(generation, op, leavers),) if leavers else ()
    return entered, (*acknowledged, events.RetireRing(generation, op + 1), *retired)


def _complete(p: WorkerState) -> WorkerState:
    return replace(
        p,
        phase=Phase.READY,
        kept=p.reduced,
        reduced=p.reduced + 1,
        units=0,
        joinable=False,
        todo=(),
        running=None,
        roots=(),
        carry=None,
        laggard=None,
        copying=(),
        holders=(),
        lingered=False,
    )


def fetched(p: WorkerState, op: int) -> events.Outcome:
    if p.laggard is None or op != p.reduced or p.quiesced:
        return p, ()
    return _complete(p), ()


def fetch_failed(p: WorkerState, op: int) -> events.Outcome:
    if not p.laggard or op != p.reduced or p.quiesced:
        return p, ()
    held = set(leaves(p.roots)) | ({p.running} if p.running is not None else set())
    return replace(p, laggard="", todo=tuple(unit for unit in range(p.units) if unit not in held)), ()


def used(p: WorkerState, op: int) -> events.Outcome:
    """Free the result early; a member behind then computes it alone. The result stays if it was reported, or if
    newcomers have just come in: they ask for it and cannot compute it."""
    if p.kept != op or p.owed == op or p.quiesced:
        return p, ()
    return replace(p, kept=-1), (events.FreeResult(op),)


def headers_held(p: WorkerState, generation: int, op: int) -> events.Outcome:
    """Free the result of op - 1: all members are in operation op, so all of them have it."""
    if generation != p.entered or op != p.reduced or p.quiesced:
        return p, ()
    actions: tuple[events.Action, ...] = (events.CloseRetired(op),)
    if p.kept == op - 1 and p.kept >= 0:
        return replace(p, kept=-1), (*actions, events.FreeResult(op - 1))
    return p, actions
