"""How a job ends: all members have finished, the script fails, or no slot is left that starts workers."""

from __future__ import annotations

from elastic.protocol.membership.events import Action, Note
from elastic.protocol.membership.group import Group, State
from elastic.protocol.membership.planned_changes import stop_waiting
from elastic.protocol.membership.restore import revive
from elastic.protocol.membership.roster import Stage
from elastic.protocol.membership.transitions import become_closed, become_closing, dismiss, heard_inside, heard_to_be
from elastic.protocol.membership.verdicts import note_of_same_place, raised
from elastic.protocol.messages import Failed, Finished, SlotGivenUp


def failed(g: Group, word: Failed, now_s: float, do: list[Action]) -> None:
    """Two workers that raise at the same place prove a mistake of the script, which replacements would repeat. Devices
    prove nothing: when a link between GPUs fails, all members get the same CUDA error in the same step. Nor do
    newcomers beside members that train with the same script."""
    do.append(Note("script_failed", {"worker_id": word.worker_id, "place": word.place, "message": word.message}))
    if word.exit_code != 1:
        become_closed(g, word.exit_code, f"{word.worker_id} stopped the job at {word.place}\n{word.message}", now_s, do)
        return
    if word.newcomer and any(worker != word.worker_id for worker in g.alive(g.listed)):
        raised(g, word, now_s, do)
        return
    if word.of_device:
        g.failures = g.failures.and_raised(f"{word.worker_id} {word.place}", word, now_s)
    else:
        g.failures = g.failures.and_raised(word.place, word, now_s)
        if (first := g.failures.errors[word.place].word.worker_id) != word.worker_id:
            become_closed(g, 1, note_of_same_place(word, first, do), now_s, do)
            return
    raised(g, word, now_s, do)


def slot_given_up(g: Group, word: SlotGivenUp, now_s: float, do: list[Action]) -> None:
    slot = f"{word.node}.{word.slot}"
    g.slots_given_up[slot] = word.because
    do.append(Note("slot_given_up", {"slot": slot, "because": word.because}))
    stop_waiting(g, slot, now_s, do)
    alive = [worker for worker, seen in g.workers.items() if worker not in g.dead and seen.stage is not Stage.REFUSED]
    if not alive or _is_hopeless(g, now_s):
        become_closed(g, word.exit_code, word.because, now_s, do)
    elif g.state is State.FORMING and g.lost:
        revive(g, now_s, do)  # the job may have waited for this slot only


def _is_hopeless(g: Group, now_s: float) -> bool:
    """Whether a slot that is given up leaves too few workers, also with newcomers on their way. A job that has begun
    may have done without the slot for long: agents say it again when they come back."""
    arrived = g.newcomers - {*g.dead, *g.given_up, *g.drains}
    here = {*(g.running.ids if g.running is not None else ()), *arrived}
    if g.state is State.PAUSED:
        found = now_s >= g.elected_s + g.timing.fence_grace_s  # by the agents; until then nobody knows who starts
        return found and len(here) + sum(g.starting.values()) < g.spec.min_workers
    return g.state is State.FORMING and not g.lost and len(here) < g.spec.min_workers


def finished(g: Group, word: Finished, now_s: float, do: list[Action]) -> None:
    worker, digest = word.worker_id, word.digest
    if worker not in g.workers or not g.lists(worker):
        return
    heard_inside(g, worker, word.generation)
    heard_to_be(g, worker, Stage.FINISHED)
    g.digest = g.digest or digest
    do.append(Note("finished", {"worker_id": worker, "digest": digest}))
    if digest != g.digest:
        because = f"{worker} ends with state {digest}, another member with {g.digest}"
        become_closed(g, 5, because, now_s, do)
        return
    if g.state is not State.CLOSING:
        stopped = g.state in (State.QUIESCING, State.REBUILDING)
        become_closing(g, now_s, do)
        if stopped:
            close_rest(g, now_s, do)
            return
    _end_if_all_finished(g, now_s, do)


def close_rest(g: Group, now_s: float, do: list[Action]) -> None:
    """Release members that wait in the last operation: a member has left the loop, so all members have every result."""
    dismiss(g, [worker for worker in g.alive(g.listed) if g.workers[worker].stage is not Stage.FINISHED], do)
    _end_if_all_finished(g, now_s, do)


def _end_if_all_finished(g: Group, now_s: float, do: list[Action]) -> None:
    # `any` stops at the first member found: in a large job a look at all members for each word would be too slow.
    if not any(_is_awaited(g, worker) for record in g.chain for worker in record.ids):
        become_closed(g, 0, "all members have finished", now_s, do)


def _is_awaited(g: Group, worker: str) -> bool:
    seen = g.workers.get(worker)
    gone = worker in g.dead or worker in g.given_up
    return seen is not None and not gone and seen.stage is Stage.MEMBER
