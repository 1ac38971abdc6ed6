"""Members of different speed: shards follow speed; a straggler is named and, by policy, gives its place to a spare.

A difference counts once it has lasted `timing.uneven_s` without a break, and each member reports its speed as a median
over steps (runtime/worker/speed.py): a short slowdown changes nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from elastic.config import Reduction, Stragglers
from elastic.protocol import shard_assignment
from elastic.protocol.membership.events import Action, Note
from elastic.protocol.membership.group import Group, Leaver, State
from elastic.protocol.membership.planned_changes import commit_planned, invite, plan_change, wanted_newcomers
from elastic.protocol.membership.roster import slot_of
from elastic.protocol.membership.transitions import with_its_home
from elastic.protocol.messages import Generation
from elastic.protocol.recovery_plan import hosts_of
from elastic.protocol.reduction_tree import Node

GAIN = 1.1
"""Another ownership needs another ring, built beside the present one; a pass must become this many times faster."""

STILL_SLOW = 0.8
"""A straggler is no longer named once its time per shard is below this part of the limit."""

HOLD_OFF = 20
"""A slot is demoted at most once in this many uneven_s: else a machine that is always slow would alternate for ever."""


def compare(g: Group, now_s: float, do: list[Action]) -> None:
    """After a member's word, at most once between two beats of an agent: name stragglers, and change one thing if that
    pays."""
    if g.spec.stragglers is Stragglers.IGNORE or now_s < g.compare_s:
        return
    g.compare_s = now_s + g.timing.beat_s
    running = g.running
    if g.state is not State.RUNNING or running is None or not running.ids:
        g.slow_since_s, g.uneven_since_s = {}, math.inf
        return
    _find_stragglers(g, running, now_s, do)
    if g.committing is not None or g.top is not running:
        return  # the next change is under way
    if not _demote(g, running, now_s, do):
        _balance(g, running, now_s, do)


def take_back_demotions(g: Group, loss: Generation) -> None:
    """Take back the demotion of a loss generation's members, which voids plans. Their speed is measured again."""
    for worker in loss.ids:
        if worker in g.drains and g.drains[worker].demoted and not with_its_home(g, g.workers[worker]):
            del g.drains[worker]
            g.demoted_s.pop(slot_of(worker), None)


def _find_stragglers(g: Group, running: Generation, now_s: float, do: list[Action]) -> None:
    paces = {worker: pace for worker in running.ids if (pace := g.workers[worker].shard_us)}
    paces = paces if len(paces) > 1 else {}
    g.slow_since_s = {worker: since for worker, since in g.slow_since_s.items() if worker in paces}
    g.stragglers = {worker: because for worker, because in g.stragglers.items() if worker in paces}
    in_order = sorted(paces.values())
    for worker, pace in paces.items():
        peers = median_without(in_order, pace)
        limit = g.spec.slow_factor * peers
        if pace >= limit:
            since = g.slow_since_s.setdefault(worker, now_s)
            if worker not in g.stragglers and now_s >= since + g.spec.timing.uneven_s:
                times = f"{pace / peers:.1f} times as long as the others"
                g.stragglers[worker] = f"a shard takes it {pace / 1000:.1f} ms, {times}"
                do.append(Note("straggler", {"worker_id": worker, "because": g.stragglers[worker]}))
            continue
        g.slow_since_s.pop(worker, None)
        if worker in g.stragglers and pace < STILL_SLOW * limit:
            del g.stragglers[worker]
            do.append(Note("straggler_over", {"worker_id": worker, "shard_ms": pace / 1000}))


def median_without(in_order: Sequence[int], one: int) -> float:
    """The median of all values but `one`; there must be another one. It makes no list, as there may be thousands."""
    place, middle = bisect_left(in_order, one), (len(in_order) - 1) // 2

    def other(rank: int) -> int:
        return in_order[rank + (rank >= place)]

    return other(middle) if len(in_order) % 2 == 0 else (other(middle - 1) + other(middle)) / 2


def _demote(g: Group, running: Generation, now_s: float, do: list[Action]) -> bool:
    """Begin to exchange the slowest straggler for a spare, in one generation, once the spare lacks only the copy of the
    state. Whether an exchange is under way.

    The world stays at min_workers or above, even if the spare dies at that moment.
    """
    hold_off_s = HOLD_OFF * g.spec.timing.uneven_s
    able = [
        worker
        for worker in g.stragglers
        if worker not in g.drains and now_s >= g.demoted_s.get(slot_of(worker), -math.inf) + hold_off_s
    ]
    full = len(running.ids) >= max(g.wanted_workers, g.spec.min_workers + 1)
    if g.spec.stragglers is not Stragglers.DEMOTE or not able or not full or g.drains.keys() & set(running.ids):
        return False
    lost = {*g.dead, *g.given_up, *g.turned_away}
    if wanted_newcomers(g, lost, now_s):
        slowest = max(able, key=lambda worker: g.workers[worker].shard_us)
        g.drains[slowest] = Leaver(g.stragglers[slowest], math.inf, demoted=True)
        g.demoted_s[slot_of(slowest)] = now_s
        do.append(Note("demoted", {"worker_id": slowest, "because": g.stragglers[slowest]}))
        plan_change(g, now_s, do)
        return True
    if g.coming:
        return True
    slow_nodes = {g.workers[worker].member.node for worker in g.stragglers}

    def doubts(worker: str) -> tuple[bool, bool, int]:
        member = g.workers[worker].member
        return member.node in slow_nodes, slot_of(worker) in g.demoted_s, member.seniority

    spares = g.spares - {*lost, *g.drains}
    if spares:
        invite(g, min(spares, key=doubts), now_s, do)
    return bool(spares)


def _balance(g: Group, running: Generation, now_s: float, do: list[Action]) -> None:
    """Distribute the shards by speed if that makes a pass GAIN times faster. The slowest member is then done earlier,
    but a block that the tree cuts in more places is sent as more partial sums."""
    paces = {worker: g.workers[worker].shard_us for worker in running.ids}
    if g.shards < len(paces) or not all(paces.values()):
        g.uneven_since_s = math.inf
        return
    costs = tuple(paces.values())
    hosts, slack = hosts_of(running), running.plan.slack
    now = shard_assignment.owned(g.shards, running.plan.paces, hosts, slack)
    then = shard_assignment.owned(g.shards, costs, hosts, slack)
    exchange_us = g.exchange_us(running.ids)
    now_us = shard_assignment.slowest(shard_assignment.sizes(now), costs) + exchange_us
    shards = shard_assignment.sizes(then)
    then_us = shard_assignment.slowest(shards, costs) + exchange_us * _bytes(g, then) // _bytes(g, now)
    if now_us < GAIN * then_us:
        g.uneven_since_s = math.inf
        return
    g.uneven_since_s = min(g.uneven_since_s, now_s)
    if now_s < max(g.uneven_since_s, g.balanced_s) + g.spec.timing.uneven_s:
        return
    g.uneven_since_s, g.balanced_s = math.inf, now_s
    because = f"shards follow speed: a pass takes about {then_us / 1000:.1f} ms, it was {now_us / 1000:.1f} ms"
    do.append(Note("balanced", {"shards": dict(zip(running.ids, shards, strict=True)), "because": because}))
    commit_planned(g, running.members, because, do, paces=paces)


def _bytes(g: Group, owned: Sequence[Sequence[Node]]) -> int:
    """What the busiest member sends, in slices: its partial sums and its slice of the result (slice_sums.py)."""
    return 1 + (max(map(len, owned)) if g.spec.reduction is Reduction.EXACT else 1)
