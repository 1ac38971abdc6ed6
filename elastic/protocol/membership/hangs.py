"""Members that live and beat but make no progress, and those that are late in a round with a quorum.

The limit for a member for which others wait follows from what is usual in this job: long shards have a long limit, and
so has a member that uses a processor, because it may compile: COMPUTES times hang_s in the first shard of all. Between
two operations a script may do anything, also on one worker only; there the limit is hang_s. A part of an evaluation has
a limit by the parts before it. A declared task (`Doing.DECLARED`) has none.

If no member makes progress, there is nobody to compare with: then hang_s is the limit for each, times COMPUTES for a
member that uses a processor. All members are ended, and the job goes on from what is kept (restore.py), or ends, if it
has got no further since it began there. The same holds if no member answers a quiesce although their agents attend: the
members are frozen, or C code holds the interpreter.
"""

from __future__ import annotations

import math

from elastic.protocol import outer_round
from elastic.protocol.membership.events import Action, Note, Tell
from elastic.protocol.membership.group import Group, State
from elastic.protocol.membership.loss import lost
from elastic.protocol.membership.partitions import is_absence
from elastic.protocol.membership.roster import WorkerView
from elastic.protocol.membership.transitions import become_closed
from elastic.protocol.messages import Doing, EndRound, Kill, Progress

NAMED_S = 2.0
NAMED_USUAL = 3
"""A member that all others wait for is named after NAMED_S seconds, or NAMED_USUAL of the longest recent shards."""

USUAL = 10
"""A shard may take this many times the longest recent shard of any worker."""

COMPUTES = 10
"""If no member makes progress, a member that uses a processor, and may make some, has this many times hang_s."""

NAMED_ALONE = 0.5
"""If no member makes progress, all are named after this part of their limit."""


def holding_up(g: Group) -> dict[str, str]:
    """Members for which all others of the running ring wait unusually long -> for how long and where, in words."""
    seen = _ring(g)
    busy = {w: one for w, one in seen.items() if one.said.doing is not Doing.WAITING}
    if len(busy) in (0, len(seen)):
        return {}
    named_s = max(NAMED_S, NAMED_USUAL * _usual_s(g))
    held_up = {worker: one for worker, one in busy.items() if one.for_s >= named_s}
    return {worker: f"{_where(one)}, others wait for it" for worker, one in held_up.items()}


def standing_still(g: Group, part: float = NAMED_ALONE) -> dict[str, str]:
    """All members of the running ring, if none has made progress for this part of its limit -> as in holding_up."""
    seen, usual_s = _ring(g), _usual_s(g)
    if any(one.for_s < part * _limit_alone_s(g, one, usual_s) for one in seen.values()):
        return {}
    return {worker: f"{_where(one)}, and nobody gets on" for worker, one in seen.items()}


def judge_progress(g: Group, word: Progress, now_s: float, do: list[Action]) -> None:
    """After a member's word: it may be stuck, or late in a round with a quorum."""
    _expel_if_stuck(g, word.worker_id, now_s, do)
    if word.min_replicas and word.doing is Doing.SHARD:
        _end_round_if_late(g, word, do)


def _end_round_if_late(g: Group, word: Progress, do: list[Action]) -> None:
    """If the others have a quorum of the round in which this member still computes, it is told to stop. That is said
    with each of its beats in which it has not stopped: a stream may have lost the order, or a leader."""
    place = Doing.WAITING, word.generation, word.reduced
    seen = (one for worker, one in g.workers.items() if worker not in g.dead)
    waiting = (one for one in seen if (one.said.doing, one.said.generation, one.said.reduced) == place)
    delivered = ((one.said.replicas, one.for_s) for one in waiting)
    if outer_round.is_over(word.min_replicas, word.grace_ms / 1000, delivered):
        do.append(Tell((word.worker_id,), EndRound(g.term, word.worker_id, word.generation, word.reduced)))


