"""The kinds of faults, as values: what happens, to whom, and how it ends. breaker.py does them.

A fault that lasts has an end, `for_s`; what is lethal needs none. A *place* is a point in the job's life, named by the
journal event that marks it: the fault strikes when that event comes next, after a spark that makes it come. Or it is a
point of a worker's own work (ambush/points.py), at which the worker strikes itself.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from chaos_tests.harness.ambush import points
from chaos_tests.harness.ambush.points import Act

RECOVERY = ("quiesce_started", "ring_aborted", "quiesce_complete", "committed", "ring_up", "redo_started")
"""Points of a recovery, in their order."""

JOINING = ("announced", "state_copied", "joined")
"""Points of a newcomer's way into the ring."""


class Aim(StrEnum):
    ANY = "any"
    LEADER = "rank 0"
    YOUNGEST = "the youngest"
    NEWCOMER = "the worker that is joining"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Strike:
    """A signal that ends workers. One member that holds the state is always spared.

    places: strike when one of these events comes after a spark, a kill of any member; empty: at once.
    """

    number: signal.Signals = signal.SIGKILL
    aim: Aim = Aim.ANY
    count: int = 1
    places: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Freeze:
    """SIGSTOP, and SIGCONT after for_s."""

    for_s: float
    aim: Aim = Aim.ANY
    count: int = 1


class When(StrEnum):
    FIRST = "first step"
    LAST = "last step"


@dataclass(frozen=True, slots=True)
class Ambush:
    """Something that happens to a worker when it comes to a point of its own work, by its own hand.

    places: one of these points. spark: a kill of any member first, which makes a rebuild and a copy come; whoever comes
    to the point then is hit. step: at that one alone. for_s: of a STOP. noted_s: within which the others must know,
    where that takes longer than for a worker that is gone.
    """

    act: Act
    places: tuple[str, ...]
    spark: bool = False
    step: When | None = None
    for_s: float = 0.0
    noted_s: float | None = None


@dataclass(frozen=True, slots=True)
class Slow:
    """A member gets the processor for a fifth of the time only: it is stopped for 80 of each 100 ms."""

    for_s: float


@dataclass(frozen=True, slots=True)
class Reclaim:
    """The machine of a worker's place is taken away: SIGKILL, and no process there until another one comes.

    Whatever the agent starts there meanwhile stands still from its first moment on, as if it had not been started.
    The place and the time are the plan's. One member that holds the state is always spared.
    """

    for_s: float


@dataclass(frozen=True, slots=True)
class KillService:
    """SIGKILL to a process that serves the job."""

    module: str


@dataclass(frozen=True, slots=True)
class FreezeService:
    """SIGSTOP to a process that serves the job, and SIGCONT after for_s."""

    module: str
    for_s: float


class Ask(StrEnum):
    COMPACT = "compact"
    DEFRAGMENT = "defragment"
    REVOKE = "revoke all leases"


@dataclass(frozen=True, slots=True)
class AskStore:
    """Something that an operator, or a mistake, does to etcd."""

    what: Ask


@dataclass(frozen=True, slots=True)
class Hog:
    """As many busy processes as there are cores, twice, for that time."""

    for_s: float


@dataclass(frozen=True, slots=True)
class FillDisk:
    """No byte is left in the file system of the job directory, for that time."""

    for_s: float


Fault: TypeAlias = Strike | Freeze | Ambush | Slow | Reclaim | KillService | FreezeService | AskStore | Hog | FillDisk

Targeted: TypeAlias = Strike | Freeze | Ambush | Slow
"""What is done to members that are chosen for it."""

RENDEZVOUS, AGENT, ETCD = "elastic.rendezvous", "elastic.agent", "etcd"


@dataclass(frozen=True, slots=True)
class Kind:
    """about: for people."""

    fault: Fault
    about: str


STUCK_S = 90.0
"""timing.progress_s, and as much again until the next beat is looked at on a loaded machine."""

