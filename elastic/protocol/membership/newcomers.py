"""Newcomers without progress: a hanging set-up gives its place back; training waits for a copy that is too slow;
who cannot be connected to the members is tried less and less often."""

from __future__ import annotations

import math

from elastic.protocol.membership.events import Action, Note, Tell
from elastic.protocol.membership.group import AwaitedSlot, Group, State, Unreached
from elastic.protocol.membership.planned_changes import plan_change, stop_waiting
from elastic.protocol.membership.roster import NEWCOMERS, Stage, slot_of
from elastic.protocol.membership.transitions import move_on
from elastic.protocol.messages import Kill, Ready

OUTDATED = 3
"""After this many copies that were out of date, or results that brought it no nearer, the ring waits for a newcomer."""

TRIES_MAX = 5
"""After so many rings in a row that could not be built with a slot's newcomers, the last of them is ended: another
process may succeed, and a spare may take the place."""


def end_hung(g: Group, now_s: float, do: list[Action]) -> None:
    """End newcomers whose process beats although their script waits for ever, so that their slots get another process.
    A spare may take the place at once."""
    for worker in sorted(worker for worker, until_s in g.setting_up.items() if now_s >= until_s):
        seen = g.workers[worker]
        waited_s = now_s - seen.moved_s
        because = f"invited, and not ready after {waited_s:.0f} s in the same phase: {seen.said.phase or 'starting'}"
        do.append(Note("newcomer_hung", {"worker_id": worker, "because": because}))
        do.append(Tell((worker,), Kill(g.term, worker)))
        move_on(g, worker, Stage.REFUSED)


def hold_for(g: Group, word: Ready, do: list[Action]) -> None:
    """Let the ring wait for a newcomer that asks for it, or after OUTDATED signs that members train faster than it
    copies and catches up. The next generation holds a step without the newcomer, which then copies straight from a
    member or takes over the results that it has not got yet; the generation after that has it again, and all others
    that have asked for it meanwhile."""
    worker, running, slow = word.worker_id, g.running, word.outdated >= OUTDATED
    if not (slow or word.hold) or g.state is not State.RUNNING or running is None:
        return
    if (slot := slot_of(worker)) in {*g.in_vain, *g.unreached} or (g.awaited.slot and not word.hold):
        return
    if worker in running.ids or worker not in g.coming or worker in g.turned_away:
        return
    if (coming_next := g.coming_next) is None or (coming_next.member(worker) is None and g.places < 0):
        return  # it has lost its place, so nobody would come
    g.turned_away.add(worker)
    if g.awaited.slot:
        return  # it comes with the newcomer for which a step will wait
    g.awaited = AwaitedSlot(slot, asked=not slow)
    if slow:
        do.append(Note("newcomer_awaited", {"worker_id": worker, "outdated": word.outdated}))


def stop_in_vain(g: Group, now_s: float, do: list[Action]) -> None:
    """End the wait for `awaited`: its time is over. A slot whose newcomer was copying then is not waited for again."""
    slot, running = g.awaited.slot, g.running
    late = [w for w in (g.aim.ids if g.aim else ()) if slot_of(w) == slot and running and w not in running.ids]
    for worker in late:
        g.turned_away.add(worker)
        g.in_vain.add(slot)
        waited_s = round(now_s - g.awaited.since_s, 1)
        do.append(Note("newcomer_in_vain", {"worker_id": worker, "slot": slot, "seconds": waited_s}))
    stop_waiting(g, slot, now_s, do)


def keep_waiting(g: Group, worker: str, generation: int, now_s: float, do: list[Action]) -> None:
    """Turn away a newcomer that no ring could be built with, even if it has died of that. Each try is a new ring for
    all members, so the wait for the next one doubles with each: from backoff_min_s to set_up_s."""
    g.turned_away.add(worker)
    slot, timing = slot_of(worker), g.spec.timing
    if g.awaited.slot == slot:
        g.awaited = AwaitedSlot()
    before = g.unreached.get(slot, Unreached(0, 0, 0.0))
    if before.generation == generation:
        return  # another member says it too
    times = before.times + 1
    wait_s = min(g.set_up_s, timing.backoff_min_s * 2.0 ** min(times - 1, 60))
    g.unreached[slot] = Unreached(times, generation, now_s + wait_s)
    about = {"worker_id": worker, "generation": generation, "times": times, "wait_s": wait_s}
    do.append(Note("newcomer_unreachable", about))
    if times % TRIES_MAX == 0 and g.workers[worker].stage in NEWCOMERS:
        do.append(Tell((worker,), Kill(g.term, worker)))
        move_on(g, worker, Stage.REFUSED)


def try_again(g: Group, now_s: float, do: list[Action]) -> None:
    """Plan with the newcomers that have waited long enough since the last ring with them could not be built."""
    due = [worker for worker, until_s in g.kept_waiting.items() if now_s >= until_s]
    for slot in map(slot_of, due):
        g.unreached[slot] = g.unreached[slot]._replace(until_s=-math.inf)
    if due:
        plan_change(g, now_s, do)
