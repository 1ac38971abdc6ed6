"""What a leader knows: the chain of records, every worker (roster.py), and what it has seen of nodes and rings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from elastic.config import JobSpec, Timing
from elastic.protocol.failures import Failures
from elastic.protocol.membership.roster import NEWCOMERS, Roster, Stage, slot_of
from elastic.protocol.messages import Failed, Generation, Member, Report, Unreadable


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
    """A worker that is to leave, because its node wants to. last_call_s: when a job whose nodes all want to leave,
    without successors, stops in order, while there is time for it. demoted: the node stays, and the worker becomes a
    spare: a faster worker takes its place, or none."""

    because: str
    last_call_s: float
    demoted: bool = False


@dataclass(frozen=True, slots=True)
class Silence:
    """How long a node's agent has been silent, by this leader's clock. since_s: when it was last heard, or later.
    counts_s: when its silence began to count, unless the other members show that they wait for it. ended_s: when its
    stream was closed."""

    since_s: float
    counts_s: float
    ended_s: float = math.inf


class Unreached(NamedTuple):
    """How often in a row a ring with a slot's newcomer could not be built, last of which generation, and when the next
    one may be. -inf: now."""

    times: int
    generation: int
    until_s: float


class BegunAgain(NamedTuple):
    """times: how often the run has begun again, because all members died before a step was applied; of a job in rounds,
    how many rounds in a row were short, and ended with the loss of all members. formed_s: when the last generation of
    new processes was durable."""

    times: int = 0
    formed_s: float = 0.0


class AwaitedSlot(NamedTuple):
    """slot: for whose next newcomer the ring waits in the step that it begins; "": none. since_s: when the ring began
    to wait for it; infinite before. asked: whether it waits because that newcomer has asked for it (Ready.hold): when
    that one is gone, nobody is waited for."""

    slot: str = ""
    since_s: float = math.inf
    asked: bool = False


@dataclass(slots=True)
class Group:
    """The state of a job's membership, owned by one loop. `advance` changes it."""

    spec: JobSpec
    seed: str
    """Unguessable; tokens of generations are derived from it."""
    term: int = 0
    elected_s: float = -math.inf
    """When this leader took over a job that had begun."""
    state: State = State.FORMING
    because: str = "waiting for workers"
    since_s: float = 0.0
    chain: tuple[Generation, ...] = ()
    """Records from the last form or loss generation to the highest committed one."""
    workers: Roster = field(default_factory=Roster)
    dead: dict[str, str] = field(default_factory=dict)
    """Members of the chain whose own agents say that they are gone -> why."""
    given_up: dict[str, str] = field(default_factory=dict)
    """Silent workers that are no longer waited for -> why. Their silence proves nothing."""
    silent_nodes: dict[str, Silence] = field(default_factory=dict)
    attended_s: dict[str, float] = field(default_factory=dict)
    """Node -> when its agent came last; what the agent says of its workers comes after that."""
    slots: dict[str, int] = field(default_factory=dict)
    """Node whose agent attends -> number of workers that the agent starts, without spares."""
    size: int = 0
    """How many workers an operator wants the job to have; 0: the number with which it was submitted."""
    resized_s: float = 0.0
    """When `size` was set."""
    window_over: bool = False
    """The first generation may be formed with min_workers."""
    turned_away: set[str] = field(default_factory=set)
    """Newcomers that a member could not reach; they are wanted again once the ring has settled without them."""
    unreached: dict[str, Unreached] = field(default_factory=dict)
    """Slot whose newcomers could not be connected to the members, since one of them last became a member."""
    missed: dict[str, int] = field(default_factory=dict)
    """Slot -> number of its newcomers in a row that died while ready, most likely because their epoch was over."""
    awaited: AwaitedSlot = field(default_factory=AwaitedSlot)
    in_vain: set[str] = field(default_factory=set)
    """Slots whose newcomer could not copy the state while the ring stood still for it."""
    stuck: set[str] = field(default_factory=set)
    """Members that live but were given up, because they held all others up: their reports do not count."""
    stuck_at: dict[str, str] = field(default_factory=dict)
    """Place -> the worker that got stuck there first."""
    hung: dict[str, str] = field(default_factory=dict)
    """All living members, if none of them makes progress -> where each is. They are being ended."""
    hung_s: float = 0.0
    """When the end of the members in `hung` was last ordered."""
    round: int = 0
    reports: dict[str, Report] = field(default_factory=dict)
    up: int = 0
    """All members of the new ring below this rank have said that it is up."""
    committing: Generation | None = None
    planned_s: float = 0.0
    """When the pending generation was committed."""
    drains: dict[str, Leaver] = field(default_factory=dict)
    stopping: bool = False
    """The job is to end in order, so nobody waits for successors of draining workers."""
    advanced_s: dict[int, float] = field(default_factory=dict)
    """Generation -> when a member last reported progress in it."""
    accused: dict[str, tuple[str, ...]] = field(default_factory=dict)
    failed_builds: dict[frozenset[str], frozenset[int]] = field(default_factory=dict)
    """Members -> those of their generations whose ring could not be built."""
    failures: Failures = field(default_factory=Failures)
    """What has failed by itself, and the nodes that are left for that (verdicts.py)."""
    slots_given_up: dict[str, str] = field(default_factory=dict)
    youngest: int = -1
    """The highest seniority that has been given."""
    comparable: str = ""
    """The worker whose numerics were compared with last, or ""."""
    digest: str = ""
    shards: int = 0
    """How many shards a pass has; 0: not known yet."""
    compare_s: float = -math.inf
    """When the speeds of members are compared next."""
    slow_since_s: dict[str, float] = field(default_factory=dict)
    """Member that is slower than slow_factor allows -> since when, without a break."""
    stragglers: dict[str, str] = field(default_factory=dict)
    """Member that is named as a straggler -> how slow it is."""
    uneven_since_s: float = math.inf
    """Since when another ownership would have paid, without a break."""
    balanced_s: float = -math.inf
    """When ownership was last changed."""
    demoted_s: dict[str, float] = field(default_factory=dict)
    """Slot -> when a worker of it was last demoted."""
    quiesced_s: float = 0.0
    """When all members were asked to leave the ring that is not replaced yet."""
    revives: bool = False
    """Whether the job, if every copy of the state is lost, goes on from what its nodes have kept (restore.py)."""
    resumed: str = ""
    """The checkpoint from which the job's first generation goes on, or ""."""
    checkpoint: str = ""
    """The newest automatic checkpoint that this leader knows of, or ""."""
    snapshots: dict[str, str] = field(default_factory=dict)
    """Node -> the newest whole snapshot in its memory when a worker of it last died, or ""."""
    unreadable: dict[str, Unreadable] = field(default_factory=dict)
    """Snapshot or checkpoint that could not be read -> the word that said so."""
    applied: int = -1
    """The most steps that a member has said it applied since this leader formed the job. -1: another leader formed it,
    or a member died of which too little had been heard."""
    anew: BegunAgain = field(default_factory=BegunAgain)
    begins_anew: bool = False
    """While FORMING with `lost`: whether the run may begin again."""
    lost: str = ""
    """While FORMING: how every copy of the state was lost, in a sentence; "": the job has not begun. Newcomers from
    before the loss are expelled, so that processes which know nothing take their places."""

    @property
    def top(self) -> Generation | None:
        return self.chain[-1] if self.chain else None

    @property
    def aim(self) -> Generation | None:
        """The newest list that the job aims at. An early generation is only a step towards it."""
        return next((record for record in reversed(self.chain) if not record.early), None)

    @property
    def coming_next(self) -> Generation | None:
        """The list that the job aims at once what is being written is durable."""
        return self.committing if self.committing and not self.committing.early else self.aim

    @property
    def began(self) -> str:
        """The snapshot or checkpoint from which the job last began, or "": its first step."""
        return self.top.entry if self.top is not None and self.top.entry else self.resumed

    @property
    def raised(self) -> Failed | None:
        """The last exception of the script that has ended a worker of the present world; None: the job has survived all
        that there were."""
        words = [word for word, _ in self.failures.errors.values() if not word.of_device and self.lists(word.worker_id)]
        return words[-1] if words else None

    @property
    def base(self) -> Generation | None:
        return self.chain[0] if self.chain else None

    @property
    def listed(self) -> set[str]:
        """All workers of all generations in the chain."""
        return {worker for record in self.chain for worker in record.ids}

    def lists(self, worker: str) -> bool:
        """Whether a generation in the chain lists the worker."""
        return any(record.member(worker) is not None for record in self.chain)

    @property
    def running(self) -> Generation | None:
        """The newest generation that a worker is known to have entered."""
        if len(self.chain) == 1:
            return self.chain[0]
        return next((r for r in reversed(self.chain) if self.workers.has_entered(r.number)), self.base)

    @property
    def newcomers(self) -> set[str]:
        """Workers that are not members yet and may become members."""
        return self.workers.at(*NEWCOMERS)

    @property
    def expelled(self) -> set[str]:
        """Expelled workers whose processes live and are left alone for now."""
        return self.workers.at(Stage.EXPELLED) - self.dead.keys()

    @property
    def spares(self) -> set[str]:
        """Newcomers for which there has been no place yet, with everything set up. Empty until the job has begun."""
        uninvited = self.workers.at(Stage.ANNOUNCED) if self.chain else set()
        return {worker for worker in uninvited if not self.lists(worker)}

    @property
    def asked_for(self) -> int:
        """How many workers the job is to have, however many are here."""
        return self.size or self.spec.workers

    @property
    def agents(self) -> int:
        """How many agents there are once all are here, if nodes to come have as many slots as the smallest so far."""
        return -(-self.wanted_workers // max(1, min(self.slots.values(), default=1)))

    @property
    def timing(self) -> Timing:
        """The job's timing, scaled to the number of agents: many agents speak less often and take longer to find a
        leader. It applies to the silence of nodes and to answers that all workers have to give."""
        return self.spec.timing.scaled(self.agents)

    @property
    def wanted_workers(self) -> int:
        """The wanted world size, at most workers_limit: `size`, or else `workers`, or the slots of the nodes here if a
        node has joined and they are more. A node's spare fills a place and never adds one."""
        return min(self.spec.workers_limit, self.size or max(self.asked_for, sum(self.slots.values())))

    @property
    def places(self) -> int:
        """For how many more newcomers the world has a place, once the job has begun; below 0: for so many that are on
        their way it has none."""
        assert self.coming_next is not None
        settled = set(self.coming_next.ids) - {*self.dead, *self.given_up, *self.drains}
        return self.wanted_workers - len(settled | self.coming)

    @property
    def coming(self) -> set[str]:
        """Newcomers on their way to a place in the world."""
        invited = self.workers.at(Stage.INVITED, Stage.READY)
        return invited - {*self.dead, *self.given_up, *self.drains} if invited else invited

    @property
    def awaited_until_s(self) -> float:
        """Until when the ring waits for `awaited`: progress_s until a generation lists it; then, while its copy gets
        on, half of the time for which a paused job waits for replacements. Infinite while training goes on, or cannot
        go on without newcomers."""
        timing = self.spec.timing
        if self.state is not State.PAUSED or self.below_quorum:
            return math.inf
        listed = self.awaited.slot in {slot_of(worker) for worker in (self.aim.ids if self.aim else ())}
        return self.awaited.since_s + (
            max(timing.progress_s, timing.pause_limit_s / 2) if listed else timing.progress_s
        )

    @property
    def below_quorum(self) -> bool:
        """Whether training stands still for want of workers."""
        running = self.running
        return self.state is State.PAUSED and running is not None and len(running.ids) < self.spec.min_workers

    @property
    def setting_up(self) -> dict[str, float]:
        """Invited newcomers that are not ready to be admitted -> when their time to make progress is over."""
        if self.state not in (State.RUNNING, State.PAUSED) or not (coming := self.coming):
            return {}
        seen = {worker: self.workers[worker] for worker in coming if not self.lists(worker)}
        at_work_s = max(self.set_up_s, self.spec.timing.hang_s)  # a newcomer that uses a processor may compile
        return {
            worker: one.moved_s + (at_work_s if one.said.computes else self.set_up_s)
            for worker, one in seen.items()
            if one.stage is Stage.INVITED and one.member.node not in self.silent_nodes
        }

    @property
    def kept_waiting(self) -> dict[str, float]:
        """Newcomers that ask to be admitted, and with which no ring is built yet because the last one failed -> until
        when."""
        asking = self.workers.at(Stage.READY) if self.unreached else set()
        slots = {worker: self.unreached.get(slot_of(worker)) for worker in asking}
        waits = {worker: known.until_s for worker, known in slots.items() if known is not None}
        return {worker: until_s for worker, until_s in waits.items() if until_s > -math.inf}

    def needs_newcomers(self) -> None:
        """Newcomers that could not be connected are tried at once: training stands still, or ends, without them."""
        self.unreached = {slot: known._replace(until_s=-math.inf) for slot, known in self.unreached.items()}

    @property
    def set_up_s(self) -> float:
        """How long a newcomer's set-up may stay in one phase: half of the time for which a job waits at its start or
        below quorum, whichever is longer. So if one set-up hangs, there is time for another."""
        return max(self.spec.timing.orphan_limit_s, self.spec.timing.pause_limit_s) / 2

    @property
    def starting(self) -> dict[str, int]:
        """Node -> number of its processes that have not announced themselves yet, though their agent attends."""
        here = {worker: seen.member.node for worker, seen in self.workers.items() if worker not in self.dead}
        settled = Counter(here.values())
        settled.update(slot.rpartition(".")[0] for slot in self.slots_given_up.keys() - {slot_of(w) for w in here})
        missing = {node: slots + self.spec.spares - settled[node] for node, slots in self.slots.items()}
        return {node: count for node, count in sorted(missing.items()) if count > 0}

    @property
    def joining(self) -> dict[str, float]:
        """Newcomers for which a generation waits, pending or in effect -> when they last made progress."""
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
        """The draining member, of these, whose node can stay longest; of equals the most senior."""
        members = [self.workers[worker].member for worker in workers]
        return max(members, key=lambda m: (self.drains[m.worker_id].last_call_s, -m.seniority))

    def pass_s(self, workers: Collection[str]) -> float:
        """Seconds of a pass if these known workers are the members, by their longest recent shards; 0: not known."""
        seen = [self.workers[worker] for worker in workers]
        shards = -(-self.shards // max(1, len(seen)))
        return max((one.usual_s for one in seen), default=0.0) * shards + self.exchange_us(workers) / 1e6

    def exchange_us(self, workers: Iterable[str]) -> int:
        """Microseconds for the reduction of a pass by these known members; 0: not known. The least counts: where the
        reduction overlaps with backward, only the member that comes last does not count its wait for others."""
        return min((us for worker in workers if (us := self.workers[worker].exchange_us)), default=0)

    def alive(self, workers: Iterable[str]) -> tuple[str, ...]:
        """Those of the given workers that are known and not dead, sorted."""
        return tuple(sorted(worker for worker in workers if worker in self.workers and worker not in self.dead))

    def take_seniority(self) -> int:
        """A seniority above all that were given, also by earlier leaders."""
        self.youngest += 1
        return self.youngest

    @property
    def last_call_s(self) -> float:
        """When the job stops if all members drain and nobody takes over; infinite while a member stays, and once a
        generation without members is in effect: the job stops already."""
        if self.aim is None or self.running is None or not self.running.ids:
            return math.inf
        if not self.aim.ids or self.successors or any(worker not in self.drains for worker in self.aim.ids):
            return math.inf
        return max(self.drains[worker].last_call_s for worker in self.aim.ids)

    @property
    def proof_ends_s(self) -> float:
        """By then a ring without a leader has parked, so nobody waits any longer for proof that it stands."""
        return self.quiesced_s + self.spec.timing.orphan_limit_s + self.spec.timing.orphan_margin_s
