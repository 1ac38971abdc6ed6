"""`step`, `advance`: every event to the one function that knows what it means."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import replace

from elastic.errors import ExitCode
from elastic.membership.actions import Action, Note
from elastic.membership.arrivals import announced, elected, form
from elastic.membership.changes import (
    drain_is_over,
    invite_spares,
    left,
    plan_change,
    progressed,
    stop_in_order,
    wished_to_drain,
)
from elastic.membership.checkpoints import checkpointed
from elastic.membership.commits import committed
from elastic.membership.deadlines import ticked
from elastic.membership.ending import failed, finished, slot_given_up
from elastic.membership.events import (
    AgentDown,
    AgentUp,
    CommitRefused,
    Committed,
    Elected,
    Event,
    PointerAt,
    Resized,
    Stopped,
    Tick,
)
from elastic.membership.group import Group, State
from elastic.membership.invitations import wait_for_slow
from elastic.membership.losses import lost, reported, wait_for_others
from elastic.membership.revival import unreadable
from elastic.membership.rings import heard_of_ring
from elastic.membership.seen import Roster
from elastic.membership.silence import fell_silent, silence
from elastic.membership.speed import compare
from elastic.membership.stuck import expel_if_stuck
from elastic.membership.surplus import shed
from elastic.membership.transitions import become_closed
from elastic.messages import (
    Announce,
    BuildFailed,
    CheckpointComplete,
    DrainOver,
    DrainWish,
    Failed,
    Finished,
    Left,
    Progress,
    Ready,
    Report,
    RingBroken,
    RingUp,
    SlotGivenUp,
    Unreadable,
    WorkerDead,
    WorkerFrozen,
)


def step(group: Group, event: Event, now_s: float) -> tuple[Group, tuple[Action, ...]]:
    """Apply one event at ``now_s`` (the leader's monotonic clock). Old words are ignored, not errors."""
    g = _copied(group)
    return g, advance(g, (event,), now_s)


def advance(g: Group, events: Iterable[Event], now_s: float) -> tuple[Action, ...]:
    """One `step` after the other, for an owner that needs no group of before: it is this one that changes, and its
    spares are looked at once. With thousands of workers a copy with every few words would be most of the work."""
    actions: list[Action] = []
    freed = False
    for event in events:
        if g.state is State.CLOSED:
            break
        before = g.chain, g.state
        _apply(g, event, now_s, actions)
        freed |= not isinstance(event, Progress) or (g.chain, g.state) != before
    if freed and g.state is not State.CLOSED:  # what frees a place is news of another kind
        invite_spares(g, now_s, actions)
    return tuple(actions)


def _copied(group: Group) -> Group:
    g = copy(group)
    g.workers = Roster(group.workers)
    for name in ("dead", "given_up", "silent_nodes", "attended_s", "slots", "expelled", "reports", "drains"):
        setattr(g, name, dict(getattr(group, name)))
    for name in ("missed", "advanced_s", "accused", "failed_builds", "errors", "slots_given_up", "stuck_at"):
        setattr(g, name, dict(getattr(group, name)))
    for name in ("snapshots", "unreadable"):
        setattr(g, name, dict(getattr(group, name)))
    for name in ("slow_since_s", "stragglers", "demoted_s"):
        setattr(g, name, dict(getattr(group, name)))
    for name in ("asking", "turned_away", "in_vain", "stuck", "outdated"):
        setattr(g, name, set(getattr(group, name)))
    return g


def _apply(g: Group, event: Event, now_s: float, do: list[Action]) -> None:
    match event:
        case Elected():
            elected(g, event, now_s, do)
        case AgentUp(node, slots):
            wait_for_others(g, now_s)
            g.silent_nodes.pop(node, None)
            g.attended_s[node] = now_s
            g.slots[node] = slots or g.slots.get(node, 0)
            if slots:  # a stream begins: which slots are given up it says again, and a new agent tries them all
                given_up = g.slots_given_up.items()
                g.slots_given_up = {slot: why for slot, why in given_up if slot.rpartition(".")[0] != node}
            # Its workers report now, or it says what became of them; deciding on the first report would expel the rest.
            g.given_up = {worker: why for worker, why in g.given_up.items() if why != silence(node)}
        case AgentDown(node, silent_s):
            fell_silent(g, node, silent_s, now_s)
        case Committed(number):
            committed(g, number, now_s, do)
        case CommitRefused(number, because):
            do.append(Note("commit_refused", {"number": number, "because": because}))
            g.committing = None
        case Announce():
            announced(g, event, now_s, do)
        case Report():
            reported(g, event, now_s, do)
        case RingUp() | RingBroken() | BuildFailed():
            heard_of_ring(g, event, now_s, do)
        case Progress():
            progressed(g, event, now_s, do)
            compare(g, now_s, do)
            expel_if_stuck(g, event.worker_id, now_s, do)
            shed(g, now_s, do)
        case Ready(worker, _, outdated):
            if worker in g.workers:
                g.workers[worker] = replace(g.workers[worker], ready=True)
                g.asking.add(worker)
                g.given_up.pop(worker, None)
                wait_for_slow(g, worker, outdated, now_s, do)
                plan_change(g, now_s, do)
        case DrainWish():
            wished_to_drain(g, event, now_s, do)
        case DrainOver():
            drain_is_over(g, event, now_s, do)
        case Left():
            left(g, event, now_s, do)
        case WorkerDead(worker, because, snapshot):
            lost(g, worker, because, now_s, do, dead=True, snapshot=snapshot)
        case WorkerFrozen(worker, because):
            lost(g, worker, because, now_s, do, dead=False)
        case Failed():
            failed(g, event, now_s, do)
        case Finished():
            finished(g, event, now_s, do)
        case SlotGivenUp():
            slot_given_up(g, event, now_s, do)
        case CheckpointComplete():
            checkpointed(g, event, do)
        case Unreadable():
            unreadable(g, event, do)
        case PointerAt(entry):
            known = g.unreadable.get(entry)
            g.checkpoint = known.instead if known and not known.memory else entry
        case Resized(workers):
            g.size, g.resized_s = workers, now_s
            do.append(Note("resized", {"workers": workers}))
            if g.state is State.FORMING:
                form(g, now_s, do)
            else:
                plan_change(g, now_s, do)
        case Stopped(because, at_once=True):
            become_closed(g, int(ExitCode.TERMINATED), because, now_s, do)
        case Stopped():
            stop_in_order(g, now_s, do)
        case Tick():
            ticked(g, now_s, do)
