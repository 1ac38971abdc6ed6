"""Silent nodes: when their silence is long enough to go on without them.

While a node's stream is up, its silence begins to count after evict_s, and the node is given up another evict_s later.
A ring that advances proves that all its members live, so then the wait is longer. A ring that stands still although the
members that are heard only wait proves the opposite, and the first evict_s are enough. This does not hold if the leader
itself may be cut off: half of the nodes are silent, or one of the waiting members was not heard for a while. Thousands
of agents speak too rarely for this rule.

There is no such wait if a node's processes are seen to be gone: the stream of its agent was closed without a goodbye,
the agent is not back after RETURN_S, and all other members have left the ring and found the links to all workers of
that node closed. A machine that is cut off, or loses its power, closes nothing. An agent that lost its leader
closes its stream, but its workers keep their links, also when they have left the ring by order. A worker that was given
up but lives is fenced: nobody steps in its ring any more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from elastic.protocol.membership.events import AgentDown
from elastic.protocol.membership.group import Group, Silence, State
from elastic.protocol.messages import Doing

STANDS = 3
"""A ring stands still if it has not advanced for this many times the duration of a pass."""


RETURN_S = 0.1
"""Seconds within which an agent that has lost its leader has to attend again; its first try comes within 50 ms. In a
job of thousands of agents this grows in proportion to evict_s."""


def silence(node: str) -> str:
    return f"node {node} is silent"


def end(node: str) -> str:
    return f"node {node} is gone: its agent and its workers have closed their connections"


def is_absence(because: str, node: str) -> bool:
    """Whether workers were given up because this node was silent or gone, which its agent's return disproves."""
    return because in (silence(node), end(node))


def fell_silent(g: Group, down: AgentDown, now_s: float) -> None:
    """Note that an agent's stream ended or went silent. If the node was silent before, the end of the stream says
    nothing: this side may have given the stream up."""
    ended_s = now_s if down.ended else math.inf
    g.silent_nodes.setdefault(down.node, Silence(now_s - down.silent_s, now_s, ended_s))


def not_found_yet(g: Group, now_s: float) -> Silence:
    """The silence of a node whose agent has yet to find this leader."""
    found_by_s = now_s + g.timing.fence_grace_s - g.timing.evict_s
    return Silence(found_by_s, found_by_s)


def next_silence_ends_s(g: Group) -> float:
    """When the next silent node is given up, or math.inf."""
    return min((ends_s for ends_s, _ in _ends(g).values()), default=math.inf)


def silent_too_long(g: Group, now_s: float) -> dict[str, str]:
    """Nodes that are to be given up now -> why."""
    return {node: because for node, (ends_s, because) in _ends(g).items() if now_s >= ends_s}


def _ends(g: Group) -> dict[str, tuple[float, str]]:
    """Silent node -> when it is given up, and why."""
    if not g.silent_nodes:
        return {}
    timing = g.timing
    grown = timing.evict_s / g.spec.timing.evict_s
    lived_s = g.advanced_s.get(g.running.number, -math.inf) if g.running else -math.inf
    ends = {
        node: min(max(one.counts_s, lived_s) + timing.evict_s, one.counts_s + timing.control_silence_s)
        for node, one in g.silent_nodes.items()
    }
    if (others := _those_heard(g)) is not None:
        moved_s = max(lived_s, g.since_s)  # a new ring may not have been heard of yet
        stands_s = max(moved_s + STANDS * others.pass_s, max(moved_s, others.worked_s) + timing.evict_s)
        for node, one in g.silent_nodes.items():
            if others.were_heard(one, g.spec.timing.suspect_s * grown):
                ends[node] = min(ends[node], max(one.since_s + timing.evict_s, stands_s))
    told = {node: (ends_s, silence(node)) for node, ends_s in ends.items()}
    return told | {node: (g.silent_nodes[node].ended_s + RETURN_S * grown, end(node)) for node in _seen_to_end(g)}


def _seen_to_end(g: Group) -> set[str]:
    """Silent nodes to which all connections are closed: the agent's stream to this leader, and the links of all members
    elsewhere, which have left their ring."""
    ended = {node for node, one in g.silent_nodes.items() if one.ended_s < math.inf}
    if not ended or g.state is not State.QUIESCING or g.committing is not None:
        return set()
    listed = len(g.chain[-1].ids)
    if len(g.reports) + len(g.dead) + len(g.given_up) + sum(g.slots.get(node, listed) for node in ended) < listed:
        return set()  # nearly always, and told without a look at everybody
    there = {worker: seen.member.node for worker in g.listed if (seen := g.workers.get(worker)) is not None}
    settled = {*g.reports, *g.dead, *g.given_up}
    if any(node not in ended and worker not in settled for worker, node in there.items()):
        return set()
    # A newcomer on such a node has no link yet, and is given up with the others.
    peers = {record.number: {one for one in record.ids if there.get(one) in ended} for record in g.chain}
    linked, still_open = set[str](), set[str]()
    for worker, report in g.reports.items():
        if there.get(worker) not in ended and (here := peers.get(report.entered)):
            linked |= here
            still_open |= here.difference(report.closed)
    lived = {there[worker] for worker in still_open - g.dead.keys()}
    return {there[worker] for worker in linked - g.dead.keys()} - lived


@dataclass(frozen=True, slots=True)
class _Heard:
    """All members on nodes that are heard. Each of them said where it stands from from_s to until_s; without such
    members that time is empty. worked_s: when one of them last said that it does something other than wait. pass_s:
    about how long a pass takes."""

    from_s: float
    until_s: float
    worked_s: float
    pass_s: float

    def were_heard(self, during: Silence, suspect_s: float) -> bool:
        """Whether all of them were heard during this silence, within suspect_s: a fault cuts words off at different
        instants."""
        return self.from_s <= during.since_s + suspect_s and self.until_s >= during.counts_s - suspect_s


def _those_heard(g: Group) -> _Heard | None:
    """What the members that are heard say; None if nothing follows from it: half of the nodes are silent, members enter
    or leave the ring or are below quorum, or a member last said that it does a declared task."""
    record = g.running
    if record is None or g.state is not State.RUNNING or 2 * len(g.silent_nodes) >= len(g.slots):
        return None
    members = [g.workers.get(worker) for worker in record.ids]
    others = []
    for seen in members:
        if seen is None or seen.entered != record.number or seen.said.doing is Doing.DECLARED:
            return None
        if seen.member.node not in g.silent_nodes:
            others.append(seen)
    return _Heard(
        from_s=max((one.heard_from_s for one in others), default=math.inf),
        until_s=min((one.heard_s for one in others), default=-math.inf),
        worked_s=max((one.worked_s for one in others), default=math.inf),
        pass_s=g.pass_s(record.ids),
    )
