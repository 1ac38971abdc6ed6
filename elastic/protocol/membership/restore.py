"""If every copy of the state is lost, new processes go on from the newest snapshot or checkpoint.

The process that replaces a dead worker says which snapshot its machine's memory holds. Once all processes are here, or
the join window is over and a process can go on from something, the processes whose machines hold the newest snapshot
form a generation and read it; the others join as newcomers and copy it. A newcomer from before the loss waits for
members that are gone, so it is told to exit and is replaced.

A newcomer's copy of the state is preferred to snapshots and checkpoints, unless one of them is newer.

Each time the job must have got further than where it last began, so that a repeated fault ends it. If the snapshot or
checkpoint cannot be read, the job goes on from the next best, though it is older.

Before the first applied step nothing is lost with the members, because every new process begins as the run began. So
the run begins again, at most max_restarts times. Only a leader that has formed the job itself, and has heard of every
member until it died, can know that no step was applied. A job in rounds (`--restart`) loses nothing with its members
either, whenever they die or their machines do: what its scripts go on from is in files, or in the memory of machines.

This module also decides who may move the pointer to the newest checkpoint.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace

from elastic.checkpoints.naming import EntryName, is_series
from elastic.checkpoints.pointer import Pointer
from elastic.errors import ExitCode
from elastic.protocol.membership.events import Action, Note, Point, Tell
from elastic.protocol.membership.group import BegunAgain, Group, State
from elastic.protocol.membership.roster import Stage, WorkerView
from elastic.protocol.membership.transitions import NextGeneration, become, become_closed, commit, move_on
from elastic.protocol.messages import ANEW, CheckpointComplete, Fence, Kind, Member, Plan, Unreadable
from elastic.protocol.recovery_plan import KeptState, newest_kept

LOST_ROUNDS, LASTING_S = 20, 60.0
"""A job in rounds ends after so many rounds in a row in which all members died within LASTING_S, as by scripts that
need more memory than there is."""


def can_go_back(g: Group) -> bool:
    """Whether the job may go on from what is kept: not if nothing is replaced, the script has ended a member, or the
    job is to end."""
    return g.revives and g.spec.replace and g.raised is None and not g.stopping


def _loses_nothing(g: Group) -> bool:
    """Whether new processes can begin where this run began. Not after members got stuck: new ones would too."""
    may = g.spec.replace and not g.stopping and not g.hung
    if g.spec.restart:
        return may and g.anew.times < LOST_ROUNDS
    may = may and g.listed <= g.dead.keys() and g.anew.times < g.spec.max_restarts and g.applied == 0
    return may and g.began == g.resumed and g.began not in g.unreadable


def kept_to_go_back_to(g: Group) -> str:
    """The newest snapshot or checkpoint that this leader knows of; "" if none, or if the job may not go on from it."""
    if not can_go_back(g):
        return ""
    here = {node: entry for node, entry in g.snapshots.items() if node in g.slots and node not in g.silent_nodes}
    newest = newest_kept(here, g.checkpoint, "")
    return newest.entry if newest is not None else ""


def unreadable(g: Group, word: Unreadable, do: list[Action]) -> None:
    """A worker cannot read what the job goes on from. A word about another entry is out of date."""
    if word.entry != g.began:
        return
    do.append(Note("unreadable", {"worker_id": word.worker_id, "entry": word.entry, "because": word.because}))
    if word.memory:
        g.unreadable.setdefault(word.entry, word)
        return
    g.unreadable[word.entry] = word
    if g.checkpoint in ("", word.entry):
        g.checkpoint = word.instead


def go_back(g: Group, lost: str, now_s: float, do: list[Action]) -> bool:
    """Try to go on although the state is lost. Whether the job goes on. lost: what has happened, in a sentence."""
    if g.spec.restart and now_s - max(g.anew.formed_s, g.elected_s) > LASTING_S:
        g.anew = BegunAgain()
    g.begins_anew = _loses_nothing(g)
    if not (g.begins_anew or can_go_back(g)):
        return False
    do.append(Note("state_lost", {"because": lost}))
    for worker in [worker for worker in g.workers if worker in g.dead]:
        del g.workers[worker]
        g.drains.pop(worker, None)
    # Silent members are left alone until a generation without them is durable.
    g.lost, g.window_over = lost, False
    g.stuck, g.hung = set(), {}
    g.reports = {}  # `dead` is kept: a worker that holds the state after all does not wait for the dead
    for worker in sorted(worker for worker, seen in g.workers.items() if not seen.entered):
        turn_out(g, worker, lost, now_s, do)
    begins = "begin again" if g.begins_anew else "go on from what is kept"
    become(g, State.FORMING, f"{lost}; waiting for new processes, to {begins}", now_s, do)
    return True


def turn_out(g: Group, worker: str, because: str, now_s: float, do: list[Action]) -> None:
    """Expel a newcomer. A new process takes its slot."""
    seen = g.workers[worker]
    move_on(g, worker, Stage.EXPELLED, expelled_s=seen.expelled_s if seen.stage is Stage.EXPELLED else now_s)
    do.append(Tell((worker,), Fence(g.term, worker, because)))


def revive(g: Group, now_s: float, do: list[Action]) -> None:
    """Form a generation of the holders of the newest state, or end the job if nothing new is kept and nobody comes."""
    if g.committing is not None or not (g.window_over or _all_here(g)):
        return
    present = {worker: g.workers[worker] for worker in g.newcomers - g.dead.keys() - g.given_up.keys()}
    damaged = g.unreadable.get(g.began)
    began = "" if damaged else g.began
    newest = newest_kept({worker: seen.snapshot for worker, seen in present.items()}, g.checkpoint, began)
    if newest is None and g.begins_anew and not damaged and g.top is not None:
        newest = KeptState(f"{ANEW}{g.top.number + 1}", tuple(sorted(present)), memory=False)
    if newest is None or not newest.holders:
        kept = f"nothing newer than {began}" if began else "nothing else" if damaged else "nothing"
        kept += " is kept on the nodes that are here"
        if newest is not None:
            wanted = "begin again" if newest.entry.startswith(ANEW) else f"go on from checkpoint {g.checkpoint}"
            kept = f"no new process is here to {wanted}"
        if not waits_for_starting(g, f"{g.lost}; {kept}", now_s, do):
            become_closed(g, int(ExitCode.STATE_LOST), f"{g.lost}; {kept}", now_s, do)
        return
    members = founders(g, (present[worker] for worker in newest.holders))
    kind = "snapshot in memory" if newest.memory else "checkpoint"
    if (name := EntryName.parse(newest.entry)) is None:
        g.anew = g.anew._replace(times=g.anew.times + 1)
        where = f"from checkpoint {g.began}" if g.began else "from its first step"
        where += f" ({g.anew.times} of {g.spec.max_restarts})"
        because = f"all members died before a step was applied; begins again {where}"
        if g.spec.restart:
            because = f"all members died; new ones start the scripts again ({g.anew.times} of {LOST_ROUNDS})"
    elif damaged:
        because = f"{kept_badly(damaged)}; goes on from step {name.step}, {kind} {newest.entry}"
        del g.unreadable[damaged.entry]  # each entry has one fallback, so that a repeated fault ends the job
    else:
        because = f"every copy of the state was lost; goes on from step {name.step}, {kind} {newest.entry}"
    hold = len(members) < g.spec.min_workers
    commit(g, NextGeneration(Kind.FORM, members, Plan(), because, hold=hold, began=newest.entry), do)


def kept_badly(word: Unreadable) -> str:
    return f"{word.entry} cannot be read: {word.because}"


def _all_here(g: Group) -> bool:
    """Whether each slot has a process from after the loss; true also if nobody else will come."""
    return not g.starting and not _outdated(g)


def _outdated(g: Group) -> set[str]:
    """Newcomers from before every copy of the state was lost that are not dead yet."""
    return {worker for worker in g.workers.at(Stage.EXPELLED, Stage.KILLED) if not g.workers[worker].entered}


def waits_for_starting(g: Group, has: str, now_s: float, do: list[Action]) -> bool:
    """Whether processes that have been started may still announce themselves, within orphan_limit_s: on a busy machine
    the imports of a script take a while. has: what is here without them, in words."""
    if _all_here(g) or now_s >= g.since_s + g.spec.timing.orphan_limit_s:
        return False
    starting = [f"{count} on {node}" for node, count in g.starting.items()]
    starting += [f"the one after {worker}" for worker in sorted(_outdated(g))]
    because = f"{has}; waiting for those starting: {', '.join(starting)}"
    if because != g.because:
        g.because = because
        do.append(Note("state", {"state": str(g.state), "because": because}))
    return True


def founders(g: Group, present: Iterable[WorkerView]) -> tuple[Member, ...]:
    """The members of a form generation, in rank order. Devices go by slot, so spares come last. A newcomer from before
    a loss keeps its home, because its script knows it."""
    chosen = sorted(present, key=lambda seen: (is_spare(g, seen), seen.member.node, seen.slot))[: g.wanted_workers]
    ordered = sorted(chosen, key=lambda seen: (seen.member.node, seen.slot))
    taken = {seen.member.home for seen in ordered}
    free = (number for number in itertools.count() if number not in taken)
    members = tuple(
        replace(seen.member, seniority=rank, home=seen.member.home if seen.member.home >= 0 else next(free))
        for rank, seen in enumerate(ordered)
    )
    for member in members:
        g.workers[member.worker_id] = g.workers[member.worker_id]._replace(member=member)
    return members


def is_spare(g: Group, seen: WorkerView) -> bool:
    return seen.slot >= g.slots.get(seen.member.node, math.inf)


def checkpointed(g: Group, word: CheckpointComplete, do: list[Action]) -> None:
    """Move the pointer for a listed member that nobody has given up. A later generation may have taken newer
    checkpoints than an expelled worker knows of; the one that it has completed stays valid."""
    worker, name = word.worker_id, EntryName.parse(word.entry)
    if name is None or not is_series(word.series):
        do.append(Note("pointer_refused", {"worker_id": worker, "entry": word.entry, "because": "no such name"}))
    elif worker not in g.listed or worker in {*g.dead, *g.given_up} or g.workers[worker].stage is Stage.EXPELLED:
        because = "its writer is no member any more"
        do.append(Note("pointer_refused", {"worker_id": worker, "entry": word.entry, "because": because}))
    else:
        do.append(Point(word.series, Pointer(word.entry, worker, name.generation)))
