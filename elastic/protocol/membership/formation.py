"""A leader's start, workers that announce themselves, and the first generation."""

from __future__ import annotations

import itertools
import math

from elastic.protocol.membership import transitions
from elastic.protocol.membership.events import Action, Elected, Note, Tell
from elastic.protocol.membership.group import Group, Leaver, State
from elastic.protocol.membership.partitions import not_found_yet
from elastic.protocol.membership.planned_changes import plan_change, settle, take_effect
from elastic.protocol.membership.restore import founders, is_spare, revive, turn_out, waits_for_starting
from elastic.protocol.membership.ring_reports import end_rebuilding
from elastic.protocol.membership.roster import ARCS, Stage, WorkerView
from elastic.protocol.membership.verdicts import refuse_if_excluded
from elastic.protocol.messages import Announce, Close, Kill, Kind, Member, Plan, Publish, Quiesce, RingState


def elected(g: Group, event: Elected, now_s: float, do: list[Action]) -> None:
    """Adopt the durable records. Everything else is learned again from the announcements of agents."""
    g.term, g.chain = event.term, event.chain
    if not g.chain:
        transitions.become(g, State.FORMING, f"waiting for {g.asked_for} workers", now_s, do)
        return
    assert g.top is not None
    absent = not_found_yet(g, now_s)
    for record in g.chain:
        for member in record.members:
            g.youngest = max(g.youngest, member.seniority)
            g.workers[member.worker_id] = WorkerView(member, slot=-1, pid=0, numerics="", stage=Stage.NAMED)
            g.silent_nodes[member.node] = absent
    by_home: dict[int, Member] = {}
    for member in sorted((m for m in g.top.members if m.home >= 0), key=lambda member: member.seniority):
        if (older := by_home.get(member.home)) is not None:  # it had to leave when the other one got its number
            g.drains[older.worker_id] = Leaver(f"{member.worker_id} has its RANK", math.inf, demoted=True)
        by_home[member.home] = member
    g.planned_s = g.elected_s = now_s
    settle(g, f"adopted generation {g.top.number}", now_s, do)


def announced(g: Group, word: Announce, now_s: float, do: list[Action]) -> None:
    known, running = g.workers.get(word.worker_id), g.running
    seniority = known.member.seniority if known else g.take_seniority()
    listed = next((r.member(word.worker_id) for r in g.chain if r.member(word.worker_id)), None)
    home = known.member.home if known else word.home
    member = listed or Member(word.worker_id, word.node, word.host, word.port, seniority, home)
    seen = WorkerView(
        member, word.slot, word.pid, word.numerics, word.entered, word.ring, word.reduced, moved_s=now_s,
        stage=_stage_of(word, known), expelled_s=known.expelled_s if known else 0.0, snapshot=word.snapshot,
        shard_us=known.shard_us if known else 0, exchange_us=known.exchange_us if known else 0,
    )  # fmt: skip
    g.workers[word.worker_id] = seen
    g.silent_nodes.pop(word.node, None)
    if not word.entered:
        g.given_up.pop(word.worker_id, None)
    if not known:
        do.append(Note("announced", {"worker_id": word.worker_id, "pid": word.pid, "entered": word.entered}))
    if g.state is State.CLOSING:
        transitions.dismiss(g, [word.worker_id], do)
        return
    if word.entered and not listed and g.chain:
        transitions.fence(g, (word.worker_id,), "a later generation exists without this worker", now_s, do)
        return
    if (strange := _strange_numerics(g, seen)) is not None:
        _refuse(g, word.worker_id, strange, now_s, do)
        return
    if seen.stage is Stage.REFUSED:
        do.append(Tell((word.worker_id,), Kill(g.term, word.worker_id)))  # the first order may have been lost
        return
    if refuse_if_excluded(g, word.worker_id, do):
        return
    if listed is None and (other := transitions.with_its_home(g, seen)):
        turn_out(g, word.worker_id, f"{other} has got its RANK from another leader", now_s, do)
        return
    if g.state is State.FORMING and word.entered and g.chain:
        transitions.become_quiescing(g, f"{word.worker_id} holds the state after all", now_s, do)
        return
    if g.state is State.FORMING:
        if g.lost and word.invited:
            turn_out(g, word.worker_id, g.lost, now_s, do)  # it was invited before the loss; nobody has been since
        form(g, now_s, do)
        return
    if listed is None:
        transitions.give_home(g, word.worker_id, do)
    # What it has entered it knows: thousands who find a new leader are told nothing but what they lack.
    lacks = (record for record in transitions.told(g) if record.number > word.entered)
    do.extend(Tell((word.worker_id,), Publish(g.term, record)) for record in lacks)
    if g.state is State.QUIESCING:
        assert g.top is not None
        do.append(Tell((word.worker_id,), Quiesce(g.term, g.round, g.top.number)))
    elif word.ring is RingState.ABORTED and _is_stranded(g, word):
        transitions.become_quiescing(g, f"the ring of {word.worker_id} is aborted", now_s, do)
    else:
        end_rebuilding(g, now_s, do)
        take_effect(g, running, now_s, do)
        plan_change(g, now_s, do)


