"""Carries out a plan on a running job: waits for each fault's time and place, has it done, sees it, and ends it.

It is told what happens and looks at the clock when it is polled; it has no thread. Every fault comes to the journal
as fault_injected, fault_seen and fault_ended, or as fault_skipped with the reason; fault_incomplete says that the
second part of a fault in two parts never came. The other modules of this package say how each is done.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any

from chaos_tests.nemesis import capacity, etcd_members, failpoints, nodes, out_of_memory, scripts, workers
from chaos_tests.nemesis.scene import NotNow, RunningFault, Scene
from chaos_tests.nemesis.signals import Impossible
from chaos_tests.scenario.faults import Fault, Ground, Needs, When, needed
from chaos_tests.scenario.schedule import Planned

PATIENCE_S = 50.0
"""How long a fault waits for somebody it can be done to: longer than others wait for a script that hangs."""
LAST_STEPS = 5
"""A failpoint of the last step is armed this many steps before that step."""


NEEDS: Mapping[Needs, Callable[[], str]] = {
    Needs.CGROUPS: out_of_memory.why_not,
    Needs.STURDY_ETCD: etcd_members.why_not,
}
"""What this machine may lack -> a function that says why it does, or nothing."""


def lacking(fault: Fault) -> str:
    """Why a fault cannot be done on this machine, whatever the job; "": it can, but for the network of its ground."""
    return "" if fault.needs is None else NEEDS[fault.needs]()


class Nemesis:
    """Made before the first step, so that this can be struck too; `begin` starts the clock of the plan."""

    def __init__(self, plan: Sequence[Planned], scene: Scene) -> None:
        self._waiting = list(plan)
        self._scene = scene
        self._begun_s = math.inf

    def prepare(self, first: Sequence[str]) -> None:
        """Arm the failpoints of the first step, in the workers that will be in it."""
        for planned in [one for one in self._waiting if one.fault.step is When.FIRST]:
            self._waiting.remove(planned)
            try:
                self._check(planned)
            except Impossible as reason:
                self._scene.teller.skipped(planned, str(reason))
                continue
            worker = self._scene.victims.any_of(planned, first)
            failpoints.arm(self._scene, planned, worker, **planned.fault.given)

    def begin(self) -> None:
        """The first step was applied."""
        self._begun_s = time.monotonic()

    def poll(self, lines: Sequence[dict[str, Any]], applied: int) -> None:
        """lines: what the journals say since the last call; the world has heard them already. applied: steps so far."""
        self._scene.applied = applied
        for done in self._scene.orders.carried_out():
            failpoints.fired(self._scene, done)
        for running in self._scene.running:
            if running.awaits_place and any(line["event"] == running.planned.place for line in lines):
                workers.hit_again(self._scene, running)
            if running.slot is not None:
                capacity.hold(self._scene, running, lines)
            if running.reach:
                nodes.reach(self._scene, running, lines)
            if any(map(running.awaits, lines)):
                scripts.seen(self._scene, running)
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
            running.since_s, running.until_s = -math.inf, 0.0
            running.until_steady, running.awaits_event = False, ""
        self._settle()
        for planned in self._waiting:
            self._scene.teller.skipped(planned, because)
        self._waiting.clear()

    # ------------------------------------------------------------------------------------------------ beginning

    def _due(self) -> Iterator[Planned]:
        """What may begin now, one after the other."""
        for planned in list(self._waiting):
            if any(one.awaits_place or one.awaits_event or (one.alone and not one.seen) for one in self._scene.running):
                return
            if planned.fault.step is When.LAST:
                if self._scene.applied >= self._scene.steps - LAST_STEPS:
                    yield planned
            elif time.monotonic() - self._begun_s >= planned.at_s:
                yield planned

    def _begin(self, planned: Planned) -> bool:
        """False if it has to wait."""
        late = time.monotonic() - self._begun_s > planned.at_s + PATIENCE_S
        try:
            self._do(planned)
        except NotNow as reason:
            if not late:
                return False
            self._scene.teller.skipped(planned, f"{reason}, for {PATIENCE_S:.0f} s")
        except Impossible as reason:
            self._scene.teller.skipped(planned, str(reason))
        return True

    def _do(self, planned: Planned) -> None:
        """Raises NotNow or Impossible, with nothing done."""
        self._check(planned)
        fault, healthy = planned.fault, len(self._scene.victims.healthy())
        if fault.aim is not None and healthy < needed(fault):
            raise NotNow(f"{healthy} healthy members, {needed(fault)} are needed")
        function: Callable[..., None] = resolve_name(f"chaos_tests.nemesis.{fault.by}")
        function(self._scene, planned, **fault.given)

    def _check(self, planned: Planned) -> None:
        """Raises Impossible if it cannot be done to such a job or on this machine, or NotNow."""
        fault = planned.fault
        if fault.ground is Ground.MACHINE:
            self._scene.on_machine()
        elif fault.on_nodes:
            self._scene.on_nodes()
        elif fault.ground is Ground.ROUNDS:
            scripts.check(self._scene)
        on_nodes = self._scene.nodes is not None
        if fault.by.startswith("failpoints.") and (
            never := failpoints.never_reached(planned.place, self._scene.spec, on_nodes=on_nodes)
        ):
            raise Impossible(never)
        if because := lacking(fault):
            raise Impossible(because)

    # -------------------------------------------------------------------------------------------------- ending

    def _settle(self) -> None:
        """Note what has been seen, and end what has lasted long enough."""
        scene, now_s = self._scene, time.monotonic()
        for running in list(scene.running):
            planned = running.planned
            if failpoints.still_armed(scene, running, now_s):
                continue
            if running.awaits_place:
                if now_s - running.since_s <= failpoints.PLACE_S:
                    continue
                running.awaits_place = False
                scene.teller.incomplete(planned, f"{planned.place} did not come with somebody to hit")
            if not running.hit <= scene.world.ended:
                workers.insist(running, scene.world.pids, scene.world.ended, now_s)
                continue
            if running.hit and not running.seen:
                running.seen = True
                scene.teller.seen(planned, "the agent saw them end")
            if running.until_steady and not scene.world.steady:
                continue
            if running.awaits_event and now_s < running.until_s:
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
        return nodes is not None and nodes.stopped and running.planned.fault.on_nodes

    def _all_ended(self, frozen: frozenset[str]) -> bool:
        """Whether a freeze has nobody left that it could let go."""
        return bool(frozen) and frozen <= self._scene.world.ended
