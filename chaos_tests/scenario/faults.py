"""What a fault is: one row, from which everything else about it follows; catalogue.py has the rows.

A fault that lasts has an end, `for_s`; what is lethal needs none. A *place* is a point in the job's life, named by the
journal event that marks it: a member is killed so that the event comes, and the fault strikes when it does. Or it is a
point of a worker's own work (scenario/failpoints.py), at which the worker strikes itself.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

RECOVERY = ("quiesce_started", "ring_aborted", "quiesce_complete", "committed", "ring_up", "redo_started")
"""Points of a recovery, in their order."""

JOINING = ("announced", "state_copied", "joined")
"""Points of a newcomer's way into the ring."""

RENDEZVOUS, AGENT, ETCD = "elastic.rendezvous", "elastic.agent", "etcd"
"""Services of a job of one machine."""


class Aim(StrEnum):
    """Which members are hit. One that holds the state is spared by all but ALL, which is for what ends nobody, and
    HOLDERS."""

    ANY = "any"
    LEADER = "rank 0"
    YOUNGEST = "the youngest"
    NEWCOMER = "the worker that is joining"
    ALL_BUT_ONE = "all but one"
    ALL = "all"
    HOLDERS = "all that hold the state, while a replacement has none"


class Effect(StrEnum):
    """What becomes of those that a fault names."""

    NONE = "they go on, and nobody may take them for dead"
    ENDS = "they are gone at once"
    LEAVES = "they are asked to leave, and must do so by themselves"
    FREEZES = "they stand still; if they are expelled for it, they leave by themselves when they thaw"
    ISOLATES = "nobody hears of them, and they have to be expelled if it lasts"
    SUSPECTS = "they may be taken for dead although they live"


class Ground(StrEnum):
    """What kind of a job a fault can be done to. On one host workers do without TCP."""

    ANY = "any"
    MACHINE = "one machine"
    CLUSTER = "several nodes"
    NETWORK = "several nodes, with links that can be cut"
    ROUNDS = "scripts in rounds (--restart), on one machine or several nodes"


class When(StrEnum):
    FIRST = "first step"
    LAST = "last step"


class Needs(StrEnum):
    """What a machine may lack."""

    CGROUPS = "memory cgroups"
    STURDY_ETCD = "an etcd that stays consistent when it is killed"


class Damage(StrEnum):
    FLIPPED = "one bit is flipped"
    TRUNCATED = "half of a file is gone"
    SWAPPED = "a file is that of the checkpoint before"
    UNLISTED = "the manifest is gone"


@dataclass(frozen=True, slots=True)
class Fault:
    """name: as scenarios and reports have it. about: for people. by: "module.function" of nemesis/ that carries it out
    and leaves in the scene how it is ended. given: arguments of that function alone. for_s: seconds until its end.

    aim, count: which members it hits, and how many, at least 1; aim None: the function says whom. places: where it may
    strike. spark: a kill of any member first, which makes a recovery and a copy come. step: at that one alone.

    noted_s: seconds within which the others must know of it, where that takes longer than for a worker that is gone.
    forgets: whether what scripts in rounds have kept in memory may be lost.
    stalls: whether the steps of all may have to wait while it lasts. stops_service: whether it stops a process that
    serves the job, or takes a leader from it, so that a loss may be noted later.

    usual: False: it needs a file system of its own, a trace, or two checkpoints, and the presets with all kinds of a
    ground are without it. presets: in which others it comes, and how often, where kinds are drawn by weight. needs:
    what this machine may lack for it, beside the network of its ground.
    """

    name: str
    about: str
    by: str
    effect: Effect = Effect.NONE
    ground: Ground = Ground.ANY
    for_s: float = 0.0
    aim: Aim | None = None
    count: int = 1
    places: tuple[str, ...] = ()
    spark: bool = False
    step: When | None = None
    noted_s: float | None = None
    stalls: bool = True
    stops_service: bool = False
    forgets: bool = False
    usual: bool = True
    presets: Mapping[str, float] = field(default_factory=dict)
    needs: Needs | None = None
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def on_nodes(self) -> bool:
        """Whether it needs a job over several nodes."""
        return self.ground in (Ground.CLUSTER, Ground.NETWORK)


def choose(fault: Fault, holders: Sequence[str], newcomers: Sequence[str], dice: random.Random) -> tuple[str, ...]:
    """Whom to hit; nobody if that cannot be done now.

    holders: healthy members that hold the state, the oldest first. One of them is spared by whatever may end it.
    """
    match fault.aim:
        case Aim.NEWCOMER:
            return tuple(dice.sample(sorted(newcomers), 1)) if newcomers and holders else ()
        case Aim.HOLDERS:
            return tuple(holders) if newcomers else ()
        case _ if len(holders) <= fault.count:
            return ()
        case Aim.LEADER:
            return tuple(holders[: fault.count])
        case Aim.YOUNGEST:
            return tuple(holders[-fault.count :])
    count = {Aim.ALL: len(holders), Aim.ALL_BUT_ONE: len(holders) - 1}.get(fault.aim or Aim.ANY, fault.count)
    return tuple(dice.sample(holders, count))


def needed(fault: Fault) -> int:
    """Healthy holders without which it is not begun: those it hits, one that sparks a recovery, one that is spared."""
    return (0 if fault.aim in (Aim.NEWCOMER, Aim.HOLDERS) else fault.count) + fault.spark + 1
