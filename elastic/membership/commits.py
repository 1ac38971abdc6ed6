"""What a group does once its record is durable."""

from __future__ import annotations

from dataclasses import replace

from elastic.membership.actions import Action, Note
from elastic.membership.changes import plan_change
from elastic.membership.fencing import fence
from elastic.membership.group import Group, State
from elastic.membership.records import publish
from elastic.membership.speed import take_back_demotions
from elastic.membership.transitions import become_quiescing, become_rebuilding
from elastic.messages import Kind, RingState


def committed(g: Group, number: int, now_s: float, do: list[Action]) -> None:
    record = g.committing
    if record is None or record.number != number:
        return
    g.committing = None
    fields = {"generation": number, "kind": str(record.kind), "members": list(record.ids), "because": record.because}
    do.append(Note("committed", fields))
    if g.state is State.CLOSING:
        return
    if record.kind is Kind.PLANNED:
        g.chain = (*g.chain, record)
        g.planned_s = now_s
        if g.state is State.QUIESCING:
            become_quiescing(g, g.because, now_s, do)
        else:
            publish(g, record, do)
            plan_change(g, now_s, do)
        return
    if record.kind is Kind.FORM:
        g.applied = 0
    take_back_demotions(g, record)
    before, members = g.listed, set(record.ids)
    g.chain = (record,)
    g.reports = {}
    lost = [worker for worker in record.ids if worker in g.dead or worker in g.given_up]
    for worker in set(g.dead) - members:
        g.workers.discard(worker)
        for known in (g.dead, g.drains, g.expelled):
            known.pop(worker, None)
    newcomers = g.newcomers
    g.given_up = {worker: why for worker, why in g.given_up.items() if worker in members or worker in newcomers}
    g.asking, g.turned_away, g.stuck = set(), set(), set()
    g.lost, g.outdated, g.hung = "", set(), {}
    g.advanced_s = {}
    for worker, seen in g.workers.items():
        if worker in members:
            g.workers[worker] = replace(seen, entered=number, ring=RingState.BUILDING, ready=False)
        else:
            g.workers[worker] = replace(seen, ready=False, moved_s=now_s)  # a newcomer will say again that it is
    fence(g, sorted(worker for worker in before if worker in g.workers and worker not in members),
           record.because, now_s, do)  # fmt: skip
    publish(g, record, do)
    become_rebuilding(g, now_s, do)
    if lost:
        become_quiescing(g, f"{lost[0]} was lost while generation {number} was committed", now_s, do)
