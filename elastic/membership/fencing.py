"""Those whom a later generation left out: told so, left alone for a while, then ended."""

from __future__ import annotations

from collections.abc import Iterable

from elastic.membership.actions import Action, Note, Tell
from elastic.membership.group import Group
from elastic.messages import Fence, Kill, Release


def fence(g: Group, workers: Iterable[str], because: str, now_s: float, do: list[Action]) -> None:
    """Left alone for fence_grace: one that thaws within it finds itself fenced. Drained and newcomers are not."""
    for worker in workers:
        seen = g.workers[worker]
        if seen.left or worker in g.drains:
            do.append(Tell((worker,), Release(g.term, worker)))
        elif seen.entered:
            if worker not in g.expelled:
                g.expelled[worker] = now_s
                do.append(Note("expelled", {"worker_id": worker, "because": because}))
            do.append(Tell((worker,), Fence(g.term, worker, because)))


def kill_expelled(g: Group, now_s: float, do: list[Action]) -> None:
    """fence_grace is over and a later generation has completed a step."""
    base = g.base
    if (
        not g.expelled
        or base is None
        or not any(g.workers[w].reduced > base.plan.op for w in base.ids if w in g.workers)
    ):
        return
    for worker, since in list(g.expelled.items()):
        if now_s >= since + g.spec.timing.fence_grace_s:
            del g.expelled[worker]
            do.append(Note("kill", {"worker_id": worker, "because": "fenced and fence_grace is over"}))
            do.append(Tell((worker,), Kill(g.term, worker)))
