"""Planned changes: workers join and drain, and no ring is aborted.

If the job has more members than an operator wants, the youngest become spares on nodes that stay. A fleet takes back
whole nodes, or a part of a node while the job goes on elsewhere (elastic/fleet/queue/scheduler.py). On the job's only
node the fleet takes nothing back: there this module makes spares, once the fleet has had its time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import replace

from elastic.protocol import messages
from elastic.protocol.membership import transitions
from elastic.protocol.membership.events import Action, Note, Tell
from elastic.protocol.membership.group import AwaitedSlot, Group, Leaver, State
from elastic.protocol.membership.roster import Stage, slot_of
from elastic.protocol.recovery_plan import paces_of, rank_order

MISSES = 2
"""After this many newcomers of a slot that were too late for their epoch, the ring waits for the next one."""

LAST_CALL_S = 15.0
"""Seconds before the last node goes in which a job stops, at least: for its last passes, and LEAVING_S."""
LAST_PASSES = 3
"""Passes of the last call: the pass that is under way, the pass in which all members learn that a checkpoint is wished
for, and the pass that begins with the checkpoint."""
LEAVING_S = 10.0
"""Seconds for passes that are longer than usual, to write the checkpoint (runtime/loop/hooks/world_hooks.py leaves
half of them for that), and for what the script does when it is drained."""


def plan_change(g: Group, now_s: float, do: list[Action]) -> None:
    """Commit the next planned generation if the wanted members differ from the highest committed list.

    If all workers that are known to hold the state drain, those of one node stay until a successor has come, or until
    its last call: then nobody stays, so that all stop after the same step.
    """
    aim, running = g.aim, g.running
    if g.state not in (State.RUNNING, State.PAUSED) or g.committing is not None or aim is None or running is None:
        return
    asking = g.workers.at(Stage.READY)
    if running is aim is g.top and not g.drains and not asking and holds(g, aim.ids) == aim.hold:
        return  # nearly always, and told without a look at everybody
    lost = {*g.dead, *g.given_up, *g.turned_away}
    present = set(running.ids)
    unsettled = set(aim.ids) - present
    members = [m for m in aim.members if not (m.worker_id in unsettled and m.worker_id in lost)]
    holders = [m.worker_id for m in members if m.worker_id in present]
    if not holders:
        # All that were to stay are lost. Workers that are in the running generation by their own words stay instead.
        members = [m for m in running.members if g.workers[m.worker_id].entered == running.number]
        members = [m for m in members if m.worker_id not in lost and not _has_left(g, m.worker_id)]
        members = members[:1] if aim.ids else members
        holders = [m.worker_id for m in members]
    if not holders:
        return
    wanted = wanted_newcomers(g, lost, now_s)
    stay = [worker for worker in holders if worker not in g.drains]
    if not stay:
        last = g.state_left_with(holders)
        if g.successors or now_s < g.drains[last.worker_id].last_call_s:
            stay = [m.worker_id for m in members if m.worker_id in present and m.node == last.node]
    stays = set(stay)
    members = [m for m in members if m.worker_id not in g.drains or m.worker_id in stays]
    settled = [m for m in members if m.worker_id not in g.drains]  # a worker that waits for a successor takes no place
    for worker in wanted[: max(0, g.wanted_workers - len(settled))]:
        # Seniority counts from the admission: a newcomer that came early and was ready late must not become the donor.
        member = replace(g.workers[worker].member, seniority=g.take_seniority())
        g.workers[worker] = g.workers[worker]._replace(member=member)
        members.append(member)
    listed = {m.worker_id for m in members}
    if (early := _leaves_early(g, running, listed)) is not None:  # even if the list stays: an older one may be void
        because = _because(g, [], [worker for worker in running.ids if worker not in listed])
        commit_planned(g, early, f"{because}, and does not wait for who joins", do, early=True)
        return
    if aim is g.top and listed == set(aim.ids) and holds(g, listed) == aim.hold:
        return
    joined = [m.worker_id for m in members if aim.member(m.worker_id) is None]
    gone = [worker for worker in aim.ids if worker not in listed]
    if not joined and not gone:
        because = "waits no longer" if aim is g.top else aim.because
        if awaited := [worker for worker in g.turned_away if slot_of(worker) == g.awaited.slot]:
            because = f"training waits for the copy of {awaited[0]}"
        elif g.awaited.slot:
            because = f"waits for {g.awaited.slot}: its newcomers were too late for their epoch"
        commit_planned(g, members, because, do)
        return
    commit_planned(g, members, _because(g, joined, gone), do)


def _because(g: Group, joined: list[str], gone: list[str]) -> str:
    def why(worker: str) -> str:
        if worker in g.drains:
            return f"{worker} drains: {g.drains[worker].because}"
        awaited = bool(g.awaited.slot) and worker in g.turned_away and slot_of(worker) == g.awaited.slot
        return f"training waits for the copy of {worker}" if awaited else f"{worker} is gone again"

    return "; ".join([f"{worker} joins" for worker in joined] + [why(worker) for worker in gone])


def _leaves_early(g: Group, running: messages.Generation, listed: set[str]) -> list[messages.Member] | None:
    """The members of an early generation, in which draining workers leave without a wait for newcomers. None if there
    is no need for it, or if it is planned already. A demoted worker has time to wait."""
    stay = [member for member in running.members if member.worker_id in listed]
    if len(stay) in (0, len(running.members)) or listed <= set(running.ids):
        return None
    leavers = [g.drains.get(worker) for worker in running.ids if worker not in listed]
    if all(leaver is not None and leaver.demoted for leaver in leavers):
        return None
    planned = [record.members for record in g.chain if record.number > running.number]
    return None if tuple(stay) in planned else stay


def wanted_newcomers(g: Group, lost: set[str], now_s: float) -> list[str]:
    """Newcomers that may be admitted now, the most senior first."""
    assert g.aim is not None
    lost = lost | {worker for worker, until_s in g.kept_waiting.items() if now_s < until_s}
    asking = g.workers.at(Stage.READY) - lost - g.drains.keys() - set(g.aim.ids)
    return sorted(asking, key=lambda worker: g.workers[worker].member.seniority)


def wished_to_drain(g: Group, word: messages.DrainWish, now_s: float, do: list[Action]) -> None:
    """All workers of a node drain at once, because the node has to go; else they would leave one after another.

    The last call comes when there is just time for what follows it, or when half of the time is over if that is later.
    """
    left_s, leavers = word.left_ms / 1000, _neighbours(g, word.worker_id)
    members = [worker for worker in leavers if g.lists(worker) and worker not in g.dead]
    takes_s = max(LAST_CALL_S, LAST_PASSES * g.pass_s(members) + LEAVING_S)
    last_call_s = now_s if g.stopping else now_s + max(left_s - takes_s, left_s / 2)
    g.drains |= dict.fromkeys(leavers, Leaver(word.because, last_call_s))
    for node in {g.workers[worker].member.node for worker in leavers}:
        forget_awaited(g, node)
    if members:
        g.needs_newcomers()
    if g.state is not State.FORMING:  # a job that forms waits for them, and stops in order once it has begun
        release_newcomers(g, do)
    plan_change(g, now_s, do)


def stop_in_order(g: Group, now_s: float, do: list[Action]) -> None:
    """Stop without successors: the last call of all draining workers is now."""
    g.stopping = True
    g.drains = {worker: replace(leaver, last_call_s=now_s) for worker, leaver in g.drains.items()}
    plan_change(g, now_s, do)


def drain_is_over(g: Group, word: messages.DrainOver, now_s: float, do: list[Action]) -> None:
    for worker in _neighbours(g, word.worker_id):
        seen = g.workers[worker]
        if (because := g.failures.excluded.get(seen.member.node)) is not None and worker in g.drains:
            g.drains[worker] = Leaver(because, math.inf)
        elif not transitions.with_its_home(g, seen):  # else one of the two has to go
            g.drains.pop(worker, None)
    plan_change(g, now_s, do)


def _neighbours(g: Group, worker: str) -> list[str]:
    """All workers of this worker's node, the worker itself too; [] if the worker is unknown."""
    if worker not in g.workers:
        return []
    node = g.workers[worker].member.node
    return [other for other, seen in g.workers.items() if seen.member.node == node]


