"""What repeated failures of workers prove: the verdict on a job, or on a node. Pure.

A *failure* is an end of a worker that has its cause in the worker: an exception of the script, a fault of its own
code (SIGSEGV, an exit code), a kill by the kernel for want of memory, an error of its GPU. Everything that comes from
outside is none: SIGKILL of somebody else, a node or a network that is gone, a notice, a drain. So neither spot losses
nor a storm of kills ever lead to a verdict.

One failure proves nothing, and so do failures of workers that took steps: they are replaced. Each rule asks for a
coincidence that chance does not bring:

    ruling       the failures                                                                             then
    script       the same exception at the same line in the same step, again after the loss was           the job ends
                 repaired
    data         SAME_SHARD workers crash, one generation after the other and without a completed         the job ends
                 operation in between, and all in the same shard of the same step
    memory       the same, and the kernel has killed each of them for want of memory                      the job ends
    no progress  failures of members ended NO_PROGRESS generations, and no operation was completed        the job ends
    node         NODE_FAILURES workers of a node in a row fail before an operation is completed with      it is left
                 one of them, none of another node does, and members there go on meanwhile

That two workers raise at the same place (exception, line, step and shard) ends the job too: membership/closing.py.
Where scripts have no step, in set-up and in rounds, they have to do so within FORGOTTEN_S.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import takewhile
from typing import NamedTuple

from elastic.protocol.messages import Failed

SAME_SHARD = 5
"""A few crashes in one shard may be chance, if faults come faster than steps."""

NO_PROGRESS = 20
NODE_FAILURES = 8
FORGOTTEN_S = 3600.0
"""After this time another exception at the same line is a new one, where no step tells whether it is."""

SUSPECTS, SUSPECTS_WITHIN = 3, 100
"""If SUSPECTS members have had other values than the others within SUSPECTS_WITHIN operations, broken machines are
hardly the cause: the script computes differently on them."""

CAUSES_SHOWN = 3
KEPT = 256
"""The number of newest failures that are remembered."""

_PLACE = re.compile(r"(?P<error>.*?)(?: step (?P<step>\d+))?(?: shard (?P<shard>\d+))?", re.DOTALL)


class FailureKind(StrEnum):
    RAISED = "exception"
    """The script raised."""
    CRASHED = "crash"
    """A signal that the worker's own code has caused, or an exit code, without an exception that it could report."""
    STARVED = "memory"
    """The kernel has killed the worker for want of memory."""
    DEVICE = "device"
    """The worker's GPU, its driver or NCCL has failed."""


class Ruling(StrEnum):
    SCRIPT = "script"
    DATA = "data"
    MEMORY = "memory"
    NO_PROGRESS = "no progress"
    NODE = "node"


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """because: how it ended, in words. where: the shard that it computed, as messages.WorkerDead has it, or "". error,
    step: of an exception its type and line, and its step; -1: none. generation: that of the job. done: the most
    operations of the job that were ever complete. member: whether it was one. fruitful: whether an operation was
    completed with it, or later with another one of its node."""

    worker_id: str
    node: str
    kind: FailureKind
    because: str
    generation: int
    done: int
    member: bool
    fruitful: bool
    where: str = ""
    error: str = ""
    step: int = -1


@dataclass(frozen=True, slots=True)
class Verdict:
    """because: what is wrong, in a sentence for the user, and its evidence."""

    ruling: Ruling
    because: str


class FirstRaised(NamedTuple):
    """The first exception at a place. at_s: the leader's time."""

    word: Failed
    at_s: float

    def is_over(self, now_s: float) -> bool:
        """Whether it proves nothing any more. A step that fails again proves the script, however late. A line without
        a step, as in a set-up or in rounds, is passed again and again: a disk may have been away twice."""
        return parse_place(self.word.place)[1] < 0 and now_s - self.at_s > FORGOTTEN_S


