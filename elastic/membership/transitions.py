"""The only places which change the state of a group; each says why."""

from __future__ import annotations

from collections.abc import Iterable

from elastic.membership.actions import Action, End, Note, Tell
from elastic.membership.group import Group, State
from elastic.messages import Close, Quiesce, Release


def become_forming(g: Group, because: str, now_s: float, do: list[Action]) -> None:
    _become(g, State.FORMING, because, now_s, do)


def become_quiescing(g: Group, because: str, now_s: float, do: list[Action]) -> None:
    """Everybody of every generation that may have taken effect leaves its ring and reports afresh."""
    assert g.top is not None
    if g.state is not State.QUIESCING:
        do.append(Note("quiesce_started", {"because": because, "generation": g.top.number}))
        g.quiesced_s = now_s
    _become(g, State.QUIESCING, because, now_s, do)
    g.round += 1
    g.reports = {}
    do.append(Tell(g.alive(g.listed | g.newcomers), Quiesce(g.term, g.round, g.top.number)))


def become_rebuilding(g: Group, now_s: float, do: list[Action]) -> None:
    assert g.top is not None
    g.up = 0
    _become(g, State.REBUILDING, g.top.because, now_s, do)


def become_running(g: Group, because: str, now_s: float, do: list[Action]) -> None:
    _become(g, State.RUNNING, because, now_s, do)


def become_paused(g: Group, now_s: float, do: list[Action]) -> None:
    assert g.running is not None
    members = len(g.running.members)
    because = f"below quorum: {members} of at least {g.spec.min_workers} workers; waiting for replacements"
    if members >= g.spec.min_workers:
        because = g.running.because
    if (g.state, g.because) != (State.PAUSED, because):
        _become(g, State.PAUSED, because, now_s, do)


def become_closing(g: Group, now_s: float, do: list[Action]) -> None:
    _become(g, State.CLOSING, "a member has finished", now_s, do)
    dismiss(g, g.alive({w for w in g.newcomers if g.base is None or w not in g.base.ids}), do)


def become_closed(g: Group, exit_code: int, because: str, now_s: float, do: list[Action]) -> None:
    _become(g, State.CLOSED, because, now_s, do)
    alive = tuple(worker for worker in g.workers if worker not in g.dead)
    if alive:
        do.append(Tell(alive, Close(g.term, because, exit_code)))
    do.append(End(exit_code, because, g.digest if exit_code == 0 else ""))


def _become(g: Group, state: State, because: str, now_s: float, do: list[Action]) -> None:
    if (state, because) != (g.state, g.because):
        do.append(Note("state", {"state": str(state), "because": because}))
    g.state, g.because, g.since_s = state, because, now_s


def dismiss(g: Group, workers: Iterable[str], do: list[Action]) -> None:
    """Members and newcomers learn that the job is complete; whoever was draining leaves without its last result."""
    for worker in workers:
        draining = g.running is not None and g.lists(worker) and not g.running.member(worker)
        order = Release(g.term, worker) if draining else Close(g.term, "the job is complete")
        do.append(Tell((worker,), order))
