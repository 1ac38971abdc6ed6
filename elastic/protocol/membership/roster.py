"""Every worker that a leader knows, as its latest words describe it, and the stage at which it is in the job."""

from __future__ import annotations

import math
from collections import Counter
from enum import StrEnum
from typing import NamedTuple

from elastic.protocol.messages import Member, Progress, RingState


class Stage(StrEnum):
    """Where a worker stands in the job; ARCS says which stage may follow which. Whether its process is dead or its node
    is silent is kept apart from that, in Group.dead, Group.given_up and Group.silent_nodes."""

    NAMED = "named"
    """A record of an earlier leader names the worker, which has not announced itself to this leader."""
    ANNOUNCED = "announced"
    """The worker waits as a spare, or for the first generation."""
    INVITED = "invited"
    """The newcomer sets itself up and copies what it can."""
    READY = "ready"
    """The newcomer has asked to be admitted, since the last loss generation."""
    REFUSED = "refused"
    """The newcomer will not be admitted; it is told to end, or its process is killed."""
    MEMBER = "member"
    """The worker has entered a generation, or a durable form or loss generation lists it."""
    FINISHED = "finished"
    """The worker has left the training loop with the last result of the job."""
    LEFT = "left"
    """The worker has drained, and every member that stays has the last result."""
    EXPELLED = "expelled"
    """The job goes on without the worker; it has been told, and its process is left alone for fence_grace_s."""
    KILLED = "killed"
    """The worker was expelled, and its agent has been told to kill its process."""


NEWCOMERS = (Stage.NAMED, Stage.ANNOUNCED, Stage.INVITED, Stage.READY)
"""Workers at these stages have entered no generation, and may become members."""

ARCS: dict[Stage, frozenset[Stage]] = {
    stage: frozenset(map(Stage, after.split()))
    for stage, after in {
        Stage.NAMED: "announced invited ready member refused expelled",
        Stage.ANNOUNCED: "invited ready member refused expelled",
        Stage.INVITED: "announced ready member refused expelled",
        Stage.READY: "invited member refused expelled",
        Stage.REFUSED: "member expelled",
        Stage.MEMBER: "announced invited ready finished left expelled",
        Stage.FINISHED: "",
        Stage.LEFT: "",
        Stage.EXPELLED: "killed",
        Stage.KILLED: "expelled",
    }.items()
}
"""Stage of a worker -> the stages that may follow. When an agent's stream begins again, the worker may go back to a
newcomer's stage: the agent knows of no invitation, or of no generation that its worker has entered."""


class WorkerView(NamedTuple):
    """A worker as its latest words describe it. A tuple, because a changed copy of it costs a third of a dataclass's: a
    loss in a large job changes the views of all its workers several times."""

    member: Member
    slot: int
    pid: int
    numerics: str
    entered: int = 0
    ring: RingState = RingState.NONE
    reduced: int = 0
    applied: int = 0
    said: Progress = Progress("", 0, 0)
    """Its newest word of this kind, since it announced itself last."""
    moved_s: float = 0.0
    """When the worker's phase changed last."""
    worked_s: float = -math.inf
    """When the worker last said that it does something other than wait for others."""
    heard_s: float = -math.inf
    """When the worker last said where it stands."""
    heard_from_s: float = -math.inf
    """The start of the time in which the worker has said where it stands without a break of suspect_s."""
    stage: Stage = Stage.ANNOUNCED
    expelled_s: float = 0.0
    """When the worker was expelled, or when its fence_grace_s was started again."""
    snapshot: str = ""
    """The newest whole snapshot in its machine's memory when the worker started."""
    shard_us: int = 0
    """Microseconds that the worker takes for a shard; 0: not known yet."""
    came: int = -1
    """Operations that were complete when it first said that it is a member; -1: it has not said so."""
    exchange_us: int = 0
    """Microseconds that it takes for the reduction of a pass, once all members are there; 0: not known yet."""

    @property
    def for_s(self) -> float:
        """How long it has been doing what it does."""
        return self.said.for_ms / 1000

    @property
    def usual_s(self) -> float:
        """Its longest recent shard; 0: none yet."""
        return self.said.usual_ms / 1000

    @property
    def is_fruitful(self) -> bool:
        """Whether the members have completed an operation since it became one."""
        return 0 <= self.came < self.reduced


class Roster(dict[str, WorkerView]):
    """Worker -> its view, indexed by stage and by generation entered: nearly every word asks for these, and a look at
    thousands of workers would be too slow. Setting an item raises AssertionError if ARCS does not allow the stage."""

    def __init__(self, workers: Roster | None = None) -> None:
        super().__init__(workers if workers is not None else {})
        self._at: dict[Stage, set[str]] = {
            stage: set(workers.at(stage) if workers is not None else ()) for stage in Stage
        }
        self._inside: Counter[int] = Counter(workers._inside) if workers is not None else Counter()

    def __copy__(self) -> Roster:
        return Roster(self)

    def __setitem__(self, worker: str, seen: WorkerView) -> None:
        before = self.get(worker)
        if before is not None and before.stage is not seen.stage and seen.stage not in ARCS[before.stage]:
            raise AssertionError(f"{worker} is {before.stage} and cannot become {seen.stage}")
        if before is None or (before.entered, before.stage) != (seen.entered, seen.stage):
            self._leave(worker, before)
            self._inside[seen.entered] += 1
            self._at[seen.stage].add(worker)
        super().__setitem__(worker, seen)

    def __delitem__(self, worker: str) -> None:
        self._leave(worker, self.get(worker))
        super().__delitem__(worker)

    def discard(self, worker: str) -> None:
        """Remove the worker if it is there."""
        if worker in self:
            del self[worker]

    def at(self, *stages: Stage) -> set[str]:
        """The workers at any of these stages."""
        return set[str]().union(*(self._at[stage] for stage in stages))

    def has_entered(self, generation: int) -> bool:
        """Whether this generation, above 0, is the last one that somebody here has entered."""
        return self._inside[generation] > 0

    def _leave(self, worker: str, before: WorkerView | None) -> None:
        if before is not None:
            self._inside[before.entered] -= 1
            self._at[before.stage].discard(worker)


def slot_of(worker_id: str) -> str:
    """`<node>.<slot>.<incarnation>` -> `<node>.<slot>`."""
    return worker_id.rpartition(".")[0]