def commit_planned(
    g: Group,
    members: Iterable[messages.Member],
    because: str,
    do: list[Action],
    *,
    early: bool = False,
    paces: dict[str, int] | None = None,
) -> None:
    """Commit a planned generation. paces: member -> as in Plan; None: unchanged."""
    assert g.running is not None
    ordered = rank_order(members)
    ids = [m.worker_id for m in ordered]
    given = paces_of(ids, g.top) if paces is None else tuple(paces[worker] for worker in ids)
    newcomers = tuple(m.worker_id for m in ordered if g.running.member(m.worker_id) is None)
    hold = holds(g, {m.worker_id for m in ordered})
    plan = messages.Plan(newcomers=newcomers, paces=given)
    wanted = transitions.NextGeneration(messages.Kind.PLANNED, ordered, plan, because, hold=hold, early=early)
    transitions.commit(g, wanted, do)


def holds(g: Group, listed: Collection[str]) -> bool:
    """Whether a step waits for newcomers before it is reduced: below quorum, or for an awaited newcomer."""
    return len(listed) < g.spec.min_workers or (bool(g.awaited.slot) and g.awaited.slot not in map(slot_of, listed))


def invite_spares(g: Group, now_s: float, do: list[Action]) -> None:
    """Invite the spares that have waited longest to the free places, once the ring has settled."""
    if g.state not in (State.RUNNING, State.PAUSED):
        return
    able = g.spares - {*g.dead, *g.given_up, *g.drains}
    if not able:
        return
    # Slots that were demoted for their speed come last.
    able_first = sorted(able, key=lambda w: (slot_of(w) in g.demoted_s, g.workers[w].member.seniority))
    for worker in able_first[: max(0, g.places)]:
        invite(g, worker, now_s, do)


