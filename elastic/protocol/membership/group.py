"""What a leader knows: the chain of records, and every worker as its latest words describe it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from elastic.config import JobSpec, Timing
from elastic.protocol.messages import Doing, Failed, Generation, Member, Report, RingState, Unreadable


class Stage(StrEnum):
    """Where a worker stands in the job; ARCS says what may follow. Whether its process is dead and whether
    its node is silent are other questions: see Group.dead, given_up, silent_nodes."""

    NAMED = "named"
    """A record of an earlier leader names it, and it has not announced itself to this one."""
    ANNOUNCED = "announced"
    """It waits as a spare, or for the first generation."""
    INVITED = "invited"
    """A newcomer that sets itself up and copies what it can."""
    READY = "ready"
    """A newcomer that has asked to be admitted, since the last loss generation."""
    REFUSED = "refused"
    """A newcomer that will not be admitted; it is told to end, or its process is killed."""
    MEMBER = "member"
    """It has entered a generation, or is listed by a durable form or loss generation."""
    FINISHED = "finished"
    """It has left the training loop with the last result of the job."""
    LEFT = "left"
    """It drained, and everybody that stays has its last result."""
    EXPELLED = "expelled"
    """The job goes on without it; it has been told, and its process is left alone for fence_grace_s."""
    KILLED = "killed"
    """Expelled, and its agent has been told to kill its process."""


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
"""Stage of a worker -> the stages that may follow. Back to that of a newcomer leads what an agent says when its stream
begins again: it knows of no invitation, or of no generation that its worker has entered."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as its latest words describe it."""

    member: Member
    slot: int
    pid: int
    numerics: str
    entered: int = 0
    ring: RingState = RingState.NONE
    reduced: int = 0
    applied: int = 0
    phase: str = ""
    moved_s: float = 0.0
    """When its phase changed last."""
    worked_s: float = -math.inf
    """When it last said that it does something else than wait for others."""
    heard_s: float = -math.inf
    """When it last said where it stands."""
    heard_from_s: float = -math.inf
    """Since when it says so without a break of suspect_s."""
    doing: Doing = Doing.ELSEWHERE
    for_s: float = 0.0
    usual_s: float = 0.0
    computes: bool = True
    over: str = ""
    over_because: str = ""
    stage: Stage = Stage.ANNOUNCED
    expelled_s: float = 0.0
    """When it was expelled, or when its time of fence_grace_s was prolonged."""
    snapshot: str = ""
    """The newest whole one in its machine's memory when it started."""
    shard_us: int = 0
    """Microseconds that it takes for a shard; 0: not known yet."""
    exchange_us: int = 0
    """And for the reduction of a pass, once all are there."""


class Roster(dict[str, WorkerView]):
    """By worker. With nearly every word it is asked who is at a certain stage, and whether anybody has entered a
    certain generation; of thousands nobody can be looked at for that. Changed by item, which raises AssertionError
    where the new stage may not follow, and by `discard`."""

    def __init__(self, workers: Roster | None = None) -> None:
        super().__init__(workers if workers is not None else {})
        self._at: dict[Stage, set[str]] = {
            stage: set(workers.at(stage) if workers is not None else ()) for stage in Stage
        }
        self._inside: Counter[int] = Counter(workers._inside) if workers is not None else Counter()

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
        """If it is there."""
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


class State(StrEnum):
    FORMING = "forming"
    QUIESCING = "quiescing"
    REBUILDING = "rebuilding"
    RUNNING = "running"
    PAUSED = "paused"
    CLOSING = "closing"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Leaver:
    """A worker whose node wants to leave. last_call_s: when a job in which all want to, and for which nobody else
    comes, stops in order, while there is time for it. demoted: its node stays, and it becomes a spare: a faster one
    takes its place, or nobody."""

    because: str
    last_call_s: float
    demoted: bool = False


@dataclass(frozen=True, slots=True)
class Silence:
    """How long a node's agent has been silent, by this leader's clock. since_s: when it was heard last, or later.
    counts_s: from when its silence counts where the others do not show that they wait for it. ended_s: when its stream
    was closed."""

    since_s: float
    counts_s: float
    ended_s: float = math.inf


