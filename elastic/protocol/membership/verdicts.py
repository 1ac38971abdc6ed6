"""What follows from repeated failures of workers (elastic/protocol/failures.py has the rules): the job ends with the
cause, or goes on without a node.

Scripts that run in rounds (`--restart`) take no steps that the leader hears of, and a lost worker makes the scripts of
the others fail: nothing is judged there.
"""

from __future__ import annotations

import math
from dataclasses import replace

from elastic.protocol import messages
from elastic.protocol.failures import (
    FailureKind,
    Ruling,
    Verdict,
    WorkerFailure,
    judge,
    judge_node,
    parse_place,
)
from elastic.protocol.membership.events import Action, Note, Tell
from elastic.protocol.membership.group import Group, Leaver
from elastic.protocol.membership.planned_changes import forget_awaited, plan_change
from elastic.protocol.membership.roster import NEWCOMERS, Stage
from elastic.protocol.membership.transitions import become_closed, heard_to_be
from elastic.protocol.messages import Close


def raised(g: Group, word: messages.Failed, now_s: float, do: list[Action]) -> None:
    """Judge an exception of the script, which has ended no job by itself (closing.py)."""
    error, step, shard = parse_place(word.place)
    where = f"shard {shard} of step {step}" if shard >= 0 else ""
    kind = FailureKind.DEVICE if word.of_device else FailureKind.RAISED
    failure = _failure(g, word.worker_id, kind, f"raised {error}", where)
    if failure is not None:
        _judge(g, replace(failure, error=error, step=step), word.message, now_s, do)


def ended(g: Group, word: messages.WorkerDead, now_s: float, do: list[Action]) -> None:
    """Judge the end of a worker, if it has failed. What it has raised, it has said before."""
    if word.failure and (failure := _failure(g, word.worker_id, FailureKind(word.failure), word.because, word.where)):
        _judge(g, failure, "", now_s, do)


def exclude(g: Group, node: str, because: str, now_s: float, do: list[Action]) -> None:
    """Go on without this node: its newcomers are refused, its members leave between two steps, and so do newcomers that
    a generation lists, as they may be members already."""
    g.failures = replace(g.failures, excluded={**g.failures.excluded, node: because})
    g.slots.pop(node, None)
    do.append(Note("node_excluded", {"node": node, "because": because}))
    here = sorted(worker for worker, seen in g.workers.items() if seen.member.node == node)
    for worker in here:
        if worker in g.dead or refuse_if_excluded(g, worker, do):
            continue
        if worker not in g.given_up and g.workers[worker].stage in (Stage.MEMBER, *NEWCOMERS):
            notice = g.drains.get(worker)  # the node may have to go for another reason, too
            g.drains[worker] = Leaver(because, notice.last_call_s if notice is not None else math.inf)
    forget_awaited(g, node)
    plan_change(g, now_s, do)


def refuse_if_excluded(g: Group, worker: str, do: list[Action]) -> bool:
    """Refuse a newcomer of a node that is excluded, unless a generation lists it, so that its agent starts no other one
    in its slot. Whether it is refused."""
    seen = g.workers[worker]
    because = g.failures.excluded.get(seen.member.node)
    if because is None or g.lists(worker) or seen.entered or seen.stage is Stage.REFUSED:
        return False
    do.append(Note("refused", {"worker_id": worker, "because": because}))
    heard_to_be(g, worker, Stage.REFUSED)
    do.append(Tell((worker,), Close(g.term, f"refused: {because}", 1)))
    return True


def _failure(g: Group, worker: str, kind: FailureKind, because: str, where: str) -> WorkerFailure | None:
    """The failure of a worker that this leader knows; None: it tells nothing."""
    seen = g.workers.get(worker)
    settled = (Stage.REFUSED, Stage.LEFT, Stage.FINISHED, Stage.EXPELLED, Stage.KILLED)
    if seen is None or g.spec.restart or seen.stage in settled or worker in g.stuck:
        return None
    number = g.running.number if g.running is not None else 0
    node, done = seen.member.node, g.failures.furthest
    return WorkerFailure(worker, node, kind, because, number, done, g.lists(worker), seen.is_fruitful, where)


def _judge(g: Group, failure: WorkerFailure, words: str, now_s: float, do: list[Action]) -> None:
    if g.failures.knows(failure.worker_id):
        return
    g.failures = g.failures.and_then(failure)
    if (verdict := judge(g.failures.history)) is not None:
        if verdict.ruling not in (Ruling.DATA, Ruling.MEMORY):
            _note(verdict, do)  # these are told by become_closed
        become_closed(g, 1, verdict.because + (f"\n{words}" if words else ""), now_s, do)
        return
    others = {w for w in g.alive(g.listed) if g.workers[w].member.node != failure.node}
    fruitful = any(
        seen.member.node == failure.node and w != failure.worker_id and w not in g.dead and seen.is_fruitful
        for w, seen in g.workers.items()
    )
    verdict = judge_node(g.failures.history, bool(others), fruitful)
    if verdict is not None and failure.node not in g.failures.excluded:
        _note(verdict, do)
        exclude(g, failure.node, verdict.because, now_s, do)


def note_of_same_place(word: messages.Failed, first: str, do: list[Action]) -> str:
    """Why the job ends if two workers have raised at the same place, in a sentence. samples: the data is named too."""
    _, step, shard = parse_place(word.place)
    because = f"{first} and {word.worker_id} both raised at {word.place}"
    of_data = bool(word.samples) and step > 0
    if of_data:
        because += f"; each time with the data of shard {shard} of step {step}, {word.samples}"
    _note(Verdict(Ruling.DATA if of_data else Ruling.SCRIPT, because), do)
    return f"{because}\n{word.message}"


def _note(verdict: Verdict, do: list[Action]) -> None:
    do.append(Note("verdict", {"ruling": str(verdict.ruling), "because": verdict.because}))