CATALOGUE: Mapping[str, Kind] = {
    "kill": Kind(Strike(), "SIGKILL of any member"),
    "kill-rank-0": Kind(Strike(aim=Aim.LEADER), "SIGKILL of the oldest member, which prints, saves and gives copies"),
    "kill-youngest": Kind(Strike(aim=Aim.YOUNGEST), "SIGKILL of the member that came last: a flapping slot"),
    "kill-two": Kind(Strike(count=2), "SIGKILL of two members at one instant"),
    "kill-all-but-one": Kind(Strike(aim=Aim.ALL), "SIGKILL of all members but one at one instant"),
    "kill-in-recovery": Kind(Strike(places=RECOVERY), "a second SIGKILL at a point of the recovery from a first"),
    "kill-newcomer": Kind(
        Strike(aim=Aim.NEWCOMER, places=JOINING), "SIGKILL of a replacement at a point of its way into the ring"
    ),
    "kill-donor": Kind(
        Strike(aim=Aim.LEADER, places=JOINING), "SIGKILL of rank 0 at a point of a replacement's way into the ring"
    ),
    "segfault": Kind(Strike(signal.SIGSEGV), "a member ends by a segmentation fault"),
    "abort": Kind(Strike(signal.SIGABRT), "a member ends by abort()"),
    "freeze-short": Kind(Freeze(1.2), "a member stands still for 1.2 s, too short to be expelled"),
    "freeze-long": Kind(Freeze(6.0), "a member stands still until it is expelled, and thaws into a world without it"),
    "freeze-for-good": Kind(Freeze(40.0), "a member stands still until it is expelled and killed"),
    "freeze-rank-0": Kind(Freeze(6.0, aim=Aim.LEADER), "the same as freeze-long, of rank 0"),
    "freeze-all": Kind(Freeze(1.2, aim=Aim.ALL), "all workers stand still for 1.2 s"),
    "kill-in-step": Kind(Ambush(Act.KILL, points.STEP), "SIGKILL at a point of a step"),
    "kill-in-first-step": Kind(
        Ambush(Act.KILL, points.STEP, step=When.FIRST), "SIGKILL in the first step of all, before anything was applied"
    ),
    "kill-in-last-step": Kind(Ambush(Act.KILL, points.STEP, step=When.LAST), "SIGKILL in the last step of all"),
    "kill-in-evaluation": Kind(Ambush(Act.KILL, (points.IN_EVALUATION,)), "SIGKILL within job.evaluate"),
    "kill-in-checkpoint": Kind(
        Ambush(Act.KILL, points.CHECKPOINT), "SIGKILL between the data of a checkpoint or snapshot and its mark"
    ),
    "kill-in-rebuild": Kind(
        Ambush(Act.KILL, (points.IN_REBUILD,), spark=True), "SIGKILL of whoever connects first after a first SIGKILL"
    ),
    "kill-in-copy": Kind(
        Ambush(Act.KILL, points.COPY, spark=True), "SIGKILL of a donor or a newcomer while the state is copied"
    ),
    "freeze-in-step": Kind(Ambush(Act.STOP, points.STEP, for_s=6.0), "a member stands still at a point of a step"),
    "hang": Kind(
        Ambush(Act.HANG, (points.IN_SHARD,), noted_s=STUCK_S), "a script waits for ever in a shard; its process lives"
    ),
    "hang-gil": Kind(
        Ambush(Act.HANG_GIL, points.STEP, noted_s=STUCK_S), "the same with Python's lock held: no thread runs"
    ),
    "raise": Kind(Ambush(Act.RAISE, (points.IN_SHARD,)), "a script raises in a shard"),
    "interrupt": Kind(
        Ambush(Act.INTERRUPT, (points.IN_SHARD, points.RESULT_HELD)), "a script is given an exception by another thread"
    ),
    "no-memory": Kind(Ambush(Act.NO_MEMORY, (points.IN_SHARD,)), "a script asks for more memory than it may have"),
    "slow": Kind(Slow(8.0), "a member gets a fifth of its processor time for 8 s"),
    "reclaim": Kind(Reclaim(5.0), "the machine of a member is taken away, and another one comes after a while"),
    "kill-rendezvous": Kind(KillService(RENDEZVOUS), "SIGKILL of the rendezvous service, which is started again"),
    "freeze-rendezvous": Kind(FreezeService(RENDEZVOUS, 4.0), "the rendezvous service stands still beyond its lease"),
    "freeze-agent": Kind(FreezeService(AGENT, 4.0), "the agent stands still for 4 s"),
    "freeze-etcd": Kind(FreezeService(ETCD, 4.0), "etcd stands still for 4 s"),
    "compact-etcd": Kind(AskStore(Ask.COMPACT), "etcd forgets its history"),
    "defragment-etcd": Kind(AskStore(Ask.DEFRAGMENT), "etcd rewrites its database, and answers nobody meanwhile"),
    "revoke-leases": Kind(AskStore(Ask.REVOKE), "all leases are revoked, the leader's too"),
    "cpu-hog": Kind(Hog(5.0), "other processes want all cores, twice, for 5 s"),
    "disk-full": Kind(FillDisk(3.0), "the job directory's disk is full for 3 s (needs a small file system)"),
}


SURVIVABLE_S = 2.5
"""A freeze shorter than this expels nobody, so it may hit everybody (timing.evict_s)."""


def lethal(fault: Fault) -> bool:
    """Whether workers that are hit are gone at once."""
    return isinstance(fault, Strike | Reclaim) or (isinstance(fault, Ambush) and fault.act is not Act.STOP)


def places(fault: Fault) -> tuple[str, ...]:
    """Points of the job's life of which a fault may wait for one; none for what strikes at a time."""
    return fault.places if isinstance(fault, Strike | Ambush) else ()


def choose(fault: Targeted, holders: Sequence[str], newcomers: Sequence[str], dice: random.Random) -> tuple[str, ...]:
    """Whom to hit; nobody if that cannot be done now.

    holders: healthy members that hold the state, the oldest first. One of them is spared by whatever may end it.
    """
    if isinstance(fault, Ambush | Slow):
        return (dice.choice(holders),) if len(holders) > 1 else ()
    if fault.aim is Aim.NEWCOMER:
        return tuple(dice.sample(sorted(newcomers), 1)) if newcomers and holders else ()
    spared = 0 if isinstance(fault, Freeze) and fault.for_s < SURVIVABLE_S else 1
    if fault.aim is Aim.ALL:
        return tuple(dice.sample(holders, len(holders) - spared)) if len(holders) > 1 else ()
    if len(holders) < fault.count + spared:
        return ()
    match fault.aim:
        case Aim.LEADER:
            return tuple(holders[: fault.count])
        case Aim.YOUNGEST:
            return tuple(holders[-fault.count :])
    return tuple(dice.sample(holders, fault.count))


def needed(fault: Targeted) -> int:
    """Healthy holders without which it is not begun: those it hits, one that sparks a recovery, one that is spared."""
    if isinstance(fault, Ambush):
        return 3 if fault.spark else 2
    if not isinstance(fault, Strike):
        return 2
    hit = 0 if fault.aim is Aim.NEWCOMER else fault.count
    return hit + 1 + bool(fault.places)
