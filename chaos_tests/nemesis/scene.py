"""What all faults of a run work on: who is in the job and can be hit, which faults have begun and not ended, and who is
told of them: the journal, for the checkers, and the person who watches.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_tests.cluster.cluster_job import NodesJob
from chaos_tests.failpoints.orders import FailpointOrders
from chaos_tests.nemesis.membership_view import MembershipView
from chaos_tests.nemesis.signals import End, Impossible
from chaos_tests.scenario.failpoints import FailpointOrder
from chaos_tests.scenario.faults import Effect, choose
from chaos_tests.scenario.schedule import Planned
from elastic.config import JobSpec
from elastic.records.journal import Journal


class NotNow(Exception):
    """It may become possible."""


@dataclass(slots=True)
class Scene:
    """mark: of the job's processes. spec: what the job is. steps: how many it has; applied: so far. nodes: the job, if
    it has several."""

    world: MembershipView
    victims: Victims
    teller: Teller
    orders: FailpointOrders
    directory: Path
    mark: str
    spec: JobSpec
    steps: int
    nodes: NodesJob | None = None
    applied: int = 0
    running: list[RunningFault] = field(default_factory=list)

    def on_nodes(self) -> NodesJob:
        """Raises Impossible."""
        if self.nodes is None:
            raise Impossible("it needs a job over several nodes; the presets cluster, storage and partition have one")
        return self.nodes

    def on_machine(self) -> None:
        """Raises Impossible."""
        if self.nodes is not None:
            raise Impossible("it is done to a job of one machine, and this one has several nodes")

    def lasts_already(self, planned: Planned) -> bool:
        """Whether another fault that the same function has begun has not ended."""
        return any(running.planned.fault.by == planned.fault.by for running in self.running)

    def lasting(self, planned: Planned, target: str, blow: Callable[[], End | None], **fields: object) -> None:
        """Do something to what is no worker."""
        begun_ns = time.monotonic_ns()
        end = blow()
        self.teller.injected(planned, {}, begun_ns, target=target, **fields)
        self.lasts(planned, end, f"{target}, for {planned.lasts_s:g} s" if planned.lasts_s else target)

    def lasts(self, planned: Planned, end: End | None, text: str) -> RunningFault:
        """It has begun, and ends later."""
        self.teller.seen(planned, "it has taken hold")
        return self._begun(RunningFault(planned, end=end, injected=True), text)

    def spares(self, planned: Planned, workers: Collection[str], end: End, text: str) -> RunningFault:
        """It lasts, and no other fault is to hit these workers meanwhile."""
        self.victims.frozen.update(workers)

        def let_go() -> None:
            end()
            # A worker that was expelled meanwhile counts as lost by the journal; the others are healthy again.
            self.victims.frozen.difference_update(workers)

        return self.lasts(planned, let_go, text)

    def hits(
        self, planned: Planned, pids: Mapping[str, int], begun_ns: int, text: str, **fields: object
    ) -> RunningFault:
        """It has begun, and these workers, each with its pid, are awaited to end. fields: for the journal."""
        self.teller.injected(planned, pids, begun_ns, **fields)
        self.victims.targeted.update(pids)
        return self._begun(RunningFault(planned, hit=set(pids), injected=True), text)

    def _begun(self, fault: RunningFault, text: str) -> RunningFault:
        self.running.append(fault)
        self.teller.told(fault.planned, text)
        return fault


class Teller:
    """say: for people. See elastic.records.events for the lines of the journal."""

    def __init__(self, journal: Journal, say: Callable[[str], None]) -> None:
        self._journal, self._say = journal, say

    def injected(self, planned: Planned, workers: Mapping[str, int], begun_ns: int, **fields: object) -> None:
        """Written once it is known to be possible, with the time at which it was begun. workers: with their pids."""
        noted_s = planned.fault.noted_s
        about: dict[str, object] = {
            "t_mono_ns": begun_ns,
            "number": planned.number,
            "fault": planned.kind,
            "place": planned.place,
            "lethal": planned.fault.effect is Effect.ENDS,
            **({"noted_s": noted_s} if noted_s is not None else {}),
            **fields,
        }
        for worker, pid in workers.items():
            self._journal.write("fault_injected", 0, **{**about, "worker_id": worker, "pid": pid})
        if not workers:
            self._journal.write("fault_injected", 0, **about)

    def held(self, planned: Planned, worker: str, begun_ns: int) -> None:
        self._journal.write("fault_held", t_mono_ns=begun_ns, number=planned.number, worker_id=worker)

    def seen(self, planned: Planned, because: str) -> None:
        self._journal.write("fault_seen", number=planned.number, because=because)

    def ended(self, planned: Planned) -> None:
        self._journal.write("fault_ended", number=planned.number)

    def incomplete(self, planned: Planned, because: str) -> None:
        """Its first part was done, and its second one never will be."""
        self._journal.write("fault_incomplete", number=planned.number, because=because)
        self.told(planned, f"incomplete: {because}")

    def skipped(self, planned: Planned, because: str) -> None:
        self._journal.write("fault_skipped", number=planned.number, fault=planned.kind, because=because)
        self.told(planned, f"skipped: {because}")

    def told(self, planned: Planned, text: str) -> None:
        self._say(f"#{planned.number} {planned.kind}: {text}")


@dataclass(slots=True)
class RunningFault:
    """A fault that has begun. hit: workers whose end is awaited. frozen: those that it makes stand still.

    awaits_place: it is in two parts, and waits for the second. armed: a failpoint to which no worker has come yet, and
    the worker in which it is armed. slot: a place of which each new process is held, in `held`, until the fault ends.
    reach: nodes on which a worker that begins meanwhile is hit too. awaits_event: an event of the journal, by which it
    will be seen; awaits_pid: of this process, 0: of any. until_steady: it lasts until all members are at work.
    insist_s: from when on those in `hit` that have not ended get SIGKILL. alone: no other fault begins before it was
    seen.
    """

    planned: Planned
    since_s: float = field(default_factory=time.monotonic)
    awaits_place: bool = False
    armed: tuple[FailpointOrder, str] | None = None
    hit: set[str] = field(default_factory=set)
    frozen: frozenset[str] = frozenset()
    until_s: float = field(init=False)
    until_steady: bool = False
    end: End | None = None
    slot: int | None = None
    reach: frozenset[str] = frozenset()
    awaits_event: str = ""
    awaits_pid: int = 0
    held: list[str] = field(default_factory=list)
    insist_s: float = math.inf
    alone: bool = False
    injected: bool = False
    seen: bool = False

    def awaits(self, line: Mapping[str, Any]) -> bool:
        """Whether it is seen by this line of a journal."""
        pid = line.get("script", line["pid"]) if self.awaits_pid else 0
        return bool(self.awaits_event) and line["event"] == self.awaits_event and pid == self.awaits_pid

    def __post_init__(self) -> None:
        self.until_s = self.since_s + self.planned.lasts_s


class Victims:
    """frozen: who stands still by our doing. targeted: the workers that have been hit, or will be when they
    come to a failpoint."""

    def __init__(self, world: MembershipView, seed: int) -> None:
        self._world, self._seed = world, seed
        self.frozen: set[str] = set()
        self.targeted: set[str] = set()

    def dice(self, planned: Planned) -> random.Random:
        """Random numbers of this fault alone: a replay hits the same ranks, whatever became of faults before it."""
        return random.Random(f"{self._seed}/{planned.number}")

    def healthy(self) -> list[str]:
        """Members that hold the state, the oldest first."""
        return [w for w in self._world.holders if w not in self.frozen and w not in self.targeted]

    def any_of(self, planned: Planned, workers: Sequence[str]) -> str:
        return self.dice(planned).choice(workers)

    def of(self, planned: Planned) -> tuple[str, ...]:
        """Nobody, if that cannot be done now."""
        newcomers = sorted(self._world.newcomers - self.targeted)
        return choose(planned.fault, self.healthy(), newcomers, self.dice(planned))

    def pids(self, workers: Sequence[str]) -> dict[str, int]:
        return {worker: self._world.pids[worker] for worker in workers}
