"""An invitation holds a place while its newcomer sets itself up; one that gets nowhere gives the place back."""

from __future__ import annotations

from dataclasses import replace

from elastic.membership.actions import Action, Note, Tell
from elastic.membership.group import Group
from elastic.messages import Kill


def end_hung(g: Group, now_s: float, do: list[Action]) -> None:
    """A process lives and beats although its script waits for ever: end it, so that its slot gets another one. Its
    place is free at once, for a spare that is set up.
    """
    patience_s = g.set_up_s
    for worker in sorted(worker for worker, since in g.setting_up.items() if now_s >= since + patience_s):
        seen = g.workers[worker]
        because = f"invited, and not ready after {patience_s:.0f} s in the same phase: {seen.phase or 'starting'}"
        do.append(Note("newcomer_hung", {"worker_id": worker, "because": because}))
        do.append(Tell((worker,), Kill(g.term, worker)))
        g.workers[worker] = replace(seen, refused=True)
