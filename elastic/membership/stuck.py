"""A member that lives, beats and gets nowhere, while others wait for it in the ring.

Nothing is said of a job in which everybody computes, or everybody waits. Who holds the others up is given its time by
what is usual in this job: shards that take long by nature have a long limit, and so has whoever uses a processor,
because it may compile. Between two operations a script may do anything, on one worker too; there the limit is the long
one. What is declared has none.
"""

from __future__ import annotations

import math

from elastic.membership.actions import Action, Note
from elastic.membership.group import Group, Seen, State
from elastic.membership.losses import lost
from elastic.membership.transitions import become_closed
from elastic.messages import Doing

NAMED_S = 2.0
NAMED_USUAL = 3
"""Whoever is waited for that long, and so many times the usual, is named."""

USUAL = 10
"""A shard may take so many times the longest of late, whoever computed that."""


def holding_up(g: Group) -> dict[str, str]:
    """Members for which all others of the running ring wait unusually long -> since when and where, in words."""
    seen = {w: g.workers[w] for w in (g.running.ids if g.running else ()) if w in g.workers}
    busy = {w: one for w, one in seen.items() if one.doing is not Doing.WAITING}
    if g.state is not State.RUNNING or len(busy) in (0, len(seen)) or not all(one.entered for one in seen.values()):
        return {}
    named_s = max(NAMED_S, NAMED_USUAL * _usual_s(g))
    held_up = {worker: one for worker, one in busy.items() if one.for_s >= named_s}
    return {worker: f"{one.for_s:.1f} s in {one.phase}, others wait for it" for worker, one in held_up.items()}


def expel_if_stuck(g: Group, worker: str, now_s: float, do: list[Action]) -> None:
    """After its word. Whoever holds the others up beyond its limit is lost, though it lives: no report of it counts."""
    one = g.workers.get(worker)
    if one is None or one.for_s < g.spec.timing.progress_s or one.for_s < (limit_s := _limit_s(g, one)):
        return  # nearly always, and without a look at all the others
    if (how := holding_up(g).get(worker)) is None:
        return
    first = g.stuck_at.setdefault(one.phase, worker)
    if first != worker:
        because = f"{first} and {worker} both got stuck in {one.phase}; their logs end with where their threads are"
        become_closed(g, 1, because, now_s, do)
        return
    do.append(Note("stuck", {"worker_id": worker, "because": how, "limit_s": round(limit_s, 1)}))
    g.stuck.add(worker)
    lost(g, worker, f"stuck: {how}", now_s, do, dead=False)


def _limit_s(g: Group, one: Seen) -> float:
    timing = g.spec.timing
    if one.doing in (Doing.DECLARED, Doing.WAITING):
        return math.inf
    usual_s = _usual_s(g)
    may_wait = one.doing is Doing.SHARD and not one.computes and usual_s > 0
    return max(timing.progress_s if may_wait else timing.hang_s, USUAL * usual_s)


def _usual_s(g: Group) -> float:
    return max(seen.usual_s for seen in g.workers.values())
