"""Pure decisions: rank order, who owns which units, who copies which result from whom, where to resume.

The record of a loss generation carries the whole outcome.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from elastic.checkpoints.naming import EntryName
from elastic.protocol import shard_assignment
from elastic.protocol.messages import Generation, Laggard, Member, Plan, Report, Share
from elastic.protocol.reduction_tree import Node, leaves


def rank_order(members: Iterable[Member]) -> tuple[Member, ...]:
    """Members in order of seniority: survivors keep their order and move up when an older member is lost."""
    return tuple(sorted(members, key=lambda member: (member.seniority, member.worker_id)))


def redo_shares(
    units: int,
    order: Sequence[str],
    roots: Mapping[str, Collection[Node]],
    running: Mapping[str, int | None],
    paces: Sequence[int] = (),
) -> tuple[Share, ...]:
    """What each member contributes to an interrupted operation; every unit exactly once.

    Finished roots and running units stay where they are. Of overlapping roots the largest is used (ties: the older
    member's), the others are dropped. Of the other units each member without a root and a running unit gets one first,
    the oldest member first: the leader runs what it has to run alone, and in a round with a quorum each member trains a
    replica (see outer_round). The rest go to the members that finish them first. paces: as in Plan.
    """
    covered: set[int] = set()
    keep: dict[str, list[Node]] = {worker: [] for worker in order}
    candidates = sorted(
        ((node, rank) for rank, worker in enumerate(order) for node in roots.get(worker, ())),
        key=lambda item: (item[0][0] - item[0][1], item[1], item[0]),
    )
    for node, rank in candidates:
        if covered.isdisjoint(range(*node)):
            covered.update(range(*node))
            keep[order[rank]].append(node)
    compute: dict[str, list[int]] = {worker: [] for worker in order}
    for worker in order:
        unit = running.get(worker)
        if unit is not None and unit not in covered:
            covered.add(unit)
            compute[worker].append(unit)
    known = paces if units >= len(order) else ()
    costs = dict(zip(order, shard_assignment.costs(known or [0] * len(order)), strict=True))
    ends = [
        (bool(roots.get(worker) or compute[worker]), (len(compute[worker]) + 1) * costs[worker], rank)
        for rank, worker in enumerate(order)
    ]
    heapq.heapify(ends)
    for unit in range(units):
        if unit not in covered:
            _, end, rank = ends[0]
            compute[order[rank]].append(unit)
            heapq.heapreplace(ends, (True, end + costs[order[rank]], rank))
    return tuple(Share(worker, tuple(sorted(keep[worker])), tuple(compute[worker])) for worker in order)


@dataclass(frozen=True, slots=True)
class LossPlan:
    """The members of the next loss generation, in rank order, and what they do first."""

    members: tuple[Member, ...]
    plan: Plan
    released: tuple[str, ...]
    """Drained members that have answered and belong to no list any more."""
    copied_step: int = -1
    """The step of the newcomers' copy from which the job goes on; -1: members hold the state."""
    dropped: tuple[str, ...] = ()
    """Survivors that are left out because others cannot reach them."""

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(member.worker_id for member in self.members)


@dataclass(frozen=True, slots=True)
class NotYet:
    """No decision yet: a record committed now could make a second history."""

    because: str


@dataclass(frozen=True, slots=True)
class AllLost:
    """No copy of the state answers, and no silent worker can hold one. op: the last operation known. newer: a sentence
    about what is kept of a later step than the copies that answer; "": nothing is."""

    op: int
    because: str
    newer: str = ""


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What counts besides reports when survivors are chosen.

    unbuilt: member lists whose ring failed to build twice. accused: worker -> peers that it could not reach. stuck:
    members that live and hold all others up. hung: members that make no progress and are being ended. kept: the newest
    checkpoint or snapshot from which the job can go on, or "". unheard: newcomers that have neither reported nor died.
    waited_out: the rings of all silent workers have parked, so nothing has to be waited for.
    """

    unbuilt: Collection[frozenset[str]] = ()
    accused: Mapping[str, Collection[str]] = field(default_factory=dict)
    stuck: Collection[str] = ()
    hung: Collection[str] = ()
    kept: str = ""
    unheard: Collection[str] = ()
    waited_out: bool = False


def decide_loss(
    chain: Sequence[Generation],
    reports: Mapping[str, Report],
    dead: Collection[str],
    newcomers: Mapping[str, Member],
    besides: Circumstances | None = None,
) -> LossPlan | NotYet | AllLost:
    """Members and plan of the next loss generation: the one rule for who survives.

    1. Survivors are those that have the state, by the reports (`_by_reports`).
    2. Without the smallest set of them that explains why their ring cannot be built.
    3. Without stuck members, unless nobody else has the state.
    4. Nobody yet, if all that remain are hung: they are being ended.
    5. Nobody, if only newcomers have copies and a newer state is kept.
    6. All is lost only when no newcomer is left that may have a copy.

    chain: the records from the last loss generation to the highest committed one, ascending. reports: fresh answers to
    the quiesce, by worker. dead: workers whose own agents say that they are gone. newcomers: workers in no record that
    could hold a copy of the state. besides: None if nothing else is known.
    """
    besides = besides or Circumstances()
    outcome = _by_reports(chain, reports, dead, newcomers)
    if isinstance(outcome, LossPlan) and (blocked := _unreachable(outcome.ids, besides)):
        reports = _without(reports, blocked)
        outcome = _by_reports(chain, reports, dead, newcomers)
        outcome = replace(outcome, dropped=blocked) if isinstance(outcome, LossPlan) else outcome
    if isinstance(outcome, LossPlan) and not set(besides.stuck).isdisjoint(outcome.ids):
        others = _by_reports(chain, _without(reports, besides.stuck), dead, newcomers)
        outcome = replace(others, dropped=outcome.dropped) if isinstance(others, LossPlan) else outcome
    if isinstance(outcome, LossPlan) and not besides.waited_out and set(besides.hung).issuperset(outcome.ids):
        return NotYet(f"nobody gets on: {', '.join(outcome.ids)} will be ended")
    kept = EntryName.parse(besides.kept)
    if isinstance(outcome, LossPlan) and kept is not None and 0 <= outcome.copied_step < kept.step:
        newer = f"newcomers have copied that of step {outcome.copied_step}, and {kept} is kept"
        outcome = AllLost(outcome.plan.op, "no member lives", newer)
    if isinstance(outcome, AllLost) and not besides.waited_out and besides.unheard:
        return NotYet(f"no member is left, and {', '.join(sorted(besides.unheard))} may hold a copy of the state")
    return outcome


def _without(reports: Mapping[str, Report], workers: Collection[str]) -> dict[str, Report]:
    return {worker: report for worker, report in reports.items() if worker not in workers}


def _unreachable(members: Sequence[str], besides: Circumstances) -> tuple[str, ...]:
    """The smallest set of members that covers the accusations; empty until the ring has failed to build twice."""
    if frozenset(members) not in besides.unbuilt:
        return ()
    accusations = {a: tuple(p for p in peers if p in members) for a, peers in besides.accused.items() if a in members}
    return smallest_cover(accusations, members)


def _by_reports(
    chain: Sequence[Generation], reports: Mapping[str, Report], dead: Collection[str], newcomers: Mapping[str, Member]
) -> LossPlan | NotYet | AllLost:
    """The members of the newest generation that any answering worker has entered, as far as they have the state. If no
    member has it, the newcomers with the newest copy."""
    reached = max((report.entered for report in reports.values()), default=0)
    for record in chain:
        # A worker that entered a later generation proves that every member of this ring was about to leave it. A record
        # without members has no ring, and needs no proof.
        proven = not record.ids or any(worker in reports or worker in dead for worker in record.ids)
        if record.number >= reached and not proven:
            return NotYet(f"no member of generation {record.number} has answered or is known dead")
    everybody = {member.worker_id: member for record in chain for member in record.members}
    entered = [reports[worker] for worker in everybody if worker in reports and reports[worker].entered > 0]
    holders = {report.worker_id for report in entered if report.has_state}
    chosen, copied_step = _newest_entered(chain, entered, holders) or holders, -1
    silent = [worker for worker in everybody if worker not in reports and worker not in dead]
    if chosen:
        members = rank_order(everybody[worker] for worker in chosen)
        reduced = {worker: reports[worker].reduced for worker in chosen}
    else:
        if silent:
            return NotYet(f"no copy of the state answers, and {', '.join(sorted(silent))} may hold one")
        began = chain[-1].began if chain else ""
        able = {w: r for w, r in reports.items() if w in everybody or w in newcomers}
        copies = {w: r.copied for w, r in able.items() if r.copied >= 0 and r.began == began}
        if not copies:
            last = max((record.plan.op for record in chain), default=0)
            return AllLost(last, "no living worker holds a copy of the state")
        newest = max(copies.values())
        chosen = {worker for worker, op in copies.items() if op == newest}
        members = rank_order((everybody | dict(newcomers))[worker] for worker in chosen)
        reduced = dict.fromkeys(chosen, newest)
        copied_step = max(reports[worker].copied_step for worker in chosen)
    released = tuple(sorted(holders - chosen))
    order = [m.worker_id for m in members]
    paces = paces_of(order, chain[-1] if chain else None)
    return LossPlan(members, _plan(order, reduced, reports, paces), released, copied_step)


def _newest_entered(chain: Sequence[Generation], entered: Sequence[Report], holders: set[str]) -> set[str]:
    """Holders of the state that are listed in the newest generation that any answering worker has entered."""
    for record in reversed(chain):
        if any(report.entered == record.number for report in entered):
            return holders.intersection(record.ids)
    return set()


def _plan(
    order: Sequence[str], reduced: Mapping[str, int], reports: Mapping[str, Report], paces: tuple[int, ...]
) -> Plan:
    """Where to resume, by the three rules for a failure in an operation."""
    op = max(reduced.values())
    behind = [worker for worker in order if reduced[worker] < op]
    stragglers = [worker for worker in behind if reduced[worker] < op - 1]
    if stragglers:
        raise AssertionError(f"members differ by more than one operation: {dict(reduced)}")
    sources = [worker for worker in order if reduced[worker] == op and reports[worker].kept == op - 1]
    laggards = tuple(Laggard(worker, sources[0] if sources else "") for worker in behind)
    ahead = [reports[worker] for worker in order if reduced[worker] == op]
    units = max((report.units for report in ahead), default=0)
    shares: tuple[Share, ...] = ()
    if units:
        begun = {report.worker_id: report for report in ahead if report.units == units}
        shares = redo_shares(
            units,
            order,
            {worker: report.roots for worker, report in begun.items()},
            {worker: report.running for worker, report in begun.items()},
            paces,
        )
    return Plan(op=op, units=units, shares=shares, laggards=laggards, paces=paces)


@dataclass(frozen=True, slots=True)
class KeptState:
    """What a job goes on from. holders: workers that can read it. memory: a snapshot on their machines; else a
    checkpoint."""

    entry: str
    holders: tuple[str, ...]
    memory: bool


def newest_kept(snapshots: Mapping[str, str], checkpoint: str, began: str) -> KeptState | None:
    """The newest snapshot or checkpoint, if its step is later than the one where the job began the last time.

    snapshots: worker -> the newest in the memory of its machine, or "". checkpoint: the newest on the storage, which
    every worker can read, or "". began: an entry, or "". If both are of the same step, the snapshot is chosen.
    """
    held = {worker: name for worker, entry in snapshots.items() if (name := EntryName.parse(entry)) is not None}
    newest, durable, before = max(held.values(), default=None), EntryName.parse(checkpoint), EntryName.parse(began)
    memory = newest is not None and (durable is None or newest.step >= durable.step)
    chosen = newest if memory else durable
    if chosen is None or chosen.step <= (before.step if before is not None else 0):
        return None
    holders = [worker for worker in snapshots if not memory or held.get(worker) == chosen]
    return KeptState(str(chosen), tuple(sorted(holders)), memory)


def default_units_of(worker_id: str, record: Generation, units: int) -> tuple[int, ...]:
    """The units that a member owns when no share of the plan says otherwise, in ascending order; may be empty.

    They depend on the record alone, so all members agree about them.
    """
    return leaves(_owned(record, units)[record.ids.index(worker_id)])


def default_sizes(record: Generation, units: int) -> tuple[int, ...]:
    """How many units each member owns, in rank order."""
    return shard_assignment.sizes(_owned(record, units))


def _owned(record: Generation, units: int) -> tuple[tuple[Node, ...], ...]:
    return shard_assignment.owned(units, record.plan.paces, hosts_of(record), record.plan.slack)


def hosts_of(record: Generation) -> tuple[str, ...]:
    """The address of each member's machine, in rank order."""
    return tuple(member.host for member in record.members)


def paces_of(order: Iterable[str], record: Generation | None) -> tuple[int, ...]:
    """Plan.paces of the generation that follows a record, for these members."""
    known = dict(zip(record.ids, record.plan.paces, strict=True)) if record and record.plan.paces else {}
    paces = tuple(known.get(worker, 0) for worker in order)
    return paces if any(paces) else ()


def smallest_cover(accusations: Mapping[str, Collection[str]], order: Sequence[str]) -> tuple[str, ...]:
    """The smallest set of workers that touches every accused link; ties drop the youngest.

    accusations: worker -> peers it could not reach. order: workers, oldest first. The search is exponential in the size
    of the answer; above 4 workers the cover is greedy: the worker with the most links, repeatedly.
    """
    links = {frozenset((a, b)) for a, peers in accusations.items() for b in peers if a != b}
    involved = sorted({worker for link in links for worker in link}, key=order.index, reverse=True)
    for size in range(1, min(4, len(involved)) + 1):
        for chosen in combinations(involved, size):
            if all(link.intersection(chosen) for link in links):
                return chosen
    cover: list[str] = []
    while links:
        worst = max(involved, key=lambda worker: sum(worker in link for link in links))
        cover.append(worst)
        links = {link for link in links if worst not in link}
    return tuple(sorted(cover, key=order.index, reverse=True))
