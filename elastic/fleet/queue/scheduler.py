"""Which job gets which slots: a pure function of the jobs, the nodes and the quotas.

Jobs get slots in the order of the queue (order.py). A job starts when `min_workers` slots are free at once. If they are
not, jobs behind it make room (victims.py): they give back what they have beyond their `min_workers`, or are preempted:
they stop after a step, with a checkpoint, and wait again. Jobs of an owner that holds more than its quota make room for
a job within its quota, too. If even that is not enough, the job waits for those before it, and meanwhile jobs behind it
may begin with their minimum on slots that it cannot use yet: they are preempted when it can. So a job begins, at the
latest, when those before it have ended and those behind it have left, and no slot is idle until then.

What is left when all jobs have their minimum goes to those that have fewer than `workers`, in the same order, as far as
no job before them waits. A job that needs more than all nodes together have waits outside the queue, until nodes come
with which it fits.

When the number of a job's workers on a node changes, they leave and come back together, so the job needs another node
on which it goes on meanwhile. On its only node a job keeps its slots, and its leader makes spares of the workers that
are too many (elastic/protocol/membership/planned_changes.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from elastic.fleet.documents import FleetJob, NodeShare, Placement
from elastic.fleet.queue.order import beyond_quota, ordered, within_quota
from elastic.fleet.queue.victims import PreemptibleJob, choose


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
    says what it waits for, in the order of the queue. lacking: running job -> why it does not have the size that an
    operator wants. larger: the waiting jobs that need more slots at once than all fitting nodes have. preempted:
    running job -> the job for which it has to leave."""

    placements: Mapping[str, Placement]
    waiting: Mapping[str, str]
    lacking: Mapping[str, str]
    larger: frozenset[str] = frozenset()
    preempted: Mapping[str, str] = field(default_factory=dict)


def schedule(
    jobs: Sequence[FleetJob],
    nodes: Collection[OfferedNode],
    gone: Collection[str],
    quotas: Mapping[str, int] | None = None,
    *,
    awaited: bool = False,
) -> Schedule:
    """jobs: in order of submission. gone: nodes that have not attended for so long that they lose their jobs; a node
    that is absent for a moment keeps them. A job whose nodes are all gone keeps them: it may have nothing else.
    quotas: owner -> slots. awaited: unknown nodes may come at any moment, so no job counts as larger than the fleet
    yet, and none is preempted.
    """
    return _Round([job for job in jobs if job.result is None], nodes, gone, quotas or {}, awaited).schedule()