@dataclass(frozen=True, slots=True)
class Failures:
    """What a leader has seen fail. A later leader begins anew."""

    errors: Mapping[str, FirstRaised] = field(default_factory=dict)
    """Place of an exception -> the first one there. Failures of devices have a place each."""
    history: tuple[WorkerFailure, ...] = ()
    """The newest failures, each of another worker."""
    furthest: int = 0
    """The most operations of the job that a member has ever said are complete. If the job has gone back to what is
    kept, operations are counted from 0 again: then one more for each word of a later step than any before."""
    said: int = 0
    """The same by words of members alone, without the reports of broken rings, which tell no steps."""
    steps: int = 0
    """The most steps of the job that a member has ever said are applied."""
    suspects: tuple[int, ...] = ()
    """How many operations were complete when a member had other values than the others (`--verify`), each time."""
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Node that is left -> why."""

    def knows(self, worker: str) -> bool:
        """Whether the failure of this worker is among the newest."""
        return any(known.worker_id == worker for known in self.history)

    @property
    def in_vain(self) -> tuple[WorkerFailure, ...]:
        """The newest failures, if no operation has been completed since."""
        return tuple(known for known in self.history if known.done == self.furthest)

    def and_got_to(self, reduced: int, steps: int) -> Failures:
        """Note how far a member is: operations that are complete (0: not known), and applied steps of the job."""
        behind = 0 < reduced < self.said and steps > self.steps
        said = self.furthest + 1 if behind else max(self.said, reduced)
        furthest, steps = max(self.furthest, said), max(self.steps, steps)
        if (furthest, said, steps) == (self.furthest, self.said, self.steps):
            return self
        return replace(self, furthest=furthest, said=said, steps=steps)

    def and_broke_at(self, generation: int, members: Collection[str], reduced: int) -> Failures:
        """Note how many operations were complete when the ring of a generation broke. The failure of a member has
        broken the ring, so these operations were complete before it, also those of which the leader had not heard by
        then. members: of that ring; the failure of any other worker breaks no ring."""
        furthest = max(self.furthest, reduced)
        history = tuple(
            replace(known, done=furthest)
            if known.generation == generation and known.done < furthest and known.worker_id in members
            else known
            for known in self.history
        )
        return replace(self, furthest=furthest, history=history)

    def and_serves(self, node: str) -> Failures:
        """Note that an operation was completed with a worker of this node: what failed there before is no row."""
        if not any(known.node == node and not known.fruitful for known in self.history):
            return self
        marked = (replace(known, fruitful=known.fruitful or known.node == node) for known in self.history)
        return replace(self, history=tuple(marked))

    def and_then(self, failure: WorkerFailure) -> Failures:
        return replace(self, history=(*self.history, failure)[-KEPT:])

    def and_raised(self, place: str, word: Failed, now_s: float) -> Failures:
        """Note who has raised there, if nobody has before."""
        if place in self.errors and not self.errors[place].is_over(now_s):
            return self
        return replace(self, errors={**self.errors, place: FirstRaised(word, now_s)})


def parse_place(place: str) -> tuple[str, int, int]:
    """Exception and line, step and shard of messages.Failed.place; -1: it has none."""
    found = _PLACE.fullmatch(place)
    assert found is not None  # every part but the first may be absent
    step, shard = (int(found[name]) if found[name] is not None else -1 for name in ("step", "shard"))
    return found["error"], step, shard


def judge(history: Sequence[WorkerFailure]) -> Verdict | None:
    """What the last failure, after those before it, proves of the job; None: nothing."""
    new = history[-1]
    if not new.member or new.kind is FailureKind.DEVICE:
        return None
    if new.kind is FailureKind.RAISED and (verdict := _same_error(history, new)) is not None:
        return verdict
    in_vain = _in_vain(history)
    return _same_shard(in_vain) or _no_progress(in_vain)


def _in_vain(history: Sequence[WorkerFailure]) -> list[WorkerFailure]:
    """The failures of members since the last operation that was complete, the oldest first. Those of devices prove
    nothing of a job."""
    proving = (known for known in reversed(history) if known.member and known.kind is not FailureKind.DEVICE)
    return list(takewhile(lambda known: known.done == history[-1].done, proving))[::-1]


def _same_error(history: Sequence[WorkerFailure], new: WorkerFailure) -> Verdict | None:
    same = (known for known in history if known.member and (known.error, known.step) == (new.error, new.step))
    first = next(same)  # at least the new one
    if new.step < 0 or first.generation >= new.generation:
        return None  # whatever they share, as a file server, may have failed both at one time
    who = f"{first.worker_id} and, after that loss was repaired, {new.worker_id}"
    return Verdict(Ruling.SCRIPT, f"the script fails in step {new.step}: {who} both raised {new.error}")


def _same_shard(in_vain: Sequence[WorkerFailure]) -> Verdict | None:
    verdict = last_shard(in_vain)
    apart = len({known.generation for known in in_vain})  # one blow to all workers is one generation
    return verdict if verdict is not None and min(len(in_vain), apart) >= SAME_SHARD else None


def last_shard(history: Sequence[WorkerFailure]) -> Verdict | None:
    """What the last failures have in common, if all that came after the last completed operation, at least two, ended
    members in one shard. It proves nothing yet (SAME_SHARD), but if the job ends anyway, it is what a user should
    know first."""
    same = _in_vain(history) if history else []
    shards = {known.where.partition(": ")[0] for known in same}
    crashed = all(known.kind in (FailureKind.CRASHED, FailureKind.STARVED) for known in same)
    if len(same) < 2 or len(shards) > 1 or "" in shards or not crashed:
        return None
    samples = next((known.where.partition(": ")[2] for known in reversed(same) if ": " in known.where), "")
    about = f"{shards.pop()}{f' ({samples})' if samples else ''}"
    ends = ", ".join(f"{known.worker_id} {known.because}" for known in same[-SAME_SHARD:])
    if all(known.kind is FailureKind.STARVED for known in same):
        advice = "smaller micro-batches (more shards) or fewer workers on the machine need less"
        return Verdict(Ruling.MEMORY, f"{about} needs more memory than its workers may have: {ends}; {advice}")
    return Verdict(Ruling.DATA, f"the data of {about} ends worker after worker: {ends}")


def _no_progress(in_vain: Sequence[WorkerFailure]) -> Verdict | None:
    generations = {known.generation for known in in_vain}
    if len(generations) < NO_PROGRESS:
        return None
    causes = Counter(known.because for known in in_vain).most_common(CAUSES_SHOWN)
    told = ", ".join(f"{count} workers {cause}" for cause, count in causes)
    because = f"{len(generations)} generations in a row ended before a step was complete"
    return Verdict(Ruling.NO_PROGRESS, f"the job makes no progress, {because}: {told}")


def judge_node(history: Sequence[WorkerFailure], others_train: bool, one_is_fruitful: bool) -> Verdict | None:
    """Whether the last failure, after those before it, proves that its node cannot run workers.

    others_train: whether another node has a member. one_is_fruitful: whether a worker that lives on the node has taken
    a step.
    """
    new = history[-1]
    if not others_train or one_is_fruitful or new.fruitful:
        return None
    here = [known for known in history if known.node == new.node][-NODE_FAILURES:]
    if len(here) < NODE_FAILURES or any(known.fruitful for known in here):
        return None
    since = history[history.index(here[0]) :]
    if any(known.node != new.node for known in since) or here[0].done >= new.done:
        return None
    ends = "; ".join(dict.fromkeys(known.because for known in here))
    return Verdict(
        Ruling.NODE,
        f"node {new.node} loses every worker that is put on it: the last {len(here)} failed before their first step "
        f"({ends}), while the workers of other nodes went on",
    )