@dataclass(slots=True)
class Group:
    """Owned by one loop; `step` returns a new one and leaves the old as it was, `advance` changes it."""

    spec: JobSpec
    seed: str
    term: int = 0
    state: State = State.FORMING
    because: str = "waiting for workers"
    since_s: float = 0.0
    chain: tuple[Generation, ...] = ()
    """Records from the last form or loss generation to the highest committed one."""
    workers: Roster = field(default_factory=Roster)
    dead: dict[str, str] = field(default_factory=dict)
    """Members of the chain whose own agent says they are gone -> why."""
    given_up: dict[str, str] = field(default_factory=dict)
    """Members of the chain that are silent: no proof of anything."""
    silent_nodes: dict[str, Silence] = field(default_factory=dict)
    attended_s: dict[str, float] = field(default_factory=dict)
    """Node -> when its agent came last; what it has to tell of its workers comes after that."""
    slots: dict[str, int] = field(default_factory=dict)
    """Node whose agent attends -> workers that it starts, without spares."""
    size: int = 0
    """How many workers somebody wants the job to have; 0: as it was submitted."""
    resized_s: float = 0.0
    """When that was heard."""
    window_over: bool = False
    """The first generation may be formed with min_workers."""
    turned_away: set[str] = field(default_factory=set)
    """Newcomers that a member could not reach; wanted again once the ring has settled without them."""
    missed: dict[str, int] = field(default_factory=dict)
    """Slot -> its newcomers in a row that were ready and died as such, most likely because their epoch was over."""
    awaited: str = ""
    """Such a slot, for whose next newcomer the ring waits in the step that it begins."""
    awaited_s: float = 0.0
    """Since when."""
    in_vain: set[str] = field(default_factory=set)
    """Slots whose newcomer could not copy the state within the time in which the ring stood still for it."""
    stuck: set[str] = field(default_factory=set)
    """Members that live and were given up, because they held all others up: their reports do not count."""
    stuck_at: dict[str, str] = field(default_factory=dict)
    """Place -> worker that got stuck there first."""
    hung: dict[str, str] = field(default_factory=dict)
    """All members that live, because none of them gets on -> where it is: they are being ended."""
    hung_s: float = 0.0
    """When that was ordered last."""
    round: int = 0
    reports: dict[str, Report] = field(default_factory=dict)
    up: int = 0
    """The members of the new ring below this rank have said that it is up."""
    committing: Generation | None = None
    planned_s: float = 0.0
    """When the pending generation was committed."""
    drains: dict[str, Leaver] = field(default_factory=dict)
    stopping: bool = False
    """Somebody wants the job to end in order, so nobody waits for successors of those who drain."""
    advanced_s: dict[int, float] = field(default_factory=dict)
    """Generation -> when a member last reported progress in it."""
    accused: dict[str, tuple[str, ...]] = field(default_factory=dict)
    failed_builds: dict[frozenset[str], frozenset[int]] = field(default_factory=dict)
    """Members -> their generations whose ring could not be built."""
    errors: dict[str, Failed] = field(default_factory=dict)
    """Place of an exception -> what the worker said which raised it first."""
    slots_given_up: dict[str, str] = field(default_factory=dict)
    youngest: int = -1
    """The highest seniority that has been given."""
    digest: str = ""
    shards: int = 0
    """How many shards a pass has; 0: not known yet."""
    compared_s: float = -math.inf
    """When members were compared last."""
    slow_since_s: dict[str, float] = field(default_factory=dict)
    """Members that have been slower than slow_factor allows, without a break -> since when."""
    stragglers: dict[str, str] = field(default_factory=dict)
    """Those of them that are named -> how slow they are."""
    uneven_since_s: float = math.inf
    """Since when another ownership would have paid, without a break."""
    balanced_s: float = -math.inf
    """When ownership was changed last."""
    demoted_s: dict[str, float] = field(default_factory=dict)
    """Slot -> when a worker of it was demoted last."""
    quiesced_s: float = 0.0
    """When everybody was asked to leave the ring that is not replaced yet."""
    revives: bool = False
    """If every copy of the state is lost, the job goes on from what its nodes have kept (restore.py)."""
    resumed: str = ""
    """The checkpoint from which the job's first generation goes on, or ""."""
    checkpoint: str = ""
    """The newest of those taken by themselves, as far as this leader knows."""
    snapshots: dict[str, str] = field(default_factory=dict)
    """Node -> the newest whole snapshot in its memory when the last of its workers that died was gone, or ""."""
    unreadable: dict[str, Unreadable] = field(default_factory=dict)
    """What the job was to go on from, and what was said of it."""
    applied: int = -1
    """The most steps that a member has said it applied since this leader formed the job; -1: another leader formed it,
    or a member died of which too little had been heard."""
    anew: int = 0
    """How often the run has begun once more, because all members died before a step was applied."""
    begins_anew: bool = False
    """While FORMING with `lost`: it may do so."""
    lost: str = ""
    """While FORMING: how every copy of the state was lost, in a sentence; "": the job has not begun. Newcomers from
    before that are expelled, so that processes which know nothing take their places."""

    @property
    def top(self) -> Generation | None:
        return self.chain[-1] if self.chain else None

    @property
    def aim(self) -> Generation | None:
        """The newest list that the job is to have. An early generation is a step on the way there."""
        return next((record for record in reversed(self.chain) if not record.early), None)

    @property
    def began(self) -> str:
        """The snapshot or checkpoint from which the job began the last time, or "": with its first step."""
        return self.top.entry if self.top is not None and self.top.entry else self.resumed

    @property
    def base(self) -> Generation | None:
        return self.chain[0] if self.chain else None

    @property
    def listed(self) -> set[str]:
        """Everybody of every generation from the last loss to the highest committed."""
        return {worker for record in self.chain for worker in record.ids}

    def lists(self, worker: str) -> bool:
        """Whether it is one of those."""
        return any(record.member(worker) is not None for record in self.chain)

    @property
    def running(self) -> Generation | None:
        """The newest generation that somebody is known to have entered."""
        if len(self.chain) == 1:
            return self.chain[0]
        return next((r for r in reversed(self.chain) if self.workers.has_entered(r.number)), self.base)

    @property
    def newcomers(self) -> set[str]:
        """Workers that are no members yet and may become some."""
        return self.workers.at(*NEWCOMERS)

    @property
    def expelled(self) -> set[str]:
        """Expelled workers whose processes live and are left alone for now."""
        return self.workers.at(Stage.EXPELLED) - self.dead.keys()

    @property
    def spares(self) -> set[str]:
        """Newcomers for which there has been no place yet: they wait with everything set up. Once a job has begun."""
        uninvited = self.workers.at(Stage.ANNOUNCED) if self.chain else set()
        return {worker for worker in uninvited if not self.lists(worker)}

    @property
    def asked_for(self) -> int:
        """How many workers the job is to have, whoever is here."""
        return self.size or self.spec.workers

    @property
    def agents(self) -> int:
        """How many there are once all are here, if the machines to come are like the smallest one so far."""
        return -(-self.wanted_workers // max(1, min(self.slots.values(), default=1)))

    @property
    def timing(self) -> Timing:
        """The job's own, or, where thousands of agents speak less often and take longer to find a leader, what it is
        for so many: of the silence of nodes, and of answers that all have to give."""
        return self.spec.timing.scaled(self.agents)

    @property
    def wanted_workers(self) -> int:
        """How large the world shall be: as somebody wants it, or else as many as the nodes here bring, which is more
        than `workers` if one has joined. A spare that a node keeps besides fills a place, and never adds one."""
        return min(self.spec.workers_limit, self.size or max(self.asked_for, sum(self.slots.values())))

    @property
    def places(self) -> int:
        """For how many more newcomers the world has a place, once it is formed."""
        assert self.aim is not None
        coming_next = self.committing if self.committing and not self.committing.early else self.aim
        settled = set(coming_next.ids) - {*self.dead, *self.given_up, *self.drains}
        return max(0, self.wanted_workers - len(settled | self.coming))

    @property
    def coming(self) -> set[str]:
        """Newcomers on their way to a place."""
        invited = self.workers.at(Stage.INVITED, Stage.READY)
        return invited - {*self.dead, *self.given_up, *self.drains} if invited else invited

    @property
    def awaited_until_s(self) -> float:
        """Until it has a place in a generation, progress_s; then, while its copy gets on, half of what a paused job
        waits for replacements."""
        timing = self.spec.timing
        listed = self.awaited in {slot_of(worker) for worker in (self.aim.ids if self.aim else ())}
        return self.awaited_s + (max(timing.progress_s, timing.pause_limit_s / 2) if listed else timing.progress_s)

    @property
    def setting_up(self) -> dict[str, float]:
        """Invited newcomers that are not ready to be admitted -> when their time to get on is over."""
        if self.state not in (State.RUNNING, State.PAUSED) or not (coming := self.coming):
            return {}
        seen = {worker: self.workers[worker] for worker in coming if not self.lists(worker)}
        at_work_s = max(self.set_up_s, self.spec.timing.hang_s)  # whoever uses a processor may compile
        return {
            worker: one.moved_s + (at_work_s if one.computes else self.set_up_s)
            for worker, one in seen.items()
            if one.stage is Stage.INVITED and one.member.node not in self.silent_nodes
        }

    @property
    def set_up_s(self) -> float:
        """How long a newcomer's set-up may stay in one phase: half of what a job waits for, at its start or, if that is
        longer, below quorum. So where one hangs there is time for another."""
        return max(self.spec.timing.orphan_limit_s, self.spec.timing.pause_limit_s) / 2

    @property
    def starting(self) -> dict[str, int]:
        """Node -> its processes that have not announced themselves yet, though their agent is there and tries."""
        here = {worker: seen.member.node for worker, seen in self.workers.items() if worker not in self.dead}
        settled = Counter(here.values())
        settled.update(slot.rpartition(".")[0] for slot in self.slots_given_up.keys() - {slot_of(w) for w in here})
        missing = {node: slots + self.spec.spares - settled[node] for node, slots in self.slots.items()}
        return {node: count for node, count in sorted(missing.items()) if count > 0}

    @property
    def joining(self) -> dict[str, float]:
        """Newcomers whom a generation waits for, pending or in effect -> when they last got on."""
        aim, running = self.aim, self.running
        if self.state not in (State.RUNNING, State.PAUSED) or self.committing or aim is None or running is None:
            return {}
        silent = self.silent_nodes
        late = {w: one for w in self.newcomers if (one := self.workers[w]).member.node not in silent}
        gone = {*self.dead, *self.given_up, *self.turned_away} if late else set()
        return {
            worker: max(one.moved_s, self.planned_s, self.attended_s.get(one.member.node, 0.0))
            for worker, one in late.items()
            if worker not in gone and (aim.member(worker) or running.member(worker))
        }

    @property
    def successors(self) -> set[str]:
        """Newcomers on nodes that stay: one of them may soon hold the state."""
        return self.newcomers - set(self.drains) - set(self.dead) - set(self.given_up)

    def state_left_with(self, workers: Iterable[str]) -> Member:
        """The member, of these that all drain, whose node can stay longest; of equals the most senior."""
        members = [self.workers[worker].member for worker in workers]
        return max(members, key=lambda m: (self.drains[m.worker_id].last_call_s, -m.seniority))

    def alive(self, workers: Iterable[str]) -> tuple[str, ...]:
        """Those of them that are known and not dead, sorted."""
        return tuple(sorted(worker for worker in workers if worker in self.workers and worker not in self.dead))

    def take_seniority(self) -> int:
        """Above everybody's, also where the number was given by an earlier leader."""
        self.youngest += 1
        return self.youngest

    @property
    def last_call_s(self) -> float:
        """When the job stops if all members drain and nobody takes over; infinite while somebody stays."""
        if self.aim is None or self.running is None:
            return math.inf
        if not self.aim.ids or self.successors or any(worker not in self.drains for worker in self.aim.ids):
            return math.inf
        return max(self.drains[worker].last_call_s for worker in self.aim.ids)

    @property
    def proof_ends_s(self) -> float:
        """By then a ring without any leader has parked, so waiting for proof that it stands is over."""
        return self.quiesced_s + self.spec.timing.orphan_limit_s + self.spec.timing.orphan_margin_s


def new(spec: JobSpec, seed: str, *, revives: bool = False, resumed: str = "") -> Group:
    """seed: unguessable; tokens of generations are derived from it. revives, resumed: see Group."""
    return Group(spec=spec, seed=seed, revives=revives, resumed=resumed)


def slot_of(worker_id: str) -> str:
    """`<node>.<slot>.<incarnation>` -> `<node>.<slot>`."""
    return worker_id.rpartition(".")[0]
