"""The kinds of faults, as values: what happens, to whom, and how it ends. catalogue.py names them, nemesis/ does them.

A fault that lasts has an end, `for_s`; what is lethal needs none. A *place* is a point in the job's life, named by the
journal event that marks it: a member is killed so that the event comes, and the fault strikes when it does. Or it is a
point of a worker's own work (scenario/failpoints.py), at which the worker strikes itself.
"""

from __future__ import annotations

import math
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from chaos_tests.scenario.failpoints import SPARES, Act

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

    places: strike when one of these events comes after a kill of any member; empty: at once. grace_s: after
    which those that still live get SIGKILL.
    """

    number: signal.Signals = signal.SIGKILL
    aim: Aim = Aim.ANY
    count: int = 1
    places: tuple[str, ...] = ()
    grace_s: float = math.inf


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
class AtFailpoint:
    """Something that happens to a worker when it comes to a point of its own work, by its own hand.

    places: one of these points. spark: a kill of any member first, which makes a rebuild and a copy come; whoever comes
    to the point then is hit. step: at that one alone. for_s: of an act after which it goes on. noted_s: within which
    the others must know, where that takes longer than for a worker that is gone.
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
class Reset:
    """Every TCP connection of a member ends with a reset at both ends. Its process lives, and new ones can be made."""


@dataclass(frozen=True, slots=True)
class Starve:
    """The kernel ends a member because there is no memory for it."""


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
class SignalAll:
    """SIGTERM, SIGINT and SIGHUP to every process of the job but its command, which may take for_s to start what ends
    by them: etcd."""

    for_s: float


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


class Between(StrEnum):
    NODE = "a node and all others"
    CONTROL = "a node and what decides"
    PAIR = "two nodes"
    STORE = "the leader and etcd"


@dataclass(frozen=True, slots=True)
class Cut:
    """Nothing that one side sends reaches the other, for that time; nor the other way, unless one_way. Then it is
    mended."""

    between: Between
    for_s: float
    one_way: bool = False


@dataclass(frozen=True, slots=True)
class Roughen:
    """The cable of a node is a bad one for that time, as cluster/lossy_link.py has them: nobody may be lost for it."""

    for_s: float
    delay_s: float = 0.0
    jitter_s: float = 0.0
    lost: float = 0.0
    doubled: float = 0.0
    damaged: float = 0.0


@dataclass(frozen=True, slots=True)
class Narrow:
    """Limits the cable of a node to kbit_s kilobits a second in each direction for for_s seconds, and loses the share
    `lost` (0 to 1) of its packets. Beats share the cable with gradients: a worker behind it may be taken for dead."""

    kbit_s: int
    for_s: float
    lost: float = 0.0


@dataclass(frozen=True, slots=True)
class EndAgent:
    """SIGKILL of the agent of a job on one node. Its workers must die with it."""


@dataclass(frozen=True, slots=True)
class EndNode:
    """SIGKILL of the daemon of a node, with which all dies that it started. It comes back after for_s."""

    for_s: float


@dataclass(frozen=True, slots=True)
class StopNode:
    """SIGTERM to every process of a node, as schedulers send it. Its workers must leave by themselves. It comes back
    after for_s."""

    for_s: float


@dataclass(frozen=True, slots=True)
class FreezeNode:
    """SIGSTOP to all that runs on a node at one instant, and SIGCONT after for_s."""

    for_s: float


@dataclass(frozen=True, slots=True)
class DrainNode:
    """An operator wants a node empty, and takes that back after for_s. Its workers must leave by themselves."""

    for_s: float


@dataclass(frozen=True, slots=True)
class NoticeNode:
    """A node's metadata service says that its machine goes after within_s, and its workers must leave by themselves.
    true: then it goes, and another one comes. Else the notice is taken back, and it returns."""

    within_s: float
    true: bool


@dataclass(frozen=True, slots=True)
class Intrude:
    """Somebody attends the job as the agent of a node, without the token of its place there: nobody may notice."""


@dataclass(frozen=True, slots=True)
class EndLeader:
    """SIGKILL of the replica that leads the job. It comes back after for_s."""

    for_s: float


@dataclass(frozen=True, slots=True)
class StrikeStore:
    """A member of etcd is killed, or stands still, and is there again after for_s. leader: the one that leads."""

    for_s: float
    leader: bool = False
    freeze: bool = False


