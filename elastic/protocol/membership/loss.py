"""Losses: the lost members, the reports of the survivors, and the generation that follows."""

from __future__ import annotations

from elastic.protocol.membership.closing import close_rest
from elastic.protocol.membership.events import Action, Note
from elastic.protocol.membership.group import AwaitedSlot, Group, State
from elastic.protocol.membership.partitions import is_absence, not_found_yet
from elastic.protocol.membership.planned_changes import close_if_all_left, holds, plan_change
from elastic.protocol.membership.restore import LOST_ROUNDS, go_back, kept_badly, kept_to_go_back_to
from elastic.protocol.membership.roster import Stage, slot_of
from elastic.protocol.membership.transitions import NextGeneration, become_closed, become_quiescing, commit
from elastic.protocol.messages import Kind, Report
from elastic.protocol.recovery_plan import AllLost, Circumstances, LossPlan, NotYet, decide_loss

BUILDS = 2
"""After this many failed builds of a ring of the same members, other members are chosen."""

GONE_SHOWN = 4
"""The number of members, and of causes, that are named when all members are lost."""


def lost(
    g: Group, worker: str, because: str, now_s: float, do: list[Action], *, dead: bool, snapshot: str = ""
) -> None:
    """A worker is dead or given up. snapshot: the newest snapshot of a dead worker's machine, as in WorkerDead."""
    seen = g.workers.get(worker)
    if seen is None:
        return
    because = g.hung.get(worker, because) if dead else because
    raised = next((word.place for word, _ in g.failures.errors.values() if word.worker_id == worker), "")
    because += f" at {raised}" if dead and raised else ""
    if worker not in g.dead:
        event = "worker_gone" if seen.stage is Stage.LEFT else "member_lost" if g.lists(worker) else "worker_lost"
        about: dict[str, object] = {"worker_id": worker, "because": because}
        if event == "member_lost":
            hung = worker in g.hung if dead else not is_absence(because, seen.member.node)
            about |= {"rank": _rank(g, worker), "hung": hung}
        do.append(Note(event, about))
    if dead:
        if seen.entered and now_s - seen.heard_s > g.timing.evict_s:
            g.applied = -1  # what it has done since then is not known
        if seen.stage is Stage.READY:
            g.missed[slot_of(worker)] = g.missed.get(slot_of(worker), 0) + 1
        if worker in g.hung:
            g.reports.pop(worker, None)  # its state died with it, and no member is left to notice that
        g.dead[worker] = because
        g.snapshots[seen.member.node] = snapshot
        g.given_up.pop(worker, None)
    elif worker in g.dead or seen.stage is Stage.EXPELLED:
        return
    else:
        g.given_up[worker] = because
    awaited = g.committing is not None and worker in g.committing.ids
    if waited_for := g.awaited.asked and g.awaited.slot == slot_of(worker):
        g.awaited = AwaitedSlot()
    if g.state is State.FORMING or not g.lists(worker):
        if waited_for:
            plan_change(g, now_s, do)
        if dead and not awaited:
            del g.workers[worker]
            g.drains.pop(worker, None)
            if not g.lists(worker):
                del g.dead[worker]
        return
    if g.state is State.CLOSED:
        return
    if g.state is State.CLOSING:
        close_rest(g, now_s, do)
    elif g.state is State.QUIESCING:
        decide(g, now_s, do)
    elif g.running is not None and not g.running.ids:
        close_if_all_left(g, now_s, do)
    elif seen.stage not in (Stage.LEFT, Stage.FINISHED) or not g.alive(g.listed):
        if _in_effect(g, worker) or not g.alive(g.listed):
            become_quiescing(g, f"{worker} lost: {because}", now_s, do)
            decide(g, now_s, do)  # if it was the last, no word of another worker follows
        else:
            plan_change(g, now_s, do)


def _rank(g: Group, worker: str) -> int:
    """In the running generation; of a worker that is in a later one only, in that."""
    records = [record for record in (g.running, *reversed(g.chain)) if record is not None and worker in record.ids]
    return records[0].ids.index(worker)


def _in_effect(g: Group, worker: str) -> bool:
    """Whether a live member is in a ring together with this worker."""
    entered = {s.entered for w, s in g.workers.items() if w != worker and w not in g.dead and s.stage is not Stage.LEFT}
    return any(worker in r.ids for r in g.chain if r.number in entered or r is g.running)


