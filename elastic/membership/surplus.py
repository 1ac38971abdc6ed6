"""More members than somebody wants the job to have: the youngest become spares on nodes that stay.

A fleet takes back whole nodes, or a part of one while the job goes on elsewhere (elastic/fleet/schedule.py). Whom it
leaves because the job is nowhere else trains no more: that is decided here, when the fleet has had its time.
"""

from __future__ import annotations

import math

from elastic.membership.actions import Action, Note
from elastic.membership.changes import plan_change
from elastic.membership.group import Group, Leaver, State
from elastic.plan import rank_order


def shed(g: Group, now_s: float, do: list[Action]) -> None:
    """After a member's word."""
    running = g.running
    if not g.size or running is None or len(running.ids) <= g.wanted_workers:
        return
    if g.state is not State.RUNNING or g.committing is not None or g.top is not running:
        return  # a change is under way
    if now_s < g.resized_s + g.spec.timing.uneven_s or g.drains.keys() & set(running.ids):
        return
    because = f"the job is to have {g.wanted_workers} workers"
    for member in rank_order(running.members)[g.wanted_workers :]:
        g.drains[member.worker_id] = Leaver(because, math.inf, demoted=True)
        do.append(Note("surplus", {"worker_id": member.worker_id, "because": because}))
    plan_change(g, now_s, do)