def invite(g: Group, worker: str, now_s: float, do: list[Action]) -> None:
    transitions.move_on(g, worker, Stage.INVITED, moved_s=now_s)
    do.append(Note("invited", {"worker_id": worker}))
    do.append(Tell((worker,), messages.Invite(g.term, worker)))
    await_newcomer(g, worker, now_s, do)


def await_newcomer(g: Group, worker: str, now_s: float, do: list[Action]) -> None:
    """Let the ring wait for an invited newcomer whose last MISSES predecessors were too late for their epoch. A
    newcomer enters the epoch in progress, and is replaced if that ends before it has copied the state. If epochs are
    shorter than its start, this repeats; so the ring stands still for the third in a row, for progress_s at most."""
    missed = g.missed.get(slot_of(worker), 0)
    if g.awaited.slot:
        if g.awaited.slot not in {slot_of(other) for other in g.coming}:
            g.awaited = g.awaited._replace(slot=slot_of(worker))  # the newcomer that the ring waited for is gone
    elif missed >= MISSES and g.state is State.RUNNING and slot_of(worker) not in g.in_vain:
        g.awaited = AwaitedSlot(slot_of(worker))
        do.append(Note("newcomer_awaited", {"worker_id": worker, "missed": missed}))
        plan_change(g, now_s, do)


def stop_waiting(g: Group, slot: str, now_s: float, do: list[Action]) -> None:
    """Stop waiting for a slot whose newcomer has come, will not come, or takes too long; count its misses from 0."""
    g.missed.pop(slot, None)
    if g.awaited.slot == slot:
        g.awaited = AwaitedSlot()
        plan_change(g, now_s, do)


def forget_awaited(g: Group, node: str) -> None:
    """Wait for no newcomer of a node that goes, from the next generation on."""
    if any(slot_of(worker) == g.awaited.slot and seen.member.node == node for worker, seen in g.workers.items()):
        g.awaited = AwaitedSlot()


def progressed(g: Group, word: messages.Progress, now_s: float, do: list[Action]) -> None:
    seen = g.workers.get(word.worker_id)
    if seen is None:
        return
    if word.reduced > seen.reduced:
        g.advanced_s[word.generation] = now_s
    if not seen.entered:
        g.given_up.pop(word.worker_id, None)
    running = g.running
    g.workers[word.worker_id] = transitions.heard_inside(g, word.worker_id, word.generation)._replace(
        reduced=max(seen.reduced, word.reduced),
        applied=max(seen.applied, word.applied),
        said=word,
        came=word.reduced if word.generation and seen.came < 0 else seen.came,
        shard_us=word.shard_us or seen.shard_us,
        exchange_us=word.exchange_us or seen.exchange_us,
        moved_s=seen.moved_s if word.phase == seen.said.phase else now_s,
        worked_s=seen.worked_s if word.doing is messages.Doing.WAITING else now_s,
        heard_s=now_s,
        heard_from_s=seen.heard_from_s if now_s - seen.heard_s <= g.spec.timing.suspect_s else now_s,
    )
    g.shards = word.shards or g.shards
    g.failures = g.failures.and_got_to(word.reduced, word.applied)
    if not seen.is_fruitful and g.workers[word.worker_id].is_fruitful:
        g.failures = g.failures.and_serves(seen.member.node)
    if g.applied >= 0:
        g.applied = max(g.applied, word.applied)
    if word.generation and not seen.entered:
        g.in_vain.discard(slot_of(word.worker_id))
        g.unreached.pop(slot_of(word.worker_id), None)
        stop_waiting(g, slot_of(word.worker_id), now_s, do)
    take_effect(g, running, now_s, do)
    transitions.kill_expelled(g, now_s, do)


