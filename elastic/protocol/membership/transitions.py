"""The only functions that change the state of a group and the stage of a worker; each says why.

This module also commits and publishes generations. Workers that one leaves out are told so, and ended after a while.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from elastic.config import Reduction
from elastic.errors import ExitCode
from elastic.protocol import messages, shard_assignment
from elastic.protocol.failures import last_shard
from elastic.protocol.membership.events import Action, Commit, End, Note, Tell
from elastic.protocol.membership.group import Group, State
from elastic.protocol.membership.roster import ARCS, Stage, WorkerView, slot_of

_AWAY = (Stage.REFUSED, Stage.FINISHED, Stage.LEFT, Stage.EXPELLED, Stage.KILLED)


def move_on(g: Group, worker: str, stage: Stage, **also: Any) -> None:
    """Change a worker's stage by the leader's decision. also: other fields of its view. AssertionError: not in ARCS."""
    g.workers[worker] = g.workers[worker]._replace(stage=stage, **also)


def heard_to_be(g: Group, worker: str, stage: Stage) -> None:
    """Change a worker's stage by its own word or its agent's. A stage that ARCS does not allow is ignored as late."""
    if stage in ARCS[g.workers[worker].stage]:
        move_on(g, worker, stage)


def heard_inside(g: Group, worker: str, generation: int) -> WorkerView:
    """Note a worker's word that it has entered this generation; 0: none. Returns its view."""
    seen = g.workers[worker]
    if generation > seen.entered:
        stage = Stage.MEMBER if Stage.MEMBER in ARCS[seen.stage] else seen.stage
        move_on(g, worker, stage, entered=generation)
    return g.workers[worker]


def become_quiescing(g: Group, because: str, now_s: float, do: list[Action]) -> None:
    """Order all workers of every generation that may have taken effect to leave their rings and to report again."""
    assert g.top is not None
    if g.state is not State.QUIESCING:
        do.append(Note("quiesce_started", {"because": because, "generation": g.top.number}))
        g.quiesced_s = now_s
    become(g, State.QUIESCING, because, now_s, do)
    g.round += 1
    g.reports = {}
    do.append(Tell(g.alive(g.listed | g.newcomers), messages.Quiesce(g.term, g.round, g.top.number)))


def become_rebuilding(g: Group, now_s: float, do: list[Action]) -> None:
    assert g.top is not None
    g.up = 0
    become(g, State.REBUILDING, g.top.because, now_s, do)


def become_paused(g: Group, now_s: float, do: list[Action]) -> None:
    assert g.running is not None
    members = len(g.running.members)
    if members >= g.spec.min_workers:
        g.awaited = g.awaited._replace(since_s=min(g.awaited.since_s, now_s))
    because = f"below quorum: {members} of at least {g.spec.min_workers} workers; waiting for replacements"
    if members >= g.spec.min_workers:
        because = g.running.because
    if (g.state, g.because) != (State.PAUSED, because):
        if members < g.spec.min_workers:
            g.needs_newcomers()
        become(g, State.PAUSED, because, now_s, do)


def become_closing(g: Group, now_s: float, do: list[Action]) -> None:
    become(g, State.CLOSING, "a member has finished", now_s, do)
    dismiss(g, g.alive({w for w in g.newcomers if g.base is None or w not in g.base.ids}), do)


def become_closed(g: Group, exit_code: int, because: str, now_s: float, do: list[Action]) -> None:
    """End the job. If workers have ended in one shard again and again, that is told first."""
    cause = last_shard(g.failures.in_vain) if exit_code in (ExitCode.SCRIPT_FAILED, ExitCode.STATE_LOST) else None
    if cause is not None:
        do.append(Note("verdict", {"ruling": str(cause.ruling), "because": cause.because}))
        because = f"{cause.because}; {because}" if because != cause.because else because
    become(g, State.CLOSED, because, now_s, do)
    alive = tuple(worker for worker in g.workers if worker not in g.dead)
    if alive:
        do.append(Tell(alive, messages.Close(g.term, because, exit_code)))
    do.append(End(exit_code, because, g.digest if exit_code == 0 else ""))


def become(g: Group, state: State, because: str, now_s: float, do: list[Action]) -> None:
    if (state, because) != (g.state, g.because):
        do.append(Note("state", {"state": str(state), "because": because}))
    g.state, g.because, g.since_s = state, because, now_s


def dismiss(g: Group, workers: Iterable[str], do: list[Action]) -> None:
    """Tell members and newcomers that the job is complete; a draining worker leaves without its last result."""
    for worker in workers:
        draining = g.running is not None and g.lists(worker) and not g.running.member(worker)
        order = messages.Release(g.term, worker) if draining else messages.Close(g.term, "the job is complete")
        do.append(Tell((worker,), order))


