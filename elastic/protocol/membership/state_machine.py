"""`step` and `advance` pass every event to the one function that handles it.

This module also handles durable records, the group's next deadline, and what follows when a deadline is over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from elastic.errors import ExitCode
from elastic.protocol import messages
from elastic.protocol.membership import events, planned_changes, transitions
from elastic.protocol.membership.closing import failed, finished, slot_given_up
from elastic.protocol.membership.formation import announced, elected, form
from elastic.protocol.membership.group import Group, State
from elastic.protocol.membership.hangs import end_mute, judge_progress, mute_until_s
from elastic.protocol.membership.loss import decide, lost, reported, wait_for_others
from elastic.protocol.membership.newcomers import end_hung, hold_for, stop_in_vain, try_again
from elastic.protocol.membership.partitions import fell_silent, is_absence, next_silence_ends_s, silent_too_long
from elastic.protocol.membership.restore import checkpointed, unreadable
from elastic.protocol.membership.ring_reports import heard_of_ring, rebuilt
from elastic.protocol.membership.roster import Stage
from elastic.protocol.membership.stragglers import compare, take_back_demotions
from elastic.protocol.membership.verdicts import ended, refuse_if_excluded


def advance(g: Group, arrived: Iterable[events.Event], now_s: float) -> tuple[events.Action, ...]:
    """Apply the events that arrived at ``now_s`` (the leader's monotonic clock) to the group itself: in a job of
    thousands of workers a copy of the group for every few words would be most of the work. Spares are invited once, at
    the end. Old words are ignored, not errors."""
    actions: list[events.Action] = []
    freed = False
    for event in arrived:
        if g.state is State.CLOSED:
            break
        before = g.chain, g.state
        _apply(g, event, now_s, actions)
        freed |= not isinstance(event, messages.Progress) or (g.chain, g.state) != before
    if freed and g.state is not State.CLOSED:  # progress alone frees no place
        planned_changes.invite_spares(g, now_s, actions)
    return tuple(actions)


def _apply(g: Group, event: events.Event, now_s: float, do: list[events.Action]) -> None:
    match event:
        case events.Elected():
            elected(g, event, now_s, do)
        case events.AgentUp(node, slots):
            wait_for_others(g, now_s)
            g.silent_nodes.pop(node, None)
            g.attended_s[node] = now_s
            if node not in g.failures.excluded:
                g.slots[node] = slots or g.slots.get(node, 0)
            if slots:  # a stream begins: the agent says again which slots are given up, and a new agent tries them all
                given_up = g.slots_given_up.items()
                g.slots_given_up = {slot: why for slot, why in given_up if slot.rpartition(".")[0] != node}
            # The node's workers report now, or the agent says why not; a decision on the first report would expel the
            # rest.
            g.given_up = {worker: why for worker, why in g.given_up.items() if not is_absence(why, node)}
        case events.AgentDown():
            fell_silent(g, event, now_s)
        case events.Committed(number):
            committed(g, number, now_s, do)
        case events.CommitRefused(number, because):
            do.append(events.Note("commit_refused", {"number": number, "because": because}))
            g.committing = None
        case messages.Announce():
            announced(g, event, now_s, do)
        case messages.Report():
            reported(g, event, now_s, do)
        case messages.RingUp() | messages.RingBrokenReport() | messages.BuildFailedReport() | messages.Corrupted():
            heard_of_ring(g, event, now_s, do)
        case messages.Progress():
            rebuilt(g, event, now_s, do)
            planned_changes.progressed(g, event, now_s, do)
            compare(g, now_s, do)
            judge_progress(g, event, now_s, do)
            planned_changes.shed(g, now_s, do)
        case messages.Ready():
            _asks_to_be_admitted(g, event, now_s, do)
        case messages.DrainWish():
            planned_changes.wished_to_drain(g, event, now_s, do)
        case messages.DrainOver():
            planned_changes.drain_is_over(g, event, now_s, do)
        case messages.Left():
            planned_changes.left(g, event, now_s, do)
        case messages.WorkerDead():
            _died(g, event, now_s, do)
        case messages.WorkerFrozen(worker, because):
            lost(g, worker, because, now_s, do, dead=False)
        case messages.Failed():
            failed(g, event, now_s, do)
        case messages.Finished():
            finished(g, event, now_s, do)
        case messages.SlotGivenUp():
            slot_given_up(g, event, now_s, do)
        case messages.CheckpointComplete():
            checkpointed(g, event, do)
        case messages.Unreadable():
            unreadable(g, event, do)
        case events.PointerAt(entry):
            known = g.unreadable.get(entry)
            g.checkpoint = known.instead if known and not known.memory else entry
        case events.Resized(workers):
            g.size, g.resized_s = workers, now_s
            do.append(events.Note("resized", {"workers": workers}))
            if g.state is State.FORMING:
                form(g, now_s, do)
            else:
                planned_changes.plan_change(g, now_s, do)
        case events.Stopped(because, at_once=True):
            transitions.become_closed(g, int(ExitCode.TERMINATED), because, now_s, do)
        case events.Stopped():
            planned_changes.stop_in_order(g, now_s, do)
        case events.GroupTick():
            ticked(g, now_s, do)


def _asks_to_be_admitted(g: Group, word: messages.Ready, now_s: float, do: list[events.Action]) -> None:
    worker = word.worker_id
    if worker not in g.workers:
        return
    if not g.workers[worker].entered:  # from a member this word is out of date
        transitions.heard_to_be(g, worker, Stage.READY)
    g.given_up.pop(worker, None)
    refuse_if_excluded(g, worker, do)
    hold_for(g, word, do)
    planned_changes.plan_change(g, now_s, do)


def _died(g: Group, word: messages.WorkerDead, now_s: float, do: list[events.Action]) -> None:
    ended(g, word, now_s, do)
    if g.state is not State.CLOSED:  # by a verdict
        lost(g, word.worker_id, word.because, now_s, do, dead=True, snapshot=word.snapshot)


def deadline_s(g: Group) -> float:
    """When to post the next GroupTick."""
    timing = g.spec.timing
    deadlines = [math.inf, mute_until_s(g)]
    if g.state is State.FORMING and g.committing is None:
        deadlines.append(g.since_s + (timing.orphan_limit_s if g.window_over else timing.join_window_s))
    if g.state is State.QUIESCING:
        deadlines.append(g.since_s + g.timing.progress_s)
    if g.state is State.QUIESCING and g.committing is None:
        deadlines.append(g.proof_ends_s)
    if g.below_quorum:
        deadlines.append(g.since_s + timing.pause_limit_s)
    if g.state in (State.RUNNING, State.PAUSED) and g.committing is None:
        deadlines.append(g.last_call_s)
    deadlines += [since + timing.progress_s for since in g.joining.values()]
    deadlines += g.setting_up.values()
    deadlines += g.kept_waiting.values()
    if g.awaited.slot:
        deadlines.append(g.awaited_until_s)
    if g.state is not State.CLOSED:
        deadlines.append(next_silence_ends_s(g))
        deadlines += [g.workers[worker].expelled_s + timing.fence_grace_s for worker in g.expelled]
    return min(deadlines)


def ticked(g: Group, now_s: float, do: list[events.Action]) -> None:
    timing = g.spec.timing
    if g.below_quorum and now_s >= g.since_s + timing.pause_limit_s:
        transitions.become_closed(g, 3, f"{g.because}; nobody came for {timing.pause_limit_s:.0f} s", now_s, do)
    if now_s >= g.last_call_s:
        planned_changes.plan_change(g, now_s, do)
    _lose_silent(g, now_s, do)
    if g.state is State.FORMING and now_s >= g.since_s + timing.join_window_s:
        g.window_over = True
        form(g, now_s, do)
    planned_changes.replace_stuck(g, now_s, do)
    end_hung(g, now_s, do)
    try_again(g, now_s, do)
    if g.awaited.slot and now_s >= g.awaited_until_s:
        stop_in_vain(g, now_s, do)
    if g.state is State.QUIESCING and now_s >= g.since_s + g.timing.progress_s:
        g.since_s = now_s
        for worker in (g.listed | g.newcomers) - set(g.reports) - set(g.dead):
            g.given_up.setdefault(worker, f"no report for {g.timing.progress_s:.0f} s")
        decide(g, now_s, do)
    end_mute(g, now_s, do)
    if g.state is State.QUIESCING and now_s >= g.proof_ends_s:
        decide(g, now_s, do, waited_out=True)
    transitions.kill_expelled(g, now_s, do)
    for worker in g.expelled:
        if now_s >= g.workers[worker].expelled_s + timing.fence_grace_s:
            # The kill waits until a later generation has completed a step: look again.
            transitions.move_on(g, worker, Stage.EXPELLED, expelled_s=now_s)
    _lose_silent(g, now_s, do)  # what was given up in this tick may have been the last thing that spoke for a node


def _lose_silent(g: Group, now_s: float, do: list[events.Action]) -> None:
    """Give up the nodes whose silence is long enough."""
    silent = silent_too_long(g, now_s)
    for node in silent:
        del g.silent_nodes[node]
        g.slots.pop(node, None)
        g.snapshots.pop(node, None)
        g.attended_s.pop(node, None)
        planned_changes.forget_awaited(g, node)
    there = {worker: seen.member.node for worker, seen in g.workers.items()} if silent else {}
    for worker, node in there.items():
        if node in silent and worker not in g.dead:
            lost(g, worker, silent[node], now_s, do, dead=False)


def committed(g: Group, number: int, now_s: float, do: list[events.Action]) -> None:
    record = g.committing
    if record is None or record.number != number:
        return
    g.committing = None
    fields = {"generation": number, "kind": str(record.kind), "members": list(record.ids), "because": record.because}
    if record.kind is messages.Kind.FORM:
        fields["level"] = g.spec.level
    do.append(events.Note("committed", fields))
    if g.state is State.CLOSING:
        return
    if record.kind is messages.Kind.PLANNED:
        g.chain = (*g.chain, record)
        g.planned_s = now_s
        if g.state is State.QUIESCING:
            transitions.become_quiescing(g, g.because, now_s, do)
        else:
            transitions.publish(g, record, do)
            planned_changes.plan_change(g, now_s, do)
        return
    if record.kind is messages.Kind.FORM:
        g.applied, g.anew = 0, g.anew._replace(formed_s=now_s)
    take_back_demotions(g, record)
    before, members = g.listed, set(record.ids)
    g.chain = (record,)
    g.reports = {}
    lost = [worker for worker in record.ids if worker in g.dead or worker in g.given_up]
    for worker in set(g.dead) - members:
        g.workers.discard(worker)
        for known in (g.dead, g.drains):
            known.pop(worker, None)
    newcomers = g.newcomers
    g.given_up = {worker: why for worker, why in g.given_up.items() if worker in members or worker in newcomers}
    g.turned_away, g.stuck = set(), set()
    g.lost, g.hung = "", {}
    g.advanced_s = {}
    for worker, seen in g.workers.items():
        if worker in members:
            settled = seen.stage in (Stage.FINISHED, Stage.LEFT)
            stage = seen.stage if settled else Stage.MEMBER
            transitions.move_on(g, worker, stage, entered=number, ring=messages.RingState.BUILDING)
        else:  # a newcomer says again that it is ready
            stage = Stage.INVITED if seen.stage is Stage.READY else seen.stage
            transitions.move_on(g, worker, stage, moved_s=now_s)
    transitions.fence(g, sorted(worker for worker in before if worker in g.workers and worker not in members),
           record.because, now_s, do)  # fmt: skip
    transitions.publish(g, record, do)
    transitions.become_rebuilding(g, now_s, do)
    if lost:
        transitions.become_quiescing(g, f"{lost[0]} was lost while generation {number} was committed", now_s, do)
