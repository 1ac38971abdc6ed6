"""Which jobs give slots back so that a job that waits can begin: as few as possible, and those that come last first.

A job gives back what it has beyond its `min_workers` before any job is preempted, which gives back everything. On its
only node a job cannot be made smaller (scheduler.py), so there it is preempted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic.fleet.documents import NodeShare


@dataclass(frozen=True, slots=True)
class PreemptibleJob:
    """A job that may be asked for slots. shares: what it has. smaller: what it would keep if it was made smaller.
    whole: whether all of its slots may be taken. in_place: whether it can be made smaller while it runs; otherwise it
    is preempted for that, and what it would keep is left for it."""

    job: str
    shares: tuple[NodeShare, ...]
    smaller: tuple[NodeShare, ...]
    whole: bool = True
    in_place: bool = True


@dataclass(frozen=True, slots=True)
class PreemptionChoice:
    """smaller: job -> the shares that it keeps; its other slots are free at once. preempted: jobs that leave."""

    smaller: Mapping[str, tuple[NodeShare, ...]]
    preempted: tuple[str, ...]


def choose(least: int, free: Mapping[str, int], candidates: Sequence[PreemptibleJob]) -> PreemptionChoice | None:
    """Choose so that `least` slots are free. free: node -> free slots, of the nodes that count; negative where a node
    offers fewer slots than jobs have there. candidates: those that come last in the queue last. None: not even all of
    them are enough."""
    kept = {one.job: one.shares for one in candidates}

    def enough() -> bool:
        gained = dict(free)
        for one in candidates:
            before, after = _by_node(one.shares), _by_node(kept[one.job])
            for node in gained.keys() & before.keys():
                gained[node] += before[node] - after.get(node, 0)
        return sum(max(0, slots) for slots in gained.values()) >= least

    for one in reversed(candidates):
        if enough():
            break
        kept[one.job] = one.smaller
    for one in reversed(candidates):
        if enough():
            break
        if one.whole:
            kept[one.job] = ()
    if not enough():
        return None
    for one in candidates:  # spare those that were not needed after all, the first ones first
        for more in (one.shares, one.smaller):
            before, kept[one.job] = kept[one.job], more
            if enough():
                break
            kept[one.job] = before
    asked = [one for one in candidates if kept[one.job] != one.shares]
    leaving = tuple(one.job for one in asked if not (kept[one.job] and one.in_place))
    return PreemptionChoice({one.job: kept[one.job] for one in asked if one.job not in leaving}, leaving)


def _by_node(shares: Sequence[NodeShare]) -> dict[str, int]:
    return {share.node: share.slots for share in shares}
