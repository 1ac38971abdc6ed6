"""The record of a generation: its members and its plan. The leader commits it, and all others read it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property
from operator import attrgetter
from typing import Any

from elastic.protocol.reduction_tree import Node


class Kind(StrEnum):
    """Why a generation exists."""

    FORM = "form"
    LOSS = "loss"
    PLANNED = "planned"


@dataclass(frozen=True, slots=True)
class Member:
    """What ring peers know of a worker. A smaller seniority is older; ranks follow it.

    home: a number that no other living worker of the job has, the lowest that was free; -1: none was given yet. It
    stays for the life of the process. A script for torchrun sees it as RANK.
    """

    worker_id: str
    node: str
    host: str
    port: int
    seniority: int
    home: int = -1


@dataclass(frozen=True, slots=True)
class Share:
    """What one member contributes to the redone operation: the roots it keeps, the units it still computes."""

    worker_id: str
    keep: tuple[Node, ...]
    units: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Laggard:
    """A member without the result of operation ``Plan.op - 1``: it copies it from source, or computes it alone if
    source is ""."""

    worker_id: str
    source: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What a generation does first. units == 0: nobody had begun operation op, so default ownership holds.

    paces: microseconds that each member takes for a unit, in rank order, 0 if not known; default ownership follows
    them. Empty: all members own equally much. slack: percent that the slowest member may take longer than it must, for
    units that are sent as fewer partial sums. all_tasks: digest of all shares and laggards, if this copy of the plan
    holds only those of one node's workers; else "".
    """

    op: int = 0
    units: int = 0
    shares: tuple[Share, ...] = ()
    laggards: tuple[Laggard, ...] = ()
    newcomers: tuple[str, ...] = ()
    paces: tuple[int, ...] = ()
    slack: int = 0
    all_tasks: str = ""

    @property
    def tasks_digest(self) -> str:
        """The digest of all shares and laggards; "" if there are none."""
        if self.all_tasks or not (self.shares or self.laggards):
            return self.all_tasks
        shares = [(share.worker_id, share.keep, share.units) for share in self.shares]
        return _digest(shares, [(laggard.worker_id, laggard.source) for laggard in self.laggards])

    def share_of(self, worker_id: str) -> Share | None:
        return next((share for share in self.shares if share.worker_id == worker_id), None)

    def source_of(self, worker_id: str) -> str | None:
        """The source of a laggard; "": it computes alone; None: the worker is no laggard."""
        return next((lag.source for lag in self.laggards if lag.worker_id == worker_id), None)


ANEW = "anew."


@dataclass(frozen=True)
class Generation:
    """One committed member list with its whole plan; immutable. members are in rank order.

    base: number of the last loss or form generation; a planned generation is void once base moves on. hold: the members
    finish operation plan.op, then wait, because they are below quorum. early: this generation exists only so that
    draining members need not wait for the newcomers of the next one; it is never the list that the job aims at
    (worker_state/pending.py). token: proof for ring and copy connections of this generation. began: the snapshot or
    checkpoint from which the last form generation went on: its members read that state, and newcomers copy it from
    them. "": the form generation was the job's first. If all members died before a step was applied, the run begins
    again, and began is ANEW plus the number of that form generation.
    """

    number: int
    kind: Kind
    base: int
    members: tuple[Member, ...]
    plan: Plan
    because: str
    hold: bool = False
    token: str = ""
    early: bool = False
    began: str = ""

    @property
    def entry(self) -> str:
        """The snapshot or checkpoint in `began`; "": the job has begun with its first generation only."""
        return "" if self.began.startswith(ANEW) else self.began

    # Cached, because the leader of a large job asks for them with every word that it hears.

    @cached_property
    def ids(self) -> tuple[str, ...]:
        return tuple(member.worker_id for member in self.members)

    @cached_property
    def _by_id(self) -> dict[str, Member]:
        return {member.worker_id: member for member in self.members}

    def member(self, worker_id: str) -> Member | None:
        return self._by_id.get(worker_id)

    def digest(self) -> str:
        """Hash of the whole record, equal for copies with one node's tasks only. Peers compare it before data flows."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        plan = self.plan
        head = {name: getattr(self, name) for name in _names(Generation) if name not in ("members", "plan")}
        members = [*map(attrgetter(*_names(Member)), self.members)]
        return _digest(head, members, plan.op, plan.units, plan.newcomers, plan.paces, plan.slack, plan.tasks_digest)


def _names(kind: Any) -> list[str]:
    return [field.name for field in fields(kind)]


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
