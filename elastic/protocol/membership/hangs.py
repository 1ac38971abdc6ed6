"""Members that live, beat and get nowhere.

One for which others wait in the ring is given its time by what is usual in this job: shards that take long by nature
have a long limit, and so has whoever uses a processor, because it may compile. Between two operations a script may do
anything, on one worker too; there the limit is the long one. What is declared has none.

Where nobody gets on, of one member too, there is nobody to compare with: then the long limit counts for each, and so
many times more for whoever uses a processor. All are ended, and the job goes on from what is kept (restore.py), or
ends, if it has got no further since it began there. The same with members of which none answers when all are asked to
leave their ring, though their agents are there: frozen, or with the interpreter held in C.
"""

from __future__ import annotations

import math

from elastic.protocol.membership.events import Action, Note, Tell
from elastic.protocol.membership.group import Group, State, WorkerView
from elastic.protocol.membership.loss import lost
from elastic.protocol.membership.partitions import is_absence
from elastic.protocol.membership.transitions import become_closed
from elastic.protocol.messages import Doing, Kill

NAMED_S = 2.0
NAMED_USUAL = 3
"""Whoever is waited for that long, and so many times the usual, is named."""

USUAL = 10
"""A shard may take so many times the longest of late, whoever computed that."""

COMPUTES = 10
"""Where nobody gets on, and one uses a processor, it has so many times hang_s: nobody can tell whether it gets on."""

NAMED_ALONE = 0.5
"""Where nobody gets on, all are named after this part of their time."""


def holding_up(g: Group) -> dict[str, str]:
    """Members for which all others of the running ring wait unusually long -> since when and where, in words."""
    seen = _ring(g)
    busy = {w: one for w, one in seen.items() if one.doing is not Doing.WAITING}
    if len(busy) in (0, len(seen)):
        return {}
    named_s = max(NAMED_S, NAMED_USUAL * _usual_s(g))
    held_up = {worker: one for worker, one in busy.items() if one.for_s >= named_s}
    return {worker: f"{_where(one)}, others wait for it" for worker, one in held_up.items()}


def standing_still(g: Group, part: float = NAMED_ALONE) -> dict[str, str]:
    """All members of the running ring, if none of them has got on for this part of its time -> as of holding_up."""
    seen, usual_s = _ring(g), _usual_s(g)
    if any(one.for_s < part * _limit_alone_s(g, one, usual_s) for one in seen.values()):
        return {}
    return {worker: f"{_where(one)}, and nobody gets on" for worker, one in seen.items()}


def expel_if_stuck(g: Group, worker: str, now_s: float, do: list[Action]) -> None:
    """After its word. Whoever holds the others up beyond its limit is lost, though it lives: no report of it counts."""
    one = g.workers.get(worker)
    if one is None or one.for_s < g.spec.timing.progress_s:
        return  # nearly always, and without a look at all the others
    if one.for_s >= (limit_s := _limit_s(g, one)) and (how := holding_up(g).get(worker)) is not None:
        _expel(g, worker, how, limit_s, now_s, do)
    elif one.for_s >= _limit_alone_s(g, one, _usual_s(g)) and (still := standing_still(g, 1.0)):
        _end_all(g, still, now_s, do)


def end_mute(g: Group, now_s: float, do: list[Action]) -> None:
    """The time is over in which a member had to answer."""
    if now_s >= mute_until_s(g):
        _end_all(g, _mute(g), now_s, do)


def mute_until_s(g: Group) -> float:
    """When members are ended of which none answers; infinite while that may change by itself."""
    return math.inf if g.hung or not _mute(g) else g.quiesced_s + g.spec.timing.hang_s


def _mute(g: Group) -> dict[str, str]:
    """All members that may hold the state, if each of them has been given up although its agent is there -> why."""
    known = len(g.dead) + len(g.given_up) + len(g.reports)
    if g.state is not State.QUIESCING or not g.given_up or known < len(g.chain[-1].ids):
        return {}  # nearly always, and told without a look at everybody
    silent = sorted(g.listed - {*g.dead, *g.reports})
    for worker in silent:
        node = g.workers[worker].member.node
        given_up = g.given_up.get(worker)
        if node in g.silent_nodes or given_up is None or is_absence(given_up, node):
            return {}
    held = any(report.has_state or report.copied >= 0 for report in g.reports.values())
    return {} if held else {worker: g.given_up[worker] for worker in silent}


def _expel(g: Group, worker: str, how: str, limit_s: float, now_s: float, do: list[Action]) -> None:
    phase = g.workers[worker].phase
    first = g.stuck_at.setdefault(phase, worker)
    if first != worker:
        because = f"{first} and {worker} both got stuck in {phase}; their logs end with where their threads are"
        become_closed(g, 1, because, now_s, do)
        return
    do.append(Note("stuck", {"worker_id": worker, "because": how, "limit_s": round(limit_s, 1)}))
    g.stuck.add(worker)
    lost(g, worker, f"stuck: {how}", now_s, do, dead=False)


def _end_all(g: Group, still: dict[str, str], now_s: float, do: list[Action]) -> None:
    """None of these members gets on, and no other one holds the state. The order is given again if nothing follows:
    their agents may not have heard it."""
    if g.hung and now_s < g.hung_s + g.spec.timing.fence_grace_s:
        return
    if not g.hung:
        do += [Note("stuck", {"worker_id": worker, "because": how}) for worker, how in still.items()]
    g.hung = {worker: f"stuck: {how}" for worker, how in still.items()}
    g.hung_s = now_s
    do += [Tell((worker,), Kill(g.term, worker)) for worker in still]


def _where(one: WorkerView) -> str:
    return f"{one.for_s:.1f} s {'' if one.phase.startswith('after ') else 'in '}{one.phase}"


def _ring(g: Group) -> dict[str, WorkerView]:
    """The members of the running ring; nobody, unless it runs and all of them are in it."""
    seen = {w: g.workers[w] for w in (g.running.ids if g.running else ()) if w in g.workers}
    whole = g.state is State.RUNNING and all(one.entered for one in seen.values())
    return seen if whole else {}


def _limit_s(g: Group, one: WorkerView) -> float:
    timing = g.spec.timing
    if one.doing in (Doing.DECLARED, Doing.WAITING):
        return math.inf
    usual_s = _usual_s(g)
    may_wait = one.doing is Doing.SHARD and not one.computes and usual_s > 0
    return max(timing.progress_s if may_wait else timing.hang_s, USUAL * usual_s)


def _limit_alone_s(g: Group, one: WorkerView, usual_s: float) -> float:
    if one.doing in (Doing.DECLARED, Doing.WAITING):
        return math.inf
    return max(g.spec.timing.hang_s * (COMPUTES if one.computes else 1), USUAL * usual_s)


def _usual_s(g: Group) -> float:
    return max((seen.usual_s for seen in g.workers.values()), default=0.0)
