"""From one generation to the next: after a quiesce, a planned change, a loss or a join."""

from __future__ import annotations

from dataclasses import replace

from elastic.protocol.messages import Generation, Kind, Quiesce, Report, RingState
from elastic.protocol.recovery_plan import default_units_of
from elastic.protocol.reduction_tree import leaves
from elastic.protocol.worker_state import events
from elastic.protocol.worker_state.state import Phase, WorkerState


def quiesce(p: WorkerState, order: Quiesce) -> events.Outcome:
    if order.up_to < p.entered:
        return p, ()  # this leader did not know of the generation entered; to obey would break a live ring
    p = replace(
        p,
        quiesced=True,
        promise=max(p.promise, order.up_to),
        ring=RingState.ABORTED if p.entered else p.ring,
        pending=(),
        built=(),
        carry=None,
        holders=(),
        copying=(),
        leaving=0,
    )
    report = _report(p, order.round)
    return replace(p, report=report), (events.AbortRings(), events.Say(report))


def links_closed(p: WorkerState, event: events.LinksClosed) -> events.Outcome:
    """Note closed links. After the ring was left, the report is sent again with them."""
    if event.generation != p.entered or set(event.peers) <= set(p.closed):
        return p, ()
    report = replace(p.report, closed=event.peers) if p.quiesced and p.report is not None else None
    return replace(p, closed=event.peers, report=report), (events.Say(report),) if report is not None else ()


def _report(p: WorkerState, round: int) -> Report:
    return Report(
        worker_id=p.me,
        round=round,
        promise=p.promise,
        entered=p.entered,
        has_state=p.entered > 0,
        reduced=p.reduced,
        units=p.units,
        roots=p.roots,
        running=p.running,
        kept=p.kept,
        copied=p.copied,
        copied_step=p.copied_step if p.copied >= 0 else -1,
        began=p.record.began if p.record is not None else "",
        closed=p.closed,
    )


def planned(p: WorkerState, generation: Generation) -> events.Outcome:
    if generation.number <= max(p.promise, p.entered) or any(g.number == generation.number for g in p.pending):
        return p, ()
    if p.record is None or generation.base < p.record.base or (p.quiesced and p.phase is not Phase.FRESH):
        return p, ()
    p = replace(p, pending=(*p.pending, generation), quiesced=False)
    return p, (events.BuildRing(generation),) if generation.member(p.me) else ()


def enter_planned(p: WorkerState, generation: Generation) -> events.Outcome:
    """Enter a planned generation. The rings of pending generations that it replaces are retired unused."""
    replaced = [g.number for g in p.pending if g.number < generation.number and g.member(p.me)]
    entered = replace(
        p,
        record=generation,
        entered=generation.number,
        ring=RingState.LIVE if generation.number in p.built else RingState.BUILDING,
        pending=tuple(g for g in p.pending if g.number > generation.number),
        built=tuple(number for number in p.built if number > generation.number),
        closed=(),
    )
    return entered, tuple(events.RetireRing(number, p.reduced) for number in replaced)


def joined(p: WorkerState, number: int, op: int) -> events.Outcome:
    chosen = next((g for g in p.pending if g.number == number), None)
    if p.phase is not Phase.FRESH or chosen is None or number <= p.promise or chosen.member(p.me) is None:
        return p, ()
    p = replace(p, phase=Phase.READY, reduced=op + 1, joined_at=op + 1, kept=op, effect=(op, number), copied=-1)
    return enter_planned(p, chosen)


def enter_loss(p: WorkerState, generation: Generation) -> events.Outcome:
    """Take part in a form or loss generation, or learn that it does not list this worker."""
    if generation.number <= max(p.promise, p.entered) or (p.record and generation.number <= p.record.number):
        return p, ()
    if generation.member(p.me) is None:
        # A form generation counts operations from 0 again, so what was copied before it is worthless.
        if p.entered or (generation.kind is Kind.FORM and p.record is not None):
            because = f"generation {generation.number} exists without this worker: {generation.because}"
            return replace(p, phase=Phase.GONE, because=because), (events.AbortRings(), events.Leave(because))
        return replace(p, record=generation, pending=(), built=(), quiesced=False), (events.AbortRings(),)
    p = replace(
        p,
        record=generation,
        entered=generation.number,
        ring=RingState.BUILDING,
        pending=(),
        built=(),
        quiesced=False,
        carry=None,
        holders=(),
        copying=(),
        lingered=False,
        laggard=None,
        leaving=0,
        closed=(),
    )
    if p.phase is Phase.FRESH:
        reduced = max(p.copied, 0)
        joined_at = -1 if generation.kind is Kind.FORM else reduced
        p = replace(p, phase=Phase.READY, reduced=reduced, joined_at=joined_at, copied=-1)
    plan = generation.plan
    if generation.kind is Kind.LOSS and p.phase is Phase.COLLECTING:
        if p.reduced == plan.op:
            p = _take_share(p, generation)
        elif p.reduced == plan.op - 1:
            p = _fall_behind(p, plan.source_of(p.me) or "")
        else:
            raise AssertionError(f"{p.me} is in operation {p.reduced}, the plan redoes {plan.op}")
    return p, (events.DropRoots(p.roots), events.BuildRing(generation))


def overtaken(p: WorkerState, generation: Generation) -> bool:
    """Whether the job has gone on from what was kept, without a word to this worker, so that its state is worthless. A
    worker without state can still begin with a loss generation that lists it."""
    if p.record is None or generation.kind is Kind.FORM or generation.number <= p.record.number:
        return False
    founds = generation.kind is Kind.LOSS and generation.member(p.me) is not None and not p.entered and p.copied < 0
    return generation.began != p.record.began and not founds


def give_way(p: WorkerState, generation: Generation) -> events.Outcome:
    because = f"generation {generation.number} is of a job that went on from {generation.began} without this worker"
    return replace(p, phase=Phase.GONE, because=because), (events.AbortRings(), events.Leave(because))


def _take_share(p: WorkerState, generation: Generation) -> WorkerState:
    """Keep what the plan leaves to this worker, also if a reported running unit has been folded since."""
    share = generation.plan.share_of(p.me)
    if share is None:  # the operation began after all reports, so default ownership holds
        return replace(p, roots=(), running=None, todo=default_units_of(p.me, generation, p.units))
    mine = {*leaves(share.keep), *share.units}
    roots = tuple(root for root in p.roots if mine.issuperset(range(*root)))
    running = p.running if p.running in share.units else None
    held = {*leaves(roots), *([running] if running is not None else [])}
    return replace(p, roots=roots, running=running, todo=tuple(unit for unit in sorted(mine) if unit not in held))


def _fall_behind(p: WorkerState, source: str) -> WorkerState:
    if source:
        return replace(p, laggard=source, roots=(), running=None, todo=())
    held = {*leaves(p.roots), *([p.running] if p.running is not None else [])}
    return replace(p, laggard="", todo=tuple(unit for unit in range(p.units) if unit not in held))
