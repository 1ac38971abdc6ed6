"""Nodes of which nothing is heard: when their silence is long enough to go on without them.

Of one whose stream is up, evict_s are waited for until its silence counts at all, and evict_s then. A ring that
advances is proof of life of all its members, so there it lasts longer. One that stands still although nobody who is
heard has anything left to do proves the opposite, and the first evict_s are enough. But not where this leader may be
the one that is cut off: half of the nodes are silent, or for a while nobody was heard.
"""

from __future__ import annotations

import math

from elastic.membership.group import Group, Silence, State
from elastic.messages import Doing, Progress

STANDS = 3
"""A ring that has not advanced for so many times what a pass takes stands still."""


def silence(node: str) -> str:
    return f"node {node} is silent"


def fell_silent(g: Group, node: str, silent_s: float, now_s: float) -> None:
    """silent_s: for how long, at least, it has been so already."""
    g.silent_nodes.setdefault(node, Silence(now_s - silent_s, now_s))


def not_found_yet(g: Group, now_s: float) -> Silence:
    """Of a node whose agent has to find this leader first."""
    found_by_s = now_s + g.timing.fence_grace_s - g.timing.evict_s
    return Silence(found_by_s, found_by_s)


def heard(g: Group, word: Progress, now_s: float) -> None:
    if now_s - g.heard_s > g.spec.timing.suspect_s:
        g.heard_from_s = now_s
    g.heard_s = now_s
    if word.doing is not Doing.WAITING and g.running is not None and word.generation == g.running.number:
        g.worked_s = now_s


def next_silence_ends_s(g: Group) -> float:
    """When the next of the silent nodes is given up, or math.inf."""
    return min(_ends_s(g).values(), default=math.inf) if g.silent_nodes else math.inf


def silent_too_long(g: Group, now_s: float) -> set[str]:
    """Nodes that are given up now."""
    return {node for node, ends_s in _ends_s(g).items() if now_s >= ends_s} if g.silent_nodes else set()


def _ends_s(g: Group) -> dict[str, float]:
    """Silent node -> when it is given up."""
    timing = g.timing
    lived_s = g.advanced_s.get(g.running.number, -math.inf) if g.running else -math.inf
    ends = {
        node: min(max(silence.counts_s, lived_s) + timing.evict_s, silence.counts_s + timing.control_silence_s)
        for node, silence in g.silent_nodes.items()
    }
    named = [node for node, one in g.silent_nodes.items() if one.since_s < one.counts_s and _is_heard(g, one)]
    if named and (pass_s := _pass_of_waiting_s(g)) is not None:
        moved_s = max(lived_s, g.since_s)  # of a new ring nothing may have been heard yet
        stands_s = max(g.worked_s + timing.evict_s, moved_s + max(timing.evict_s, STANDS * pass_s))
        ends |= {node: min(ends[node], stands_s) for node in named}
    return ends


def _is_heard(g: Group, during: Silence) -> bool:
    """Whether somebody was, all that time. What cuts off several nodes at once is not heard from each at the same
    instant; suspect_s later it is."""
    begun_s = during.since_s + g.spec.timing.suspect_s
    return g.heard_from_s <= begun_s <= g.heard_s


def _pass_of_waiting_s(g: Group) -> float | None:
    """How long a pass takes its members, if all that are heard wait for others; None if that is not known."""
    record = g.running
    if record is None or g.state is not State.RUNNING or 2 * len(g.silent_nodes) >= len(g.slots):
        return None
    usual_s = 0.0
    for worker in record.ids:
        seen = g.workers.get(worker)
        if seen is None or seen.entered != record.number or seen.doing is Doing.DECLARED:
            return None
        if seen.doing is not Doing.WAITING and seen.member.node not in g.silent_nodes:
            return None
        usual_s = max(usual_s, seen.usual_s)
    return usual_s * -(-g.shards // max(1, len(record.ids)))
