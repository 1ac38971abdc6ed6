"""Which job gets which slots: a pure function of what is asked for and what is there.

Slots are handed out in order of submission. A job starts when `min_workers` slots are free at once, with up to
`workers` of them; what it lacks it gets later, on nodes where it has none. A job that waits holds up those behind it,
so that small ones cannot keep a large one waiting for ever. A job gives slots back when it ends, with a node that
somebody wants empty, or when somebody has given it another size; it is never made smaller for another one.

Workers of a node leave and come back together when their number there changes, so a job needs another node on which it
goes on meanwhile. On its only node it keeps its slots, and its leader makes spares of those that are too many
(elastic/membership/surplus.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from elastic.fleet.documents import Job, Placement, Share


@dataclass(frozen=True, slots=True)
class Node:
    """A daemon that attends. labels: NAME=VALUE each. leaves: it takes no work, and gives up what it has. goes: it
    takes no work, and keeps what it has."""

    name: str
    slots: int
    labels: frozenset[str] = frozenset()
    leaves: bool = False
    goes: bool = False

    @property
    def takes(self) -> bool:
        return not (self.leaves or self.goes)


@dataclass(frozen=True, slots=True)
class Schedule:
    """placements: of all jobs that have, or get, a place. waiting: job -> a sentence that says what it waits for.
    lacking: a job that runs, and not as large as somebody wants it -> why."""

    placements: Mapping[str, Placement]
    waiting: Mapping[str, str]
    lacking: Mapping[str, str]


def schedule(jobs: Sequence[Job], nodes: Collection[Node], gone: Collection[str]) -> Schedule:
    """jobs: in order of submission. gone: nodes that have not attended for so long that nobody waits for them; one
    that is absent for a moment keeps its jobs. A job whose nodes are all gone keeps them: it may have nothing else.
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
    first = ""
    for job in open_jobs:
        shares, least = kept[job.name], job.spec.min_workers if job.waits else 0
        if job.stop is not None:
            placements |= {job.name: Placement(shares)} if job.runs else {}
            continue
        if job.waits and first:
            waiting[job.name] = f"waits behind {first}, which was submitted before it"
            continue
        fit = [node for node in by_name.values() if node.takes and node.labels >= set(job.spec.labels)]
        rest = {node.name: free[node.name] for node in fit if free[node.name] > 0}
        if sum(rest.values()) < least:
            first, waiting[job.name] = job.name, _lack(job, rest, fit)
            continue
        had = sum(share.slots for share in shares)
        new = tuple(_take(job.workers - had, rest, {share.node for share in shares}))
        for share in new:
            free[share.node] -= share.slots
        if job.runs or new:
            placement = placements[job.name] = Placement((*shares, *new))
            if job.runs and job.size is not None and placement.total != job.workers:
                lacking[job.name] = _why_not(placement, job.workers)
    return Schedule(placements, waiting, lacking)


def _kept(job: Job, nodes: Mapping[str, Node], gone: Collection[str]) -> tuple[Share, ...]:
    """Of a job's shares those that it keeps."""
    staying = [share for share in job.shares if not (share.node in nodes and nodes[share.node].leaves)]
    there = tuple(share for share in staying if share.node not in gone)
    return there or tuple(staying)


def _fewer(shares: tuple[Share, ...], wanted: int) -> tuple[Share, ...]:
    """Of them no more than are wanted, as far as that can be: whole nodes, the smallest first and of equals the newest,
    then a part of one where another node stays as it is."""
    over = sum(share.slots for share in shares) - wanted
    kept = sorted(shares, key=lambda share: (share.slots, -shares.index(share)))
    for share in kept[:-1]:
        if share.slots <= over:
            kept.remove(share)
            over -= share.slots
    fewer = {share.node: share for share in kept}
    if over > 0 and len(kept) > 1:
        fewer[kept[0].node] = Share(kept[0].node, kept[0].slots - over)
    return tuple(fewer[share.node] for share in shares if share.node in fewer)


def _why_not(placement: Placement, wanted: int) -> str:
    if placement.total > wanted:
        return (
            f"is to have {wanted} workers, and keeps {placement.total} slots on {placement.shares[0].node}: it has no "
            "other node on which it goes on meanwhile. Those beyond wait there as spares"
        )
    return f"is to have {wanted} workers, and has {placement.total}: no other node has free slots for it"


def _take(wanted: int, free: Mapping[str, int], but: Collection[str]) -> Iterator[Share]:
    """From as few nodes as possible."""
    for node in sorted(free, key=lambda name: (-free[name], name)):
        if wanted > 0 and node not in but:
            yield Share(node, min(wanted, free[node]))
            wanted -= free[node]


def _lack(job: Job, free: Mapping[str, int], fit: Sequence[Node]) -> str:
    there = sum(node.slots for node in fit)
    where = f"nodes with {', '.join(job.spec.labels)}" if job.spec.labels else f"{len(fit)} nodes"
    needs = f"needs {job.spec.min_workers} free slots at once"
    if not fit:
        return f"{needs}, and there are no nodes" + (f" with {', '.join(job.spec.labels)}" if job.spec.labels else "")
    return f"{needs}, and {sum(free.values())} of the {there} on {where} are free"
