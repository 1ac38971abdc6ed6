"""Nodes of which nothing is heard: when their silence is long enough to go on without them.

Of one whose stream is up, evict_s are waited for until its silence counts at all, and evict_s then. A ring that
advances is proof of life of all its members, so there it lasts longer. One that stands still although nobody who is
heard has anything left to do proves the opposite, and the first evict_s are enough. But not where this leader may be
the one that is cut off: half of the nodes are silent, or one of those that wait was not heard for a while. Thousands of
agents speak too rarely for that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from elastic.protocol.membership.group import Group, Silence, State
from elastic.protocol.messages import Doing

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


def next_silence_ends_s(g: Group) -> float:
    """When the next of the silent nodes is given up, or math.inf."""
    return min(_ends_s(g).values(), default=math.inf)


def silent_too_long(g: Group, now_s: float) -> set[str]:
    """Nodes that are given up now."""
    return {node for node, ends_s in _ends_s(g).items() if now_s >= ends_s}


def _ends_s(g: Group) -> dict[str, float]:
    """Silent node -> when it is given up."""
    if not g.silent_nodes:
        return {}
    timing = g.timing
    lived_s = g.advanced_s.get(g.running.number, -math.inf) if g.running else -math.inf
    ends = {
        node: min(max(one.counts_s, lived_s) + timing.evict_s, one.counts_s + timing.control_silence_s)
        for node, one in g.silent_nodes.items()
    }
    if (others := _those_heard(g)) is not None:
        moved_s = max(lived_s, g.since_s)  # of a new ring nothing may have been heard yet
        stands_s = max(moved_s + STANDS * others.pass_s, max(moved_s, others.worked_s) + timing.evict_s)
        for node, one in g.silent_nodes.items():
            if others.were_heard(one, timing.suspect_s):
                ends[node] = min(ends[node], max(one.since_s + timing.evict_s, stands_s))
    return ends


@dataclass(frozen=True, slots=True)
class _Heard:
    """All members on nodes that are heard. from_s, until_s: each of them said where it stands all that time, which is
    none where there is nobody. worked_s: when one last said that it does something else than wait. pass_s: how long a
    pass takes, about."""

    from_s: float
    until_s: float
    worked_s: float
    pass_s: float

    def were_heard(self, during: Silence, suspect_s: float) -> bool:
        """What cuts off several nodes at once is not heard from each at the same instant, nor are they named at once;
        suspect_s later they are."""
        return self.from_s <= during.since_s + suspect_s and self.until_s >= during.counts_s - suspect_s


def _those_heard(g: Group) -> _Heard | None:
    """None if half of the nodes are silent; and where members need not get on: they are about to leave or to enter the
    ring, or are below quorum, or one, heard or not, was last about something that takes its time."""
    record = g.running
    if record is None or g.state is not State.RUNNING or 2 * len(g.silent_nodes) >= len(g.slots):
        return None
    members = [g.workers.get(worker) for worker in record.ids]
    others, usual_s, exchange_us = [], 0.0, 0
    for seen in members:
        if seen is None or seen.entered != record.number or seen.doing is Doing.DECLARED:
            return None
        usual_s, exchange_us = max(usual_s, seen.usual_s), max(exchange_us, seen.exchange_us)
        if seen.member.node not in g.silent_nodes:
            others.append(seen)
    return _Heard(
        from_s=max((one.heard_from_s for one in others), default=math.inf),
        until_s=min((one.heard_s for one in others), default=-math.inf),
        worked_s=max((one.worked_s for one in others), default=math.inf),
        pass_s=usual_s * -(-g.shards // max(1, len(members))) + exchange_us / 1e6,
    )