class _Round:
    """Decides about all jobs that are not over, once."""

    def __init__(
        self,
        jobs: Sequence[FleetJob],
        nodes: Collection[OfferedNode],
        gone: Collection[str],
        quotas: Mapping[str, int],
        awaited: bool,
    ) -> None:
        by_name = {node.name: node for node in nodes}
        self._nodes = nodes
        self._gone = gone
        self._quotas = quotas
        self._awaited = awaited
        self._fit = {job.name: [node for node in nodes if node.labels >= set(job.spec.labels)] for job in jobs}
        self._larger = [job for job in jobs if self._is_larger(job)]
        self._jobs = ordered((job for job in jobs if job not in self._larger), quotas)
        self._within = within_quota(self._jobs, quotas)
        self._has = {job.name: _fewer(_kept(job, by_name, gone), job.workers) for job in jobs}
        """Job -> its shares."""
        self._free = {node.name: node.slots for node in nodes if node.takes}
        self._taking = set(self._free)
        self._coming = {node.name: node.slots for node in nodes if node.counts and node.away}
        """Node -> slots that will be free without anybody being asked."""
        away = set(self._coming)
        for job in jobs:
            for share in self._has[job.name]:
                _add(self._coming if share.node in away else self._free, share.node, -share.slots)
            if job.stop is not None:
                self._will_leave(job.name)
        self._begun: set[str] = set()
        self._first = ""
        """The first job that waits."""
        self._notes: dict[str, str] = {}
        """Job that waits -> what there is to say besides the slots that it needs."""
        self._preempted: dict[str, str] = {}

    def schedule(self) -> Schedule:
        for job in self._jobs:
            if job.waits and job.stop is None:
                self._begin_or_wait(job)
            elif job.runs and job.stop is None and job.name not in self._preempted:
                self._restore_minimum(job)
        for job in self._jobs:
            if job.name == self._first:
                break
            if job.stop is None and job.name not in self._preempted:
                self._grow(job, job.workers)
        waiting = {job.name: self._sentence(job) for job in self._jobs if job.name in self._notes}
        waiting |= {job.name: _too_large(job, self._fit[job.name]) for job in self._larger}
        placements = {
            job.name: Placement(self._has[job.name]) for job in self._jobs if job.runs or job.name in self._begun
        }
        lacking = {
            job.name: _why_not(placements[job.name], job.workers, self._first)
            for job in self._jobs
            if job.runs and job.stop is None and job.size is not None
            if placements[job.name].total != job.workers
        }
        larger = frozenset(job.name for job in self._larger)
        return Schedule(placements, waiting, lacking, larger, self._preempted)

    def _sentence(self, job: FleetJob) -> str:
        """What a job waits for, by what is free now that all others have theirs."""
        taking = [node for node in self._fit[job.name] if node.takes]
        free = {node.name: node.slots for node in taking}
        for share in (share for shares in self._has.values() for share in shares if share.node in free):
            free[share.node] -= share.slots
        note = self._notes[job.name]
        return _lack(job, {node: max(0, slots) for node, slots in free.items()}, taking) + (f"; {note}" if note else "")

    def _is_larger(self, job: FleetJob) -> bool:
        counted = _slots(node for node in self._fit[job.name] if node.counts)
        least = job.spec.min_workers
        return bool(self._nodes) and not self._awaited and job.waits and job.stop is None and counted < least

    def _begin_or_wait(self, job: FleetJob) -> None:
        least = job.spec.min_workers
        if self._awaited and self._first:
            self._notes[job.name] = f"behind {self._first} until all nodes have had time to come"
            return
        if sum(self._rest(job).values()) < least and not self._makes_room(job):
            self._first = self._first or job.name
            return
        self._begun.add(job.name)
        self._grow(job, least)

    def _restore_minimum(self, job: FleetJob) -> None:
        """A job that has lost nodes, and has less than its minimum now, does not train. Like a job that waits it may
        have slots of the jobs behind it."""
        least, had = job.spec.min_workers, self._has[job.name]
        if self._lacks(job) > 0 and all(share.node in self._gone for share in had):
            self._set(job.name, ())  # or it would get fewer than it needs, and lose these when it has others
        self._grow(job, least)
        if self._lacks(job) > 0:
            if self._makes_room(job):
                self._grow(job, least)
            self._notes.pop(job.name, None)
        if not self._has[job.name]:
            self._set(job.name, had)

    def _makes_room(self, job: FleetJob) -> bool:
        """Find slots for a job that does not fit. Returns whether it fits now; otherwise the slots that it needs are
        kept for it, if they will come."""
        least, fit = self._lacks(job), self._elsewhere(job)
        self._notes[job.name] = ""
        if sum(self._soon(fit).values()) >= least:
            self._keep_for(job, "those that come soon are kept for it")
            return False
        free = {node.name: self._free[node.name] + self._coming.get(node.name, 0) for node in fit if node.takes}
        victims = None if self._awaited else choose(least, free, list(self._candidates(job)))
        if victims is None:
            return False
        for name, shares in victims.smaller.items():
            self._set(name, shares)
        for name in victims.preempted:
            self._preempted[name] = job.name
            self._will_leave(name)
        if sum(self._rest(job).values()) >= least:
            del self._notes[job.name]
            return True
        self._keep_for(job, f"{' and '.join(victims.preempted)} will leave for it")
        return False

    def _candidates(self, job: FleetJob) -> Iterator[PreemptibleJob]:
        """The jobs that may be asked for slots, in the order of the queue."""
        held: dict[str, int] = {}
        for other in self._jobs:
            if other.stop is None and other.name not in self._preempted:
                _add(held, other.account, sum(share.slots for share in self._has[other.name]))
        over = beyond_quota(held, self._quotas) if job.name in self._within else {}
        helpful = {node.name for node in self._elsewhere(job)}
        behind = False
        for other in self._jobs:
            if other is job:
                behind = True
                continue
            shares, least = self._has[other.name], other.spec.min_workers
            if not shares or not other.runs or other.stop is not None or other.name in self._preempted:
                continue
            has = sum(share.slots for share in shares)
            if behind:
                yield PreemptibleJob(other.name, shares, _fewer(shares, min(has, least), helpful))
            elif other.account != job.account and other.account in over:
                kept = min(has, max(least, has - over[other.account]))
                alone = len(shares) == 1
                smaller = (NodeShare(shares[0].node, kept),) if alone else _fewer(shares, kept, helpful)
                yield PreemptibleJob(other.name, shares, smaller, whole=False, in_place=not alone)

    def _keep_for(self, job: FleetJob, because: str) -> None:
        """Let nobody behind it use as many slots as it needs: rather those that come than those that are free."""
        self._notes[job.name] = because
        wanted = self._lacks(job)
        for node in self._elsewhere(job):
            for slots in (self._coming, self._free):
                if (some := min(wanted, slots.get(node.name, 0))) > 0:
                    wanted -= some
                    _add(slots, node.name, -some)

    def _will_leave(self, job: str) -> None:
        """Count the slots of a job that leaves, where another one can get them."""
        for share in self._has[job]:
            if share.node in self._taking:
                _add(self._coming, share.node, share.slots)

    def _grow(self, job: FleetJob, wanted: int) -> None:
        """Give a job up to so many slots, if they are free. One that begins chooses its nodes anew."""
        had = self._has[job.name]
        if sum(share.slots for share in had) >= wanted or not (job.runs or job.name in self._begun):
            return
        if not job.runs:
            self._set(job.name, ())
        own = self._has[job.name]
        lacks = wanted - sum(share.slots for share in own)
        self._set(job.name, (*own, *_take(lacks, self._rest(job))))

    def _set(self, job: str, shares: tuple[NodeShare, ...]) -> None:
        for share in self._has[job]:
            _add(self._free, share.node, share.slots)
        for share in shares:
            _add(self._free, share.node, -share.slots)
        self._has[job] = shares

    def _lacks(self, job: FleetJob) -> int:
        """How many slots the job needs for its minimum."""
        return job.spec.min_workers - (sum(share.slots for share in self._has[job.name]) if job.runs else 0)

    def _elsewhere(self, job: FleetJob) -> list[OfferedNode]:
        """The nodes where the job may get slots: a job that runs grows on nodes on which it has none."""
        own = {share.node for share in self._has[job.name]} if job.runs else set()
        return [node for node in self._fit[job.name] if node.name not in own]

    def _rest(self, job: FleetJob) -> dict[str, int]:
        """The free slots on these nodes."""
        taking = (node.name for node in self._elsewhere(job) if node.takes)
        return {name: self._free[name] for name in taking if self._free[name] > 0}

    def _soon(self, fit: Collection[OfferedNode]) -> dict[str, int]:
        """The slots that are free, or will be, without anybody being asked."""
        counted = (node.name for node in fit if node.counts)
        return {name: max(0, self._free.get(name, 0) + self._coming.get(name, 0)) for name in counted}


