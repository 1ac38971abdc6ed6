"""Which job gets which slots: a pure function of the jobs and the nodes.

Slots are handed out in order of submission. A job starts when `min_workers` slots are free at once, with up to
`workers` of them; it gets more later, on nodes where it has none. A job that waits holds up the jobs behind it, so that
small jobs cannot keep a large job waiting for ever: no job behind it begins, and a running job gets no more than its
own minimum. A job that needs more than all nodes together have holds up no other job, until nodes come with which it
fits. A job gives slots back when it ends, with a node that an operator wants empty, or when an operator has given it
another size; it is never made smaller for another job.

When the number of a job's workers on a node changes, they leave and come back together, so the job needs another node
on which it goes on meanwhile. On its only node a job keeps its slots, and its leader makes spares of the workers that
are too many (elastic/protocol/membership/planned_changes.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from elastic.fleet.documents import FleetJob, NodeShare, Placement


@dataclass(frozen=True, slots=True)
class OfferedNode:
    """A node whose daemon attends. labels: NAME=VALUE each. leaves: the node takes no work, and gives up what it has.
    goes: it takes no work, and keeps what it has. away: its daemon attended until a moment ago, and is waited for."""

    name: str
    slots: int
    labels: frozenset[str] = frozenset()
    leaves: bool = False
    goes: bool = False
    away: bool = False

    @property
    def counts(self) -> bool:
        """Whether the node's slots count as slots of the fleet, now or in a moment."""
        return not (self.leaves or self.goes)

    @property
    def takes(self) -> bool:
        return self.counts and not self.away


@dataclass(frozen=True, slots=True)
class Schedule:
    """The result of scheduling. placements: of all jobs that have, or get, a place. waiting: job -> a sentence that
    says what it waits for. lacking: running job -> why it does not have the size that an operator wants. larger: the
    waiting jobs that need more slots at once than all fitting nodes have."""

    placements: Mapping[str, Placement]
    waiting: Mapping[str, str]
    lacking: Mapping[str, str]
    larger: frozenset[str] = frozenset()


def schedule(
    jobs: Sequence[FleetJob], nodes: Collection[OfferedNode], gone: Collection[str], *, awaited: bool = False
) -> Schedule:
    """jobs: in order of submission. gone: nodes that have not attended for so long that they lose their jobs; a node
    that is absent for a moment keeps them. A job whose nodes are all gone keeps them: it may have nothing else.
    awaited: unknown nodes may come at any moment, so no job counts as larger than the fleet yet.
    """
    open_jobs = [job for job in jobs if job.result is None]
    by_name = {node.name: node for node in nodes}
    kept = {job.name: _fewer(_kept(job, by_name, gone), job.workers) for job in open_jobs}
    free = {node.name: node.slots for node in nodes if node.takes}
    for shares in kept.values():
        for share in shares:
            free[share.node] = free.get(share.node, 0) - share.slots
    placements: dict[str, Placement] = {}
    waiting: dict[str, str] = {}
    lacking: dict[str, str] = {}
    larger: set[str] = set()
    first = ""
    for job in open_jobs:
        shares, least = kept[job.name], job.spec.min_workers if job.waits else 0
        if job.stop is not None:
            placements |= {job.name: Placement(shares)} if job.runs else {}
            continue
        fit = [node for node in nodes if node.labels >= set(job.spec.labels)]
        if nodes and not awaited and _slots(node for node in fit if node.counts) < least:
            larger.add(job.name)
            waiting[job.name] = _too_large(job, fit)
            continue
        if job.waits and first:
            waiting[job.name] = f"waits behind {first}, which was submitted before it"
            continue
        taking = [node for node in fit if node.takes]
        rest = {node.name: free[node.name] for node in taking if free[node.name] > 0}
        if sum(rest.values()) < least:
            first, waiting[job.name] = job.name, _lack(job, rest, taking)
            continue
        had, wanted = sum(share.slots for share in shares), job.spec.min_workers if first else job.workers
        new = tuple(_take(wanted - had, rest, {share.node for share in shares}))
        for share in new:
            free[share.node] -= share.slots
        if job.runs or new:
            placement = placements[job.name] = Placement((*shares, *new))
            if job.runs and job.size is not None and placement.total != job.workers:
                lacking[job.name] = _why_not(placement, job.workers, first)
    return Schedule(placements, waiting, lacking, frozenset(larger))


def _kept(job: FleetJob, nodes: Mapping[str, OfferedNode], gone: Collection[str]) -> tuple[NodeShare, ...]:
    """The shares that a job keeps."""
    staying = [share for share in job.shares if not (share.node in nodes and nodes[share.node].leaves)]
    there = tuple(share for share in staying if share.node not in gone)
    return there or tuple(staying)


def _fewer(shares: tuple[NodeShare, ...], wanted: int) -> tuple[NodeShare, ...]:
    """Reduce the shares to the number wanted, as far as possible. Whole nodes go first, the smallest first and of
    equals the newest, then a part of one node if another node stays as it is."""
    over = sum(share.slots for share in shares) - wanted
    kept = sorted(shares, key=lambda share: (share.slots, -shares.index(share)))
    for share in kept[:-1]:
        if share.slots <= over:
            kept.remove(share)
            over -= share.slots
    fewer = {share.node: share for share in kept}
    if over > 0 and len(kept) > 1:
        fewer[kept[0].node] = NodeShare(kept[0].node, kept[0].slots - over)
    return tuple(fewer[share.node] for share in shares if share.node in fewer)


def _why_not(placement: Placement, wanted: int, first: str) -> str:
    if placement.total > wanted:
        return (
            f"is to have {wanted} workers, and keeps {placement.total} slots on {placement.shares[0].node}: it has no "
            "other node on which it goes on meanwhile. Those beyond wait there as spares"
        )
    why = f"free slots go to {first}, which was submitted before it" if first else "no other node has free slots for it"
    return f"is to have {wanted} workers, and has {placement.total}: {why}"


def _take(wanted: int, free: Mapping[str, int], but: Collection[str]) -> Iterator[NodeShare]:
    """Yield free slots, from as few nodes as possible."""
    for node in sorted(free, key=lambda name: (-free[name], name)):
        if wanted > 0 and node not in but:
            yield NodeShare(node, min(wanted, free[node]))
            wanted -= free[node]


def _lack(job: FleetJob, free: Mapping[str, int], fit: Collection[OfferedNode]) -> str:
    needs = f"needs {_counted(job.spec.min_workers, 'free slot')} at once"
    if not fit:
        return f"{needs}, and there are no nodes{_with_labels(job)}"
    where = f"{_counted(len(fit), 'node')}{_with_labels(job)}"
    return f"{needs}, and {sum(free.values())} of the {_slots(fit)} on {where} are free"


def _too_large(job: FleetJob, fit: Collection[OfferedNode]) -> str:
    counted = [node for node in fit if node.counts]
    has = f"{_counted(_slots(counted), 'slot')} on {_counted(len(counted), 'node')}{_with_labels(job)}"
    closed = _slots(fit) - _slots(counted)
    more = f", and {closed} where no jobs are taken now" if closed else ""
    return f"larger than the fleet, which has {has}{more}: needs {job.spec.min_workers} at once, and holds up nobody"


def _slots(nodes: Iterable[OfferedNode]) -> int:
    return sum(node.slots for node in nodes)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _with_labels(job: FleetJob) -> str:
    return f" with {', '.join(job.spec.labels)}" if job.spec.labels else ""