def _stage_of(word: Announce, known: WorkerView | None) -> Stage:
    """The stage of a worker that announces itself. If the agent's word does not fit the stage known here, the known
    stage holds: an agent cannot tell who has finished or left, is refused or expelled."""
    said = Stage.READY if word.ready else Stage.INVITED if word.invited else Stage.ANNOUNCED
    said = Stage.MEMBER if word.entered else said
    return said if known is None or said in ARCS[known.stage] else known.stage


def _is_stranded(g: Group, word: Announce) -> bool:
    """Whether a worker's aborted ring needs a quiesce; not while base is built and the worker has yet to enter it."""
    return not (g.state is State.REBUILDING and g.base is not None and word.entered < g.base.number)


def _strange_numerics(g: Group, seen: WorkerView) -> str | None:
    """Why this worker would compute other bits than the members do, or None."""
    if not g.spec.reduction.stable:
        return None
    listed = (worker for record in g.chain for worker in record.ids)
    # The one that could be compared with last comes first: a new leader of thousands has heard of few of them yet.
    for worker in itertools.chain((g.comparable,), listed if g.chain else g.workers):
        other = g.workers.get(worker)
        if other is None or other is seen or not other.numerics or other.stage is Stage.REFUSED:
            continue
        g.comparable = worker
        if other.numerics != seen.numerics:
            return f"its numerics ({seen.numerics}) differ from those of {worker} ({other.numerics})"
        return None  # all others have the same numerics, or they would have been refused
    return None


def _refuse(g: Group, worker: str, because: str, now_s: float, do: list[Action]) -> None:
    """Refuse a worker. While the job forms, this ends the job; later only that newcomer is turned away."""
    do.append(Note("refused", {"worker_id": worker, "because": because}))
    if g.state is State.FORMING:
        advice = "run all workers on the same torch, thread count and CPU capability, or use --reduction allreduce"
        transitions.become_closed(g, 2, f"{worker} cannot take part in an exact job: {because}; {advice}", now_s, do)
        return
    transitions.heard_to_be(g, worker, Stage.REFUSED)
    do.append(Tell((worker,), Close(g.term, f"refused: {because}", 2)))


def form(g: Group, now_s: float, do: list[Action]) -> None:
    """Commit the first generation once all workers are here, or at least min_workers after the join window.

    Below quorum the job goes on waiting for processes that are starting. Devices go by slot, so a node's last slots,
    which are its spares, become members only after the window.
    """
    if g.lost:
        revive(g, now_s, do)
        return
    if g.committing is not None or (len(g.workers) < g.asked_for and not g.window_over):
        return
    present = [seen for worker, seen in g.workers.items() if worker not in g.dead and worker not in g.given_up]
    spares = [seen for seen in present if is_spare(g, seen)]
    if len(present) < g.spec.min_workers or (not g.window_over and len(present) - len(spares) < g.asked_for):
        if g.window_over:
            _wait_or_close(g, len(present), now_s, do)
        return
    members = founders(g, present)
    because = f"{len(members)} of {g.asked_for} workers are here" + (", the join window is over" * g.window_over)
    transitions.commit(g, transitions.NextGeneration(Kind.FORM, members, Plan(), because), do)


def _wait_or_close(g: Group, present: int, now_s: float, do: list[Action]) -> None:
    if waits_for_starting(g, f"{present} of at least {g.spec.min_workers} workers are here", now_s, do):
        return
    limit_s = g.spec.timing.orphan_limit_s
    nobody = not g.slots and not g.workers  # on a busy machine agents take longer to start than the window lasts
    if nobody and now_s < g.since_s + limit_s:
        return
    when = f"within {limit_s:.0f} s" if g.starting or nobody else "within the join window"
    because = f"only {present} of at least {g.spec.min_workers} workers came {when}"
    transitions.become_closed(g, 3, because, now_s, do)
