"""Until when a group has time, and what is done when that is over."""

from __future__ import annotations

import math

from elastic.membership.actions import Action
from elastic.membership.arrivals import form
from elastic.membership.changes import plan_change, replace_stuck
from elastic.membership.fencing import kill_expelled
from elastic.membership.group import Group, State
from elastic.membership.invitations import end_hung, stop_in_vain
from elastic.membership.losses import decide, lost
from elastic.membership.silence import next_silence_ends_s, silence, silent_too_long
from elastic.membership.stuck import end_mute, mute_until_s
from elastic.membership.transitions import become_closed


def deadline_s(g: Group) -> float:
    """When to post the next Tick."""
    timing = g.spec.timing
    deadlines = [math.inf, mute_until_s(g)]
    if g.state is State.FORMING and g.committing is None:
        deadlines.append(g.since_s + (timing.orphan_limit_s if g.window_over else timing.join_window_s))
    if g.state is State.QUIESCING:
        deadlines.append(g.since_s + g.timing.progress_s)
    if g.state is State.QUIESCING and g.committing is None:
        deadlines.append(g.proof_ends_s)
    if g.state is State.PAUSED:
        deadlines.append(g.since_s + timing.pause_limit_s)
    if g.state in (State.RUNNING, State.PAUSED) and g.committing is None:
        deadlines.append(g.last_call_s)
    deadlines += [since + timing.progress_s for since in g.joining.values()]
    deadlines += g.setting_up.values()
    if g.awaited:
        deadlines.append(g.awaited_until_s)
    if g.state is not State.CLOSED:
        deadlines.append(next_silence_ends_s(g))
        deadlines += [since + timing.fence_grace_s for since in g.expelled.values()]
    return min(deadlines)


def ticked(g: Group, now_s: float, do: list[Action]) -> None:
    timing = g.spec.timing
    if g.state is State.PAUSED and now_s >= g.since_s + timing.pause_limit_s:
        become_closed(g, 3, f"{g.because}; nobody came for {timing.pause_limit_s:.0f} s", now_s, do)
    if now_s >= g.last_call_s:
        plan_change(g, now_s, do)
    silent = silent_too_long(g, now_s)
    for node in silent:
        del g.silent_nodes[node]
        g.slots.pop(node, None)
        g.snapshots.pop(node, None)
        g.attended_s.pop(node, None)
    there = {worker: seen.member.node for worker, seen in g.workers.items()} if silent else {}
    for worker, node in there.items():
        if node in silent and worker not in g.dead:
            lost(g, worker, silence(node), now_s, do, dead=False)
    if g.state is State.FORMING and now_s >= g.since_s + timing.join_window_s:
        g.window_over = True
        form(g, now_s, do)
    replace_stuck(g, now_s, do)
    end_hung(g, now_s, do)
    if g.awaited and now_s >= g.awaited_until_s:
        stop_in_vain(g, now_s, do)
    if g.state is State.QUIESCING and now_s >= g.since_s + g.timing.progress_s:
        g.since_s = now_s
        for worker in (g.listed | g.newcomers) - set(g.reports) - set(g.dead):
            g.given_up.setdefault(worker, f"no report for {g.timing.progress_s:.0f} s")
        decide(g, now_s, do)
    end_mute(g, now_s, do)
    if g.state is State.QUIESCING and now_s >= g.proof_ends_s:
        decide(g, now_s, do, waited_out=True)
    kill_expelled(g, now_s, do)
    for worker, since in g.expelled.items():
        if now_s >= since + timing.fence_grace_s:
            g.expelled[worker] = now_s  # not before a later generation has completed a step: look again
