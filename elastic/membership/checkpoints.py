"""Who may move the pointer to the newest checkpoint."""

from __future__ import annotations

from elastic.checkpoints.naming import EntryName, is_series
from elastic.checkpoints.pointer import Pointer
from elastic.membership.actions import Action, Note, Point
from elastic.membership.group import Group
from elastic.messages import CheckpointComplete


def checkpointed(g: Group, word: CheckpointComplete, do: list[Action]) -> None:
    """Only members that nobody has given up: a later generation may have taken newer ones than an expelled worker
    knows of. What it has completed stays a good checkpoint all the same."""
    worker, name = word.worker_id, EntryName.parse(word.entry)
    if name is None or not is_series(word.series):
        do.append(Note("pointer_refused", {"worker_id": worker, "entry": word.entry, "because": "no such name"}))
    elif worker not in g.listed or worker in {*g.dead, *g.given_up, *g.expelled}:
        because = "its writer is no member any more"
        do.append(Note("pointer_refused", {"worker_id": worker, "entry": word.entry, "because": because}))
    else:
        do.append(Point(word.series, Pointer(word.entry, worker, name.generation)))
