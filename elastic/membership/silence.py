"""Nodes of which nothing is heard: when their silence is long enough to go on without them.

A ring that advances is proof of life of all its members, so there silence lasts longer. One that stands still although
nobody who is heard has anything left to do is the opposite: those wait for somebody who is not heard. Where members are
at work, or nobody is heard at all, so that the link of this leader may be the one that is cut, silence has to last
twice as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from elastic.membership.group import Group, Silence
from elastic.messages import Doing, Progress


def silence(node: str) -> str:
    return f"node {node} is silent"


def fell_silent(g: Group, node: str, silent_s: float, now_s: float) -> None:
    """silent_s: for how long, at least, it has been so already."""
    g.silent_nodes.setdefault(node, Silence(now_s - silent_s, now_s))


def not_found_yet(g: Group, now_s: float) -> Silence:
    """Of a node whose agent has to find this leader first."""
    found_by_s = now_s + g.timing.fence_grace_s - g.timing.evict_s
    return Silence(found_by_s, found_by_s)


def heard_of_waiting(g: Group, word: Progress, now_s: float) -> None:
    if g.running is None or word.generation != g.running.number:
        return
    if word.doing is Doing.WAITING:
        g.waited_s = now_s
    else:
        g.worked_s = now_s


def next_silence_ends_s(g: Group) -> float:
    """When the next of the silent nodes is given up, or math.inf."""
    return min(map(_ends(g), g.silent_nodes.values())) if g.silent_nodes else math.inf


def silent_too_long(g: Group, now_s: float) -> set[str]:
    """Nodes that are given up now."""
    ends_s = _ends(g)
    return {node for node, heard in g.silent_nodes.items() if now_s >= ends_s(heard)}


def _ends(g: Group) -> Callable[[Silence], float]:
    timing = g.timing
    lived_s = g.advanced_s.get(g.running.number, -math.inf) if g.running else -math.inf

    def ends_s(of: Silence) -> float:
        # What cuts off several nodes at once is not heard from each at the same instant; suspect_s later it is.
        missed = g.waited_s >= of.since_s + timing.suspect_s
        from_s = min(of.counts_s, max(of.since_s, g.worked_s)) if missed else of.counts_s
        return min(max(from_s, lived_s) + timing.evict_s, of.counts_s + timing.control_silence_s)

    return ends_s
