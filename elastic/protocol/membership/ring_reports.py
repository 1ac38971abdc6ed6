"""What members say of their rings: up, broken, impossible to build, or with a member that has other values."""

from __future__ import annotations

from dataclasses import replace

from elastic.errors import ExitCode
from elastic.protocol.failures import SUSPECTS, SUSPECTS_WITHIN
from elastic.protocol.membership.closing import close_rest
from elastic.protocol.membership.events import Action, Note
from elastic.protocol.membership.group import Group, State
from elastic.protocol.membership.loss import lost
from elastic.protocol.membership.newcomers import keep_waiting
from elastic.protocol.membership.planned_changes import commit_planned, plan_change, settle
from elastic.protocol.membership.roster import slot_of
from elastic.protocol.membership.transitions import become_closed, become_quiescing
from elastic.protocol.membership.verdicts import exclude
from elastic.protocol.messages import (
    BuildFailedReport,
    Corrupted,
    Generation,
    Progress,
    RingBrokenReport,
    RingState,
    RingUp,
)


def heard_of_ring(
    g: Group, word: RingUp | RingBrokenReport | BuildFailedReport | Corrupted, now_s: float, do: list[Action]
) -> None:
    seen = g.workers.get(word.worker_id)
    record = next((r for r in g.chain if r.number == word.generation), None)
    if seen is None or record is None:
        return
    match word:
        case RingUp():
            if record is g.base or seen.entered == record.number:
                g.workers[word.worker_id] = seen._replace(ring=RingState.LIVE)
            end_rebuilding(g, now_s, do)
        case Corrupted():
            _corrupted(g, word, now_s, do)
        case RingBrokenReport(_, number, because):
            g.workers[word.worker_id] = seen._replace(ring=RingState.ABORTED)
            if g.state is State.CLOSING:
                close_rest(g, now_s, do)
            elif g.state in (State.RUNNING, State.PAUSED, State.REBUILDING):
                become_quiescing(g, f"{word.worker_id} says ring {number} is broken: {because}", now_s, do)
        case BuildFailedReport(_, number, unreachable, because):
            together = g.state in (State.RUNNING, State.PAUSED, State.REBUILDING)
            if record is g.base or record is g.running or seen.entered == number:
                # Also while QUIESCING: a peer's word that this ring is closed may have come first.
                g.accused[word.worker_id] = unreachable
                members = frozenset(record.ids)
                g.failed_builds[members] = g.failed_builds.get(members, frozenset()) | {number}
                named = ", ".join(unreachable) or "the others by what carries the gradients"
                failed = f"reach {named} in generation {number}"
                if because:
                    failed = f"build the ring of generation {number}: {because}"
                if together:
                    become_quiescing(g, f"{word.worker_id} cannot {failed}", now_s, do)
            elif together and (record is g.aim or record.early):
                _turn_away(g, record, {word.worker_id, *unreachable}, now_s, do)


def _corrupted(g: Group, word: Corrupted, now_s: float, do: list[Action]) -> None:
    """Give up a member whose values differ from those of the others: its sums do not count, and its node is left if
    there are others. All members say the same; the first word counts."""
    worker = word.suspect
    if g.state is State.CLOSED or not g.lists(worker) or worker in g.dead or worker in g.stuck:
        return
    done, before, node = g.failures.furthest, g.failures.suspects, g.workers[worker].member.node
    g.failures = replace(g.failures, suspects=(*before, done)[-SUSPECTS:])
    do.append(Note("corrupted", {"worker_id": worker, "node": node, "because": word.because}))
    if len(before) >= SUSPECTS - 1 and done - before[1 - SUSPECTS] < SUSPECTS_WITHIN:
        because = f"{SUSPECTS} members in a row had other values than the others, last {worker}: {word.because}"
        advice = "so many machines are hardly broken; see whether the script computes the same on all of them"
        become_closed(g, int(ExitCode.DISAGREE), f"{because}; {advice}", now_s, do)
        return
    g.stuck.add(worker)
    lost(g, worker, f"corrupted: {word.because}", now_s, do, dead=False)
    if any(g.workers[other].member.node != node for other in g.alive(g.listed)):
        exclude(g, node, f"{worker} had other values than the other members: {word.because}", now_s, do)


def _turn_away(g: Group, record: Generation, involved: set[str], now_s: float, do: list[Action]) -> None:
    """Plan without the named newcomers, and with them again after a while, because a pending ring could not be built.

    If only members are named, the same list is tried again; their present ring works.
    """
    assert g.running is not None
    unsettled = set(record.ids) - set(g.running.ids)
    turned_away = sorted(unsettled & involved or unsettled)
    for worker in turned_away:
        keep_waiting(g, worker, record.number, now_s, do)
    if turned_away:
        plan_change(g, now_s, do)
    elif g.committing is None:
        commit_planned(g, record.members, f"{record.because}, once more", do, early=record.early)


def end_rebuilding(g: Group, now_s: float, do: list[Action]) -> None:
    """Settle once every member of the loss generation has its ring up."""
    base = g.base
    if g.state is not State.REBUILDING or base is None:
        return
    # Each word goes on from the rank where the last one stopped, so that all words together look at each member once.
    # An announcement may have taken a ring back, hence the look at all members at the end.
    g.up = next((rank for rank in range(g.up, len(base.ids)) if not _is_up(g, base, rank)), 0)
    if g.up == 0 and all(_is_up(g, base, rank) for rank in range(len(base.ids))):
        _settled(g, base, now_s, do)


def rebuilt(g: Group, word: Progress, now_s: float, do: list[Action]) -> None:
    """Settle if a member has completed an operation in the ring of the loss generation: all others took part in it, so
    their rings are up. An agent of a large job leaves out RingUp for that."""
    base = g.base
    if g.state is not State.REBUILDING or base is None or base.member(word.worker_id) is None:
        return
    if word.generation >= base.number and word.reduced > base.plan.op:
        _settled(g, base, now_s, do)


def _settled(g: Group, base: Generation, now_s: float, do: list[Action]) -> None:
    do.append(Note("running", {"generation": base.number}))
    g.accused, g.failed_builds = {}, {}
    for slot in map(slot_of, base.ids if g.unreached else ()):
        g.unreached.pop(slot, None)
    settle(g, base.because, now_s, do)
    plan_change(g, now_s, do)


def _is_up(g: Group, base: Generation, rank: int) -> bool:
    seen = g.workers[base.ids[rank]]
    return seen.ring is RingState.LIVE and seen.entered >= base.number