def reported(g: Group, word: Report, now_s: float, do: list[Action]) -> None:
    """Take a report. A worker that promised to enter nothing up to the highest number cannot move, whatever its
    round."""
    if g.top is None or word.promise < g.top.number or word.worker_id not in g.workers:
        return
    g.given_up.pop(word.worker_id, None)
    if g.state is State.QUIESCING:
        g.reports[word.worker_id] = word
        if g.running is not None:
            g.failures = g.failures.and_broke_at(g.running.number, g.running.ids, word.reduced)
        decide(g, now_s, do)
    elif g.state in (State.RUNNING, State.PAUSED, State.REBUILDING, State.FORMING) and word.worker_id in g.listed:
        become_quiescing(g, f"{word.worker_id} has left its ring", now_s, do)


def decide(g: Group, now_s: float, do: list[Action], *, waited_out: bool = False) -> None:
    """Choose members and plan of the next generation, once every worker asked has reported, died or been given up.

    waited_out: a ring of silent members has parked by now, so they count as dead.
    """
    if g.committing is not None:
        return
    if not waited_out and len(g.reports) + len(g.dead) + len(g.given_up) < len(g.chain[-1].ids):
        return  # nearly always, and told without a look at everybody
    settled = {*g.reports, *g.dead, *g.given_up}
    if not (waited_out or settled >= g.listed):
        return
    newcomers = {worker: g.workers[worker].member for worker in g.newcomers - g.listed}
    besides = Circumstances(
        unbuilt={members for members, builds in g.failed_builds.items() if len(builds) >= BUILDS},
        accused=g.accused,
        stuck=g.stuck,
        hung=g.hung,
        kept=kept_to_go_back_to(g),
        unheard=newcomers.keys() - settled,
        waited_out=waited_out,
    )
    dead = g.listed - set(g.reports) if waited_out else set(g.dead)
    outcome = decide_loss(g.chain, g.reports, dead, newcomers, besides)
    if not isinstance(outcome, NotYet):
        do.append(Note("quiesce_complete", {"round": g.round, "reports": sorted(g.reports), "dead": sorted(g.dead)}))
    match outcome:
        case NotYet(because):
            if because != g.because:
                g.because = because
                do.append(Note("state", {"state": str(g.state), "because": because}))
        case AllLost(_, because, newer):
            applied = max((seen.applied for seen in g.workers.values()), default=0)
            applied = max(applied, g.applied)
            said = f"every copy of the state is lost after {applied} applied steps" * (not g.spec.restart)
            said = f"{said or 'all members are lost'}: {_gone(g) or because}"
            said += f"; {newer}" if newer else ""
            said += f"; {kept_badly(damaged)}" if (damaged := g.unreadable.get(g.began)) else ""
            if not go_back(g, said, now_s, do):
                if g.spec.restart and g.anew.times >= LOST_ROUNDS:
                    said += (
                        f"; {g.anew.times} rounds in a row ended so within a minute: the scripts may need more memory"
                    )
                become_closed(g, 1 if g.raised else 4, _with_error(g, said), now_s, do)
        case LossPlan(members, plan):
            if outcome.dropped:
                do.append(Note("dropped_unreachable", {"workers": list(outcome.dropped)}))
            short = len(members) < g.spec.min_workers
            if short and not g.spec.replace:
                because = f"{len(members)} of at least {g.spec.min_workers} workers are left, and none is replaced"
                become_closed(g, 3, because, now_s, do)
                return
            hold = holds(g, {member.worker_id for member in members})
            commit(g, NextGeneration(Kind.LOSS, members, plan, g.because, hold=hold), do)


def wait_for_others(g: Group, now_s: float) -> None:
    """Restart the silence of all nodes if all were given up and the first agent is back: what cut them off may be over
    for the others in the same moment."""
    if g.state is not State.QUIESCING or len(g.dead) + len(g.given_up) < len(g.chain[-1].ids):
        return  # nearly always, and told without a look at everybody
    if not {*g.dead, *g.given_up} >= g.listed:
        return
    absent = not_found_yet(g, now_s)
    for worker, why in list(g.given_up.items()):
        node = g.workers[worker].member.node
        if is_absence(why, node):
            del g.given_up[worker]
            g.silent_nodes[node] = absent


def _gone(g: Group) -> str:
    """What has become of the members, the first cause first; only GONE_SHOWN members and causes."""
    by_cause: dict[str, list[str]] = {}
    for worker, because in (g.dead | g.given_up).items():
        seen = g.workers.get(worker)  # a worker that dies while the job forms again is not kept there
        if worker in g.listed and (seen is None or seen.stage is not Stage.LEFT):
            by_cause.setdefault(because, []).append(worker)
    few = list(by_cause.items())[:GONE_SHOWN]
    return "; ".join(f"{', '.join(sorted(workers)[:GONE_SHOWN])}{', ...' * (len(workers) > GONE_SHOWN)} ({because})"
                     for because, workers in few)  # fmt: skip


def _with_error(g: Group, because: str) -> str:
    return f"the script raised {g.raised.place}; {because}\n{g.raised.message}" if g.raised is not None else because
