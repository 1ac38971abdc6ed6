"""How a generation is written down, and who is told of it."""

from __future__ import annotations

import hashlib

from elastic.membership.actions import Action, Commit, Note, Tell
from elastic.membership.group import Group
from elastic.messages import Generation, Kind, Member, Plan, Publish


def commit(
    g: Group,
    kind: Kind,
    members: tuple[Member, ...],
    plan: Plan,
    because: str,
    do: list[Action],
    *,
    hold: bool = False,
    early: bool = False,
    began: str = "",
) -> None:
    """began: of a form generation; the others are of the same run."""
    number = (g.top.number if g.top else 0) + 1
    base = g.chain[0].number if kind is Kind.PLANNED else number
    token = hashlib.sha256(f"{g.seed}/{g.term}/{number}".encode()).hexdigest()[:32]
    began = began or (g.top.began if g.top else "")
    g.committing = Generation(number, kind, base, members, plan, because, hold, token, early, began)
    do.append(Commit(g.committing))


def publish(g: Group, record: Generation, do: list[Action]) -> None:
    do.append(Tell(tuple(sorted(worker for worker in g.workers if worker not in g.dead)), Publish(g.term, record)))
    do.append(Note("published", {"generation": record.number, "kind": str(record.kind), "because": record.because}))


def told(g: Group) -> tuple[Generation, ...]:
    """What a worker has to know: the last loss generation, the running one, and what has been planned since."""
    assert g.running is not None
    return tuple(r for r in g.chain if r is g.base or r.number >= g.running.number)
