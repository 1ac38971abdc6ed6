"""Which pending generations a header carries, and which one took effect: the highest that is in all headers.

A generation is carried only once each of its newcomers holds the state, or, if nobody stays, once the state is on its
way to the disk. A member carries at most two: the newest, and one without newcomers that keeps exactly the members
which the newest keeps, so that draining members leave while a newcomer still copies. A leader may not know yet that a
newcomer has come in: an early record that it wrote for the old members then leaves out more than the newest does, and
is void. An early record for a drain that was taken back is void too.
"""

from __future__ import annotations

from collections.abc import Collection

from elastic.protocol.messages import Generation
from elastic.protocol.worker_state.state import Phase, WorkerState


def newcomers_in(pending: Generation, record: Generation) -> tuple[str, ...]:
    return tuple(worker for worker in pending.ids if worker not in record.ids)


def missing(p: WorkerState) -> tuple[str, ...]:
    """For the donor: newcomers of the newest pending generation that lack the complete state of this operation."""
    if not (p.donor and p.joinable and p.newest_pending and p.record):
        return ()
    return tuple(w for w in newcomers_in(p.newest_pending, p.record) if w not in p.holders)


def to_carry(p: WorkerState) -> tuple[Generation, ...]:
    """The pending generations for this attempt's header: their newcomers hold the state, and their rings are up."""
    newest, record = p.newest_pending, p.record
    if newest is None or record is None:
        return ()
    joins = bool(newcomers_in(newest, record))
    may = p.parts if not newest.ids else not joins or (p.joinable and not missing(p))
    carried = (newest,) if may and _is_up(p, newest) else ()
    kept = tuple(worker for worker in record.ids if worker in newest.ids)
    if not joins or kept in ((), record.ids):
        return carried
    leaving = [g for g in p.pending if g.ids == kept and _is_up(p, g)]
    return (*carried, *leaving[-1:])


def _is_up(p: WorkerState, pending: Generation) -> bool:
    """Whether the pending ring is up, or has no place for this worker. A ring that is up before it takes effect makes
    nobody wait, and a failed build costs nothing."""
    return pending.member(p.me) is None or pending.number in p.built


def taking_effect(p: WorkerState, carried: Collection[Collection[int]]) -> Generation | None:
    """The newest pending generation that all headers carried, or None."""
    common = [g for g in p.pending if all(g.number in numbers for numbers in carried)]
    return max(common, key=lambda generation: generation.number, default=None)


def outcome(p: WorkerState, op: int) -> int | None:
    """Which planned generation took effect after an operation; 0: none; None: not known here, or not yet."""
    if p.phase is Phase.FRESH or p.reduced <= op:
        return None
    after, number = p.effect
    return number if after == op else 0
