"""Which job gets which slots: a pure function of what is asked for and what is there.

Slots are handed out in order of submission. A job starts when `min_workers` slots are free at once, with up to
`workers` of them; what it lacks it gets later, on nodes where it has none. A job that waits holds up those behind it,
so that small ones cannot keep a large one waiting for ever. A job gives slots back when it ends, or with a node that
somebody wants empty; it is never made smaller for another one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from elastic.fleet.documents import Job, Placement, Share


@dataclass(frozen=True, slots=True)
class Node:
    """A daemon that attends. labels: NAME=VALUE each. leaves: it takes no work, and gives up what it has."""

    name: str
    slots: int
    labels: frozenset[str] = frozenset()
    leaves: bool = False


@dataclass(frozen=True, slots=True)
class Schedule:
    """placements: of all jobs that have, or get, a place. waiting: job -> a sentence that says what it waits for."""

    placements: Mapping[str, Placement]
    waiting: Mapping[str, str]


def schedule(jobs: Sequence[Job], nodes: Collection[Node], gone: Collection[str]) -> Schedule:
    """jobs: in order of submission. gone: nodes that have not attended for so long that nobody waits for them; one
    that is absent for a moment keeps its jobs. A job whose nodes are all gone keeps them: it may have nothing else.
    """
    open_jobs = [job for job in jobs if job.result is None]
    by_name = {node.name: node for node in nodes}
    kept = {job.name: _kept(job, by_name, gone) for job in open_jobs}
    free = {node.name: node.slots for node in nodes if not node.leaves}
    for shares in kept.values():
        for share in shares:
            free[share.node] = free.get(share.node, 0) - share.slots
    placements: dict[str, Placement] = {}
    waiting: dict[str, str] = {}
    first = ""
    for job in open_jobs:
        shares, least = kept[job.name], job.spec.min_workers if job.waits else 0
        if job.stop is not None:
            placements |= {job.name: Placement(shares)} if job.runs else {}
            continue
        if job.waits and first:
            waiting[job.name] = f"waits behind {first}, which was submitted before it"
            continue
        fit = [node for node in by_name.values() if not node.leaves and node.labels >= set(job.spec.labels)]
        rest = {node.name: free[node.name] for node in fit if free[node.name] > 0}
        if sum(rest.values()) < least:
            first, waiting[job.name] = job.name, _lack(job, rest, fit)
            continue
        new = tuple(_take(job.spec.workers - sum(share.slots for share in shares), rest, {s.node for s in shares}))
        for share in new:
            free[share.node] -= share.slots
        if job.runs or new:
            placements[job.name] = Placement((*shares, *new))
    return Schedule(placements, waiting)


def _kept(job: Job, nodes: Mapping[str, Node], gone: Collection[str]) -> tuple[Share, ...]:
    """Of a job's shares those that it keeps."""
    staying = [share for share in job.shares if not (share.node in nodes and nodes[share.node].leaves)]
    there = tuple(share for share in staying if share.node not in gone)
    return there or tuple(staying)


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
