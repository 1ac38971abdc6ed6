"""Which pending generation a header carries, none before every newcomer of it holds the state, or, if nobody stays,
before the state is on its way to the disk; which took effect."""

from __future__ import annotations

from elastic.messages import Generation
from elastic.position.state import Phase, Position


def newcomers_in(pending: Generation, record: Generation) -> tuple[str, ...]:
    return tuple(worker for worker in pending.ids if worker not in record.ids)


def missing(p: Position) -> tuple[str, ...]:
    """Donor: newcomers of the newest pending generation without the complete state of this operation."""
    if not (p.donor and p.joinable and p.newest_pending and p.record):
        return ()
    return tuple(w for w in newcomers_in(p.newest_pending, p.record) if w not in p.holders)


def to_carry(p: Position) -> int:
    """The pending generation for this attempt's header, or 0: the newest, if its plan is held and its ring is up."""
    pending = p.newest_pending
    if pending is None or p.record is None:
        return 0
    if not pending.ids and not p.parts:
        return 0
    if newcomers_in(pending, p.record) and (not p.joinable or missing(p)):
        return 0
    if pending.member(p.me) is not None and pending.number not in p.built:
        return 0  # with its ring up before it takes effect, nobody waits for a build, and a failed one costs nothing
    return pending.number


def outcome(p: Position, op: int) -> int | None:
    """Which planned generation took effect after an operation, 0 if none did; None: not known here, or not yet."""
    if p.phase is Phase.FRESH or p.reduced <= op:
        return None
    after, number = p.effect
    return number if after == op else 0