class Damage(StrEnum):
    FLIPPED = "one bit is flipped"
    TRUNCATED = "half of a file is gone"
    SWAPPED = "a file is that of the checkpoint before"
    UNLISTED = "the manifest is gone"


@dataclass(frozen=True, slots=True)
class LoseAll:
    """SIGKILL of all workers at one instant: the job has to go on from what is kept. damage: first the memory of all
    machines is emptied, and this is done to the newest checkpoint."""

    damage: Damage | None = None


OnNetwork: TypeAlias = Cut | Roughen | Narrow | Reset
"""What needs nodes that are hosts of their own, with links between them. On one host workers do without TCP."""

OnCluster: TypeAlias = (
    OnNetwork
    | EndAgent
    | EndNode
    | StopNode
    | FreezeNode
    | DrainNode
    | NoticeNode
    | Intrude
    | EndLeader
    | StrikeStore
    | LoseAll
)
"""What needs a job over several nodes."""

OnMachine: TypeAlias = Reclaim | KillService | FreezeService | SignalAll | AskStore | FillDisk
"""What needs a job of one machine."""

Targeted: TypeAlias = Strike | Freeze | AtFailpoint | Slow | Reset | Starve
"""What is done to members that are chosen for it."""

Fault: TypeAlias = Targeted | Hog | OnMachine | OnCluster

ENDED_S = 5.0
"""From SIGKILL until the others know it (history.Limits.exit_s)."""

RENDEZVOUS, AGENT, ETCD = "elastic.rendezvous", "elastic.agent", "etcd"


SURVIVABLE_S = 0.5
"""A freeze shorter than this expels nobody, so it may hit everybody (timing.stopped_s, less the beat before it)."""


class Ground(StrEnum):
    """What kind of a job a fault can be done to."""

    ANY = "any"
    MACHINE = "one machine"
    CLUSTER = "several nodes"
    NETWORK = "several nodes, with links that can be cut"


def ground(fault: Fault) -> Ground:
    if isinstance(fault, OnNetwork):
        return Ground.NETWORK
    if isinstance(fault, OnCluster):
        return Ground.CLUSTER
    return Ground.MACHINE if isinstance(fault, OnMachine) else Ground.ANY


def lethal(fault: Fault) -> bool:
    """Whether workers that are hit are gone at once."""
    if isinstance(fault, AtFailpoint):
        return fault.act not in SPARES
    return isinstance(fault, Strike | Starve | Reclaim | EndAgent | EndNode | LoseAll)


def noted_s(fault: Fault) -> float | None:
    """Within which the others must know of it, where that takes longer than for a worker that is gone."""
    if isinstance(fault, AtFailpoint):
        return fault.noted_s
    if isinstance(fault, Strike) and math.isfinite(fault.grace_s):
        return fault.grace_s + ENDED_S
    return None


def leaves(fault: Fault) -> bool:
    """Whether those that it names are asked to leave, and must do so by themselves."""
    return isinstance(fault, DrainNode | NoticeNode | StopNode)


def stalls(fault: Fault) -> bool:
    """Whether the steps of all may have to wait while it lasts."""
    if isinstance(fault, AtFailpoint):
        return fault.act not in (Act.DISK_FAILS, Act.DISK_SLOW)
    return not isinstance(fault, Reset | Intrude) and not leaves(fault)


def parts(fault: Fault) -> bool:
    """Whether those that it names may be taken for dead although they live."""
    return isinstance(fault, Narrow) or (isinstance(fault, Cut) and fault.between in (Between.NODE, Between.PAIR))


def places(fault: Fault) -> tuple[str, ...]:
    """Points of the job's life of which a fault may wait for one; none for what strikes at a time."""
    return fault.places if isinstance(fault, Strike | AtFailpoint) else ()


def choose(fault: Targeted, holders: Sequence[str], newcomers: Sequence[str], dice: random.Random) -> tuple[str, ...]:
    """Whom to hit; nobody if that cannot be done now.

    holders: healthy members that hold the state, the oldest first. One of them is spared by whatever may end it.
    """
    if isinstance(fault, AtFailpoint | Slow | Reset | Starve):
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
    if isinstance(fault, AtFailpoint):
        return 3 if fault.spark else 2
    if not isinstance(fault, Strike):
        return 2
    hit = 0 if fault.aim is Aim.NEWCOMER else fault.count
    return hit + 1 + bool(fault.places)
