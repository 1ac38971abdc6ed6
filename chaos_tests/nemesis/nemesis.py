"""Carries out a plan on a running job: waits for each fault's time and place, has it done, sees it, and ends it.

It is told what happens and looks at the clock when it is polled; it has no thread. Every fault comes to the journal
as fault_injected, fault_seen and fault_ended, or as fault_skipped with the reason. The other modules of this package
say how each is done.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

from chaos_tests.nemesis import capacity, etcd_members, failpoints, links, machine, nodes, signals, workers
from chaos_tests.nemesis.scene import NotNow, RunningFault, Scene
from chaos_tests.nemesis.signals import Impossible
from chaos_tests.scenario.catalogue import CATALOGUE
from chaos_tests.scenario.faults import (
    AskStore,
    AtFailpoint,
    Cut,
    DrainNode,
    EndAgent,
    EndLeader,
    EndNode,
    Fault,
    FillDisk,
    Freeze,
    FreezeNode,
    FreezeService,
    Hog,
    Intrude,
    KillService,
    LoseAll,
    Narrow,
    NoticeNode,
    OnCluster,
    OnMachine,
    Reclaim,
    Reset,
    Roughen,
    SignalAll,
    Slow,
    Starve,
    StopNode,
    Strike,
    StrikeStore,
    When,
    needed,
)
from chaos_tests.scenario.schedule import Planned

PATIENCE_S = 50.0
"""How long a fault waits for somebody it can be done to: longer than others wait for a script that hangs."""
LAST_STEPS = 5
"""So many steps before the last one an ambush is laid there."""


class Nemesis:
    """Made before the first step, so that this can be struck too; `begin` starts the clock of the plan."""

    def __init__(self, plan: Sequence[Planned], scene: Scene) -> None:
        self._waiting = list(plan)
        self._scene = scene
        self._begun_s = math.inf

    def prepare(self, first: Sequence[str]) -> None:
        """Lay the ambushes of the first step, for those who will be in it."""
        for planned in [one for one in self._waiting if _when(one) is When.FIRST]:
            self._waiting.remove(planned)
            failpoints.lay(self._scene, planned, self._scene.victims.any_of(planned, first))

    def begin(self) -> None:
        """The first step was applied."""
        self._begun_s = time.monotonic()

    def poll(self, lines: Sequence[dict[str, Any]], applied: int) -> None:
        """lines: what the journals say since the last call; the world has heard them already. applied: steps so far."""
        self._scene.applied = applied
        for done in self._scene.orders.carried_out():
            failpoints.spring(self._scene, done)
        for running in self._scene.running:
            if running.awaits_place and any(line["event"] == running.planned.place for line in lines):
                workers.hit_again(self._scene, running)
            if running.slot is not None:
                capacity.hold(self._scene, running, lines)
            if running.reach:
                nodes.reach(self._scene, running, lines)
        self._settle()
        if self._scene.world.over:
            self.heal("the job came to its end")
        for planned in self._due():
            if not self._begin(planned):
                break  # the others wait with it, so that they come in their order
            self._waiting.remove(planned)

    def heal(self, because: str) -> None:
        """End whatever lasts, and skip what is still planned."""
        for running in self._scene.running:
            running.awaits_place, running.since_s, running.until_s = False, -math.inf, 0.0
            running.until_steady = False
        self._settle()
        for planned in self._waiting:
            self._scene.teller.skipped(planned, because)
        self._waiting.clear()

    # ------------------------------------------------------------------------------------------------ beginning

    def _due(self) -> Iterator[Planned]:
        """What may begin now, one after the other."""
        for planned in list(self._waiting):
            if any(one.awaits_place for one in self._scene.running):
                return
            if _when(planned) is When.LAST:
                if self._scene.applied >= self._scene.steps - LAST_STEPS:
                    yield planned
            elif time.monotonic() - self._begun_s >= planned.at_s:
                yield planned

    def _begin(self, planned: Planned) -> bool:
        """False if it has to wait."""
        late = time.monotonic() - self._begun_s > planned.at_s + PATIENCE_S
        try:
            self._do(planned, CATALOGUE[planned.kind].fault, self._scene.victims.healthy())
        except NotNow as reason:
            if not late:
                return False
            self._scene.teller.skipped(planned, f"{reason}, for {PATIENCE_S:.0f} s")
        except Impossible as reason:
            self._scene.teller.skipped(planned, str(reason))
        return True

    def _do(self, planned: Planned, fault: Fault, healthy: list[str]) -> None:
        """Raises NotNow or Impossible, with nothing done."""
        scene = self._scene
        match fault:
            case Strike() | Freeze() | AtFailpoint() | Slow() | Reset() | Starve() if len(healthy) < needed(fault):
                raise NotNow(f"{len(healthy)} healthy members, {needed(fault)} are needed")
            case Strike(places=at) if at:
                one = scene.victims.any_of(planned, healthy)
                workers.hit(scene, planned, (one,), signal.SIGKILL, awaits_place=True)
            case Strike():
                workers.hit(scene, planned, workers.targets(scene, planned, fault), fault.number)
            case AtFailpoint(spark=True):
                failpoints.spark(scene, planned, scene.victims.any_of(planned, healthy))
            case AtFailpoint():
                failpoints.lay(scene, planned, *workers.targets(scene, planned, fault))
            case Freeze(for_s):
                hit = workers.targets(scene, planned, fault)
                workers.freeze(scene, planned, hit, signals.freeze, for_s, "SIGSTOP to")
            case Slow(for_s):
                hit = workers.targets(scene, planned, fault)
                workers.freeze(scene, planned, hit, signals.slow, for_s, "a fifth of the time for")
            case Reset():
                workers.reset(scene, planned, *workers.targets(scene, planned, fault))
            case Starve():
                workers.starve(scene, planned, *workers.targets(scene, planned, fault))
            case Reclaim() | KillService() | FreezeService() | SignalAll() | AskStore() | FillDisk():
                scene.on_machine()
                self._on_machine(planned, fault, healthy)
            case Hog(for_s):
                machine.hog(scene, planned, for_s)
            case Cut():
                links.cut(scene, planned, fault, healthy)
            case Roughen() | Narrow():
                links.worsen(scene, planned, fault, healthy)
            case EndAgent():
                nodes.end_agent(scene, planned, healthy)
            case EndNode(for_s):
                nodes.end_node(scene, planned, healthy, for_s)
            case StopNode(for_s):
                nodes.stop_node(scene, planned, healthy, for_s)
            case FreezeNode(for_s):
                nodes.freeze_node(scene, planned, healthy, for_s)
            case DrainNode(for_s):
                nodes.drain_node(scene, planned, healthy, for_s)
            case NoticeNode():
                nodes.notice_node(scene, planned, healthy, fault)
            case Intrude():
                nodes.intrude(scene, planned, healthy)
            case EndLeader(for_s):
                nodes.end_leader(scene, planned, for_s)
            case StrikeStore():
                etcd_members.strike(scene, planned, fault)
            case LoseAll():
                nodes.lose_all(scene, planned, fault, healthy)

    def _on_machine(self, planned: Planned, fault: OnMachine, healthy: list[str]) -> None:
        scene = self._scene
        match fault:
            case Reclaim(for_s):
                capacity.reclaim(scene, planned, healthy, for_s if planned.for_s is None else planned.for_s)
            case KillService(module):
                machine.kill_service(scene, planned, module)
            case FreezeService(module, for_s):
                machine.freeze_service(scene, planned, module, for_s)
            case SignalAll(for_s):
                machine.signal_all(scene, planned, for_s)
            case AskStore(what):
                machine.ask_store(scene, planned, what)
            case FillDisk(for_s):
                machine.fill_disk(scene, planned, for_s)

    # -------------------------------------------------------------------------------------------------- ending

    def _settle(self) -> None:
        """Note what has been seen, and end what has lasted long enough."""
        scene, now_s = self._scene, time.monotonic()
        for running in list(scene.running):
            planned = running.planned
            if failpoints.lies_still(scene, running, now_s):
                continue
            if running.awaits_place:
                if now_s - running.since_s <= failpoints.PLACE_S:
                    continue
                running.awaits_place = False
                scene.teller.told(planned, f"{planned.place} did not come with somebody to hit")
            if not running.hit <= scene.world.ended:
                workers.insist(running, scene.world.pids, scene.world.ended, now_s)
                continue
            if running.hit and not running.seen:
                running.seen = True
                scene.teller.seen(planned, "the agent saw them end")
            if running.until_steady and not scene.world.steady:
                continue
            if now_s < running.until_s and not self._all_ended(running.frozen):
                continue
            capacity.let_go(scene, running)
            if running.end is not None and not self._went_with_the_job(running):
                try:
                    running.end()
                except NotNow:
                    continue
                scene.teller.told(planned, "ends")
            scene.teller.ended(planned)
            scene.running.remove(running)

    def _went_with_the_job(self, running: RunningFault) -> bool:
        """Whether the nodes and links that it was done to are no longer there."""
        nodes = self._scene.nodes
        return nodes is not None and nodes.stopped and isinstance(running.fault, OnCluster)

    def _all_ended(self, frozen: frozenset[str]) -> bool:
        """Whether a freeze has nobody left that it could let go."""
        return bool(frozen) and frozen <= self._scene.world.ended


def _when(planned: Planned) -> When | None:
    fault = CATALOGUE[planned.kind].fault
    return fault.step if isinstance(fault, AtFailpoint) else None