def _expel_if_stuck(g: Group, worker: str, now_s: float, do: list[Action]) -> None:
    """After a member's word: if it holds the others up beyond its limit, it is lost, and its reports do not count."""
    one = g.workers.get(worker)
    if one is None or one.for_s < g.spec.timing.progress_s:
        return  # nearly always, and without a look at all the others
    if one.for_s >= (limit_s := _limit_s(g, one)) and (how := holding_up(g).get(worker)) is not None:
        _expel(g, worker, how, limit_s, now_s, do)
    elif one.for_s >= _limit_alone_s(g, one, _usual_s(g)) and (still := standing_still(g, 1.0)):
        _end_all(g, still, now_s, do)


def end_mute(g: Group, now_s: float, do: list[Action]) -> None:
    """End all members if their time to answer a quiesce is over."""
    if now_s >= mute_until_s(g):
        _end_all(g, _mute(g), now_s, do)


def mute_until_s(g: Group) -> float:
    """When members that do not answer a quiesce are ended, if none answers; else infinity."""
    return math.inf if g.hung or not _mute(g) else g.quiesced_s + g.spec.timing.hang_s


def _mute(g: Group) -> dict[str, str]:
    """All members that may hold the state, if each was given up although its agent attends -> why."""
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
    phase = g.workers[worker].said.phase
    first = g.stuck_at.setdefault(phase, worker)
    if first != worker:
        because = f"{first} and {worker} both got stuck in {phase}; their logs end with where their threads are"
        become_closed(g, 1, because, now_s, do)
        return
    do.append(Note("stuck", {"worker_id": worker, "because": how, "limit_s": round(limit_s, 1)}))
    g.stuck.add(worker)
    lost(g, worker, f"stuck: {how}", now_s, do, dead=False)


def _end_all(g: Group, still: dict[str, str], now_s: float, do: list[Action]) -> None:
    """End these members: none makes progress, and no other worker holds the state. The order is repeated after
    fence_grace_s, because their agents may not have heard it."""
    if g.hung and now_s < g.hung_s + g.spec.timing.fence_grace_s:
        return
    if not g.hung:
        do += [Note("stuck", {"worker_id": worker, "because": how}) for worker, how in still.items()]
    g.hung = {worker: f"stuck: {how}" for worker, how in still.items()}
    g.hung_s = now_s
    do += [Tell((worker,), Kill(g.term, worker)) for worker in still]


def _where(one: WorkerView) -> str:
    return f"{one.for_s:.1f} s {'' if one.said.phase.startswith('after ') else 'in '}{one.said.phase}"


def _ring(g: Group) -> dict[str, WorkerView]:
    """The members of the running ring; empty unless the job is RUNNING and all of them have entered the ring."""
    seen = {w: g.workers[w] for w in (g.running.ids if g.running else ()) if w in g.workers}
    whole = g.state is State.RUNNING and all(one.entered for one in seen.values())
    return seen if whole else {}


def _limit_s(g: Group, one: WorkerView) -> float:
    timing = g.spec.timing
    if one.said.doing in (Doing.DECLARED, Doing.WAITING):
        return math.inf
    if one.said.doing is Doing.EVALUATION:
        return _evaluation_limit_s(g, one)
    usual_s = _usual_s(g)
    in_shard = one.said.doing is Doing.SHARD
    if in_shard and one.said.computes and not usual_s:
        return COMPUTES * timing.hang_s  # nobody has computed a shard yet: it compiles
    may_wait = in_shard and not one.said.computes and usual_s > 0
    return max(timing.progress_s if may_wait else timing.hang_s, USUAL * usual_s)


def _evaluation_limit_s(g: Group, one: WorkerView) -> float:
    """By the longest part of an evaluation that this member has computed; the first one may compile, and take any time
    as long as it uses a processor."""
    if one.said.computes and not one.usual_s:
        return math.inf
    return max(g.spec.timing.hang_s * (COMPUTES if one.said.computes else 1), USUAL * one.usual_s)


def _limit_alone_s(g: Group, one: WorkerView, usual_s: float) -> float:
    if one.said.doing in (Doing.DECLARED, Doing.WAITING):
        return math.inf
    if one.said.doing is Doing.EVALUATION:
        return _evaluation_limit_s(g, one)
    return max(g.spec.timing.hang_s * (COMPUTES if one.said.computes else 1), USUAL * usual_s)


def _usual_s(g: Group) -> float:
    return max((seen.usual_s for seen in g.workers.values()), default=0.0)