def replace_stuck(g: Group, now_s: float, do: list[Action]) -> None:
    """Plan without an admitted newcomer that makes no progress, and end it, so that its slot gets another process. It
    would hold up every planned change, or the ring, once its generation is in effect. A newcomer that receives answers
    or bytes, however slowly, says so with its beats."""
    patience_s = g.spec.timing.progress_s
    stuck = sorted(worker for worker, since in g.joining.items() if now_s >= since + patience_s)
    for worker in stuck:
        seen = g.workers[worker]
        because = f"admitted, and then no answer and no byte for {patience_s:.0f} s; it last said: {seen.said.phase}"
        do.append(Note("newcomer_stuck", {"worker_id": worker, "because": because}))
        do.append(Tell((worker,), messages.Kill(g.term, worker)))
        g.workers[worker] = seen._replace(moved_s=now_s)
        if g.running is not None and worker not in g.running.ids:
            transitions.move_on(g, worker, Stage.REFUSED)
            g.turned_away.add(worker)
    if stuck:
        plan_change(g, now_s, do)


def take_effect(g: Group, before: messages.Generation | None, now_s: float, do: list[Action]) -> None:
    """Settle after the first word of a worker that has entered a planned generation."""
    record = g.running
    if record is None or record is before or record.kind is not messages.Kind.PLANNED:
        return
    if g.state not in (State.RUNNING, State.PAUSED):
        return
    settle(g, record.because, now_s, do)
    if any(worker in g.dead or worker in g.given_up for worker in record.ids):
        transitions.become_quiescing(g, "a member was lost while its generation took effect", now_s, do)
        return
    # Without whoever is awaited until a step waits: the step after this one may not yet.
    waits = record.hold or not g.awaited.slot
    g.turned_away = set() if waits else {worker for worker in g.turned_away if slot_of(worker) == g.awaited.slot}
    release_newcomers(g, do)
    plan_change(g, now_s, do)


def settle(g: Group, because: str, now_s: float, do: list[Action]) -> None:
    """Run, or pause below quorum: a ring is up."""
    if g.running is not None and g.running.hold:
        transitions.become_paused(g, now_s, do)
    else:
        transitions.become(g, State.RUNNING, because, now_s, do)


def left(g: Group, word: messages.Left, now_s: float, do: list[Action]) -> None:
    """A member has drained: all that stay have the last result. After a quiesce it holds the state again."""
    record = next((r for r in g.chain if r.number == word.generation and r.kind is messages.Kind.PLANNED), None)
    if word.worker_id not in g.workers or record is None or g.state is State.QUIESCING:
        return
    all_gone = all(worker in g.dead or worker in g.given_up for worker in record.ids)
    lost = any(not _has_left(g, worker) for worker in record.ids)
    if g.state is not State.CLOSING and all_gone and lost:
        transitions.become_quiescing(g, f"everybody that stayed was lost before {word.worker_id} left", now_s, do)
        return
    running = g.running
    transitions.heard_inside(g, word.worker_id, word.generation)
    transitions.heard_to_be(g, word.worker_id, Stage.LEFT)
    do.append(Note("drained", {"worker_id": word.worker_id}))
    do.append(Tell((word.worker_id,), messages.Release(g.term, word.worker_id)))
    if record.ids:
        take_effect(g, running, now_s, do)
    close_if_all_left(g, now_s, do)


def _has_left(g: Group, worker: str) -> bool:
    return worker in g.workers and g.workers[worker].stage is Stage.LEFT


def close_if_all_left(g: Group, now_s: float, do: list[Action]) -> None:
    """End the job when the last member has left, if nobody stays in the running generation."""
    if g.running is None or g.running.ids or g.state is State.CLOSED:
        return
    waiting = [worker for worker in g.alive(g.listed) if g.workers[worker].entered and not _has_left(g, worker)]
    if not waiting:
        because = f"stopped after a step, because every node had to go ({g.running.because}); start the job again"
        transitions.become_closed(g, 6, because, now_s, do)


def release_newcomers(g: Group, do: list[Action]) -> None:
    """Release draining newcomers that no generation waits for."""
    planned = {*g.listed, *(g.committing.ids if g.committing else ())}
    if g.running is g.aim and g.aim is not None:
        planned = {*g.aim.ids, *(g.committing.ids if g.committing else ())}
    for worker in sorted(g.newcomers & set(g.drains) - planned - set(g.dead)):
        do.append(Tell((worker,), messages.Release(g.term, worker)))


def shed(g: Group, now_s: float, do: list[Action]) -> None:
    """Demote surplus members after a member's word."""
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