def _add(slots: dict[str, int], to: str, count: int) -> None:
    slots[to] = slots.get(to, 0) + count


def _kept(job: FleetJob, nodes: Mapping[str, OfferedNode], gone: Collection[str]) -> tuple[NodeShare, ...]:
    """The shares that a job keeps."""
    staying = [share for share in job.shares if not (share.node in nodes and nodes[share.node].leaves)]
    there = tuple(share for share in staying if share.node not in gone)
    return there or tuple(staying)


def _fewer(shares: tuple[NodeShare, ...], wanted: int, first: Collection[str] = ()) -> tuple[NodeShare, ...]:
    """Reduce the shares to the number wanted, as far as possible. Whole nodes go first, those of `first` before others,
    the smallest before larger ones and of equals the newest; then a part of a node if another node stays as it is."""
    over = sum(share.slots for share in shares) - wanted
    kept = sorted(shares, key=lambda share: (share.node not in first, share.slots, -shares.index(share)))
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
    why = f"free slots go to {first}, which comes before it" if first else "no other node has free slots for it"
    return f"is to have {wanted} workers, and has {placement.total}: {why}"


def _take(wanted: int, free: Mapping[str, int]) -> Iterator[NodeShare]:
    """Yield free slots, from as few nodes as possible."""
    for node in sorted(free, key=lambda name: (-free[name], name)):
        if wanted > 0:
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