@dataclass(frozen=True, slots=True)
class NextGeneration:
    """What a leader decides of the next generation. began: for a form generation; other kinds keep the value of the
    generation before. The other fields are those of messages.Generation."""

    kind: messages.Kind
    members: tuple[messages.Member, ...]
    plan: messages.Plan
    because: str
    hold: bool = False
    early: bool = False
    began: str = ""


def commit(g: Group, wanted: NextGeneration, do: list[Action]) -> None:
    """Commit the next generation."""
    number = (g.top.number if g.top else 0) + 1
    base = g.chain[0].number if wanted.kind is messages.Kind.PLANNED else number
    token = hashlib.sha256(f"{g.seed}/{g.term}/{number}".encode()).hexdigest()[:32]
    plan = wanted.plan
    if g.spec.reduction is Reduction.EXACT:
        plan = replace(plan, slack=shard_assignment.slack_percent(len({member.host for member in wanted.members})))
    g.committing = messages.Generation(
        number,
        wanted.kind,
        base,
        wanted.members,
        plan,
        wanted.because,
        wanted.hold,
        token,
        wanted.early,
        wanted.began or (g.top.began if g.top else ""),
    )
    do.append(Commit(g.committing))


def give_home(g: Group, worker: str, do: list[Action]) -> None:
    """Give a newcomer the lowest number that is free, before it hears of a generation: then its script begins. What a
    worker that leaves has is free already, so that its successor begins with it."""
    seen = g.workers[worker]
    home = seen.member.home
    if home < 0:
        gone = _gone(g)
        taken = {other.member.home for name, other in g.workers.items() if name not in gone}
        home = next(number for number in itertools.count() if number not in taken)
        g.workers[worker] = seen._replace(member=replace(seen.member, home=home))
    do.append(Tell((worker,), messages.Home(g.term, worker, home)))


def with_its_home(g: Group, seen: WorkerView) -> str:
    """Another worker, of another slot, that has this worker's number and does not leave, or "". Both scripts would have
    one RANK: two leaders in a row have given it away, or this worker drains and its successor has begun."""
    me, home = seen.member.worker_id, seen.member.home
    if home < 0:
        return ""
    gone = _gone(g)
    others = (name for name, other in g.workers.items() if other.member.home == home and name not in gone)
    return next((name for name in others if slot_of(name) != slot_of(me)), "")


def _gone(g: Group) -> set[str]:
    """Workers whose numbers are free. A member that is given up may answer after all, until it is expelled."""
    return {*g.dead, *(g.given_up.keys() - g.listed), *g.drains, *g.workers.at(*_AWAY)}


def publish(g: Group, record: messages.Generation, do: list[Action]) -> None:
    if record.kind is messages.Kind.FORM:
        for spare in sorted(g.newcomers - {*record.ids, *g.dead}):
            give_home(g, spare, do)
    do.append(
        Tell(tuple(sorted(worker for worker in g.workers if worker not in g.dead)), messages.Publish(g.term, record))
    )
    do.append(Note("published", {"generation": record.number, "kind": str(record.kind), "because": record.because}))


def told(g: Group) -> tuple[messages.Generation, ...]:
    """The records that a worker has to know: the last loss generation, the running one, and those planned since."""
    assert g.running is not None
    return tuple(r for r in g.chain if r is g.base or r.number >= g.running.number)


def fence(g: Group, workers: Iterable[str], because: str, now_s: float, do: list[Action]) -> None:
    """Fence members, which are then left alone for fence_grace_s: a worker that thaws within it finds itself fenced.
    Drained workers are released instead; newcomers are not fenced."""
    for worker in workers:
        seen = g.workers[worker]
        if seen.stage is Stage.LEFT or worker in g.drains:
            do.append(Tell((worker,), messages.Release(g.term, worker)))
        elif seen.entered:
            if seen.stage is not Stage.EXPELLED:
                move_on(g, worker, Stage.EXPELLED, expelled_s=now_s)
                do.append(Note("expelled", {"worker_id": worker, "because": because}))
            do.append(Tell((worker,), messages.Fence(g.term, worker, because)))


def kill_expelled(g: Group, now_s: float, do: list[Action]) -> None:
    """Order to kill expelled workers whose fence_grace_s is over, if a later generation has completed a step."""
    base, expelled = g.base, g.expelled
    if not expelled or base is None or not any(g.workers[w].reduced > base.plan.op for w in base.ids if w in g.workers):
        return
    for worker in sorted(expelled):
        if now_s >= g.workers[worker].expelled_s + g.spec.timing.fence_grace_s:
            move_on(g, worker, Stage.KILLED)
            do.append(Note("kill", {"worker_id": worker, "because": "fenced and fence_grace is over"}))
            do.append(Tell((worker,), messages.Kill(g.term, worker)))
