"""Carries out a plan on a running job: waits for each fault's time and place, does it, sees it, and ends it.

It is told what happens and looks at the clock when it is polled; it has no thread. Every fault comes to the journal
as fault_injected, fault_seen and fault_ended, or as fault_skipped with the reason.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from chaos_tests.harness import blows, processes, storefaults
from chaos_tests.harness.ambush.orders import Orders
from chaos_tests.harness.ambush.points import ANYBODY, Act, Order
from chaos_tests.harness.blows import End, Impossible
from chaos_tests.harness.faults import (
    CATALOGUE,
    ETCD,
    Ambush,
    Ask,
    AskStore,
    Fault,
    FillDisk,
    Freeze,
    FreezeService,
    Hog,
    KillService,
    Reclaim,
    Slow,
    Strike,
    Targeted,
    When,
    needed,
)
from chaos_tests.harness.running import Running
from chaos_tests.harness.schedule import Planned
from chaos_tests.harness.teller import Teller
from chaos_tests.harness.victims import Victims
from chaos_tests.harness.world import World, slot_of

PATIENCE_S = 50.0
"""How long a fault waits for somebody it can be done to: longer than others wait for a script that hangs."""
PLACE_S = 10.0
"""How long it waits for its place once it has made a recovery or a join begin."""
AMBUSH_S = 45.0
"""How long an ambush waits for somebody to come by: checkpoints and evaluations are rare."""
ASKED: Mapping[Ask, Callable[[int], None]] = {
    Ask.COMPACT: storefaults.compact,
    Ask.DEFRAGMENT: storefaults.defragment,
    Ask.REVOKE: storefaults.revoke_leases,
}
LAST_STEPS = 5
"""So many steps before the last one an ambush is laid there."""


class Breaker:
    """Made before the first step, so that this can be struck too; `begin` starts the clock of the plan.

    mark: of the job's processes. steps: how many the job has.
    """

    def __init__(
        self,
        plan: Sequence[Planned],
        seed: int,
        world: World,
        teller: Teller,
        orders: Orders,
        job_dir: Path,
        mark: str,
        steps: int,
    ) -> None:
        self._waiting = list(plan)
        self._victims = Victims(world, seed)
        self._world, self._teller, self._orders = world, teller, orders
        self._dir, self._mark, self._steps = job_dir, mark, steps
        self._begun_s = math.inf
        self._applied = 0
        self._running: list[Running] = []

    def prepare(self, workers: Sequence[str]) -> None:
        """Lay the ambushes of the first step, for those who will be in it."""
        for planned in [one for one in self._waiting if _when(one) is When.FIRST]:
            self._waiting.remove(planned)
            self._lay(planned, self._victims.any_of(planned, workers))

    def begin(self) -> None:
        """The first step was applied."""
        self._begun_s = time.monotonic()

    def poll(self, lines: Sequence[dict[str, Any]], applied: int) -> None:
        """lines: what the journals say since the last call; the world has heard them already. applied: steps so far."""
        self._applied = applied
        for done in self._orders.carried_out():
            self._walked_in(done)
        for running in self._running:
            if running.awaits_place and any(line["event"] == running.planned.place for line in lines):
                self._strike_again(running)
            if running.slot is not None:
                self._hold(running, lines)
        self._settle()
        if self._world.over:
            self.heal("the job came to its end")
        for planned in self._due():
            if not self._begin(planned):
                break  # the others wait with it, so that they come in their order
            self._waiting.remove(planned)

    def heal(self, because: str) -> None:
        """End whatever lasts, and skip what is still planned."""
        for running in self._running:
            running.awaits_place, running.since_s, running.until_s = False, -math.inf, 0.0
        self._settle()
        for planned in self._waiting:
            self._teller.skipped(planned, because)
        self._waiting.clear()

    # ------------------------------------------------------------------------------------------------ beginning

    def _due(self) -> Iterator[Planned]:
        """What may begin now, one after the other."""
        for planned in list(self._waiting):
            if any(one.awaits_place for one in self._running):
                return
            if _when(planned) is When.LAST:
                if self._applied >= self._steps - LAST_STEPS:
                    yield planned
            elif time.monotonic() - self._begun_s >= planned.at_s:
                yield planned

    def _begin(self, planned: Planned) -> bool:
        """False if it has to wait."""
        late = time.monotonic() - self._begun_s > planned.at_s + PATIENCE_S
        try:
            self._do(planned, CATALOGUE[planned.kind].fault, self._victims.healthy())
        except _NotNow as reason:
            if not late:
                return False
            self._teller.skipped(planned, f"{reason}, for {PATIENCE_S:.0f} s")
        except Impossible as reason:
            self._teller.skipped(planned, str(reason))
        return True

    def _do(self, planned: Planned, fault: Fault, healthy: list[str]) -> None:
        """Raises _NotNow or Impossible, with nothing done."""
        match fault:
            case Strike() | Freeze() | Ambush() | Slow() if len(healthy) < needed(fault):
                raise _NotNow(f"{len(healthy)} healthy members, {needed(fault)} are needed")
            case Strike(places=places) if places:
                self._hit(planned, (self._victims.any_of(planned, healthy),), signal.SIGKILL, awaits_place=True)
            case Strike():
                self._hit(planned, self._targets(planned, fault), fault.number)
            case Ambush(spark=True):
                self._hit(planned, (self._victims.any_of(planned, healthy),), signal.SIGKILL, awaits_place=True)
            case Ambush():
                self._lay(planned, *self._targets(planned, fault))
            case Freeze(for_s):
                self._freeze(planned, self._targets(planned, fault), blows.freeze, for_s, "SIGSTOP to")
            case Slow(for_s):
                self._freeze(planned, self._targets(planned, fault), blows.slow, for_s, "a fifth of the time for")
            case Reclaim(for_s):
                self._reclaim(planned, healthy, for_s if planned.for_s is None else planned.for_s)
            case KillService(module):
                self._on_service(planned, module, lambda pid: blows.kill(pid))
            case FreezeService(module, for_s):
                self._on_service(planned, module, lambda pid: blows.freeze([pid]), for_s)
            case AskStore(what):
                self._on_service(planned, ETCD, ASKED[what])
            case Hog(for_s):
                self._lasting(planned, "all cores", lambda: blows.hog(2 * (os.cpu_count() or 1)), for_s)
            case FillDisk(for_s):
                self._lasting(planned, str(self._dir), lambda: blows.fill(self._dir), for_s)

    def _targets(self, planned: Planned, fault: Targeted) -> tuple[str, ...]:
        if not (chosen := self._victims.of(planned, fault)):
            raise _NotNow("nobody to do it to")
        return chosen

    # ------------------------------------------------------------------------------------------------- workers

    def _hit(
        self, planned: Planned, targets: tuple[str, ...], number: signal.Signals, *, awaits_place: bool = False
    ) -> None:
        begun_ns, pids = time.monotonic_ns(), self._victims.pids(targets)
        running = Running(planned, time.monotonic(), awaits_place, hit=set(targets), injected=True)
        if isinstance(running.fault, Ambush):
            running.laid = self._order(planned), ANYBODY
            self._orders.give(*running.laid)
        try:
            blows.send(pids.values(), number)
        except Impossible:
            if running.laid is not None:
                self._orders.withdraw(*running.laid)
            raise
        self._teller.injected(planned, pids, begun_ns)
        self._victims.condemned.update(targets)
        self._running.append(running)
        place = f", and again at {planned.place}" if awaits_place else ""
        self._teller.told(planned, f"{number.name} to {', '.join(targets)}{place}")

    def _strike_again(self, running: Running) -> None:
        fault, planned = running.fault, running.planned
        if not isinstance(fault, Strike):
            return
        targets = self._victims.of(planned, fault)
        if not targets:
            return  # this place may come once more
        begun_ns, pids = time.monotonic_ns(), self._victims.pids(targets)
        try:
            blows.send(pids.values(), fault.number)
        except Impossible:
            return
        running.awaits_place = False
        self._teller.injected(planned, pids, begun_ns)
        self._victims.condemned.update(targets)
        running.hit.update(targets)
        self._teller.told(planned, f"{fault.number.name} to {', '.join(targets)} at {planned.place}")

    def _freeze(
        self,
        planned: Planned,
        targets: tuple[str, ...],
        blow: Callable[[Sequence[int]], End],
        for_s: float,
        text: str,
    ) -> None:
        begun_ns, pids = time.monotonic_ns(), self._victims.pids(targets)
        let_go = blow(tuple(pids.values()))
        self._teller.injected(planned, pids, begun_ns)
        self._victims.frozen.update(targets)

        def end() -> None:
            let_go()
            # Whoever was expelled meanwhile counts as lost by the journal; the others are healthy again.
            self._victims.frozen.difference_update(targets)

        self._lasts(planned, for_s, end, f"{text} {', '.join(targets)} for {for_s:g} s", frozenset(targets))

    # ------------------------------------------------------------------------------------------------ ambushes

    def _order(self, planned: Planned) -> Order:
        fault = CATALOGUE[planned.kind].fault
        assert isinstance(fault, Ambush)
        step = {When.FIRST: 0, When.LAST: self._steps - 1, None: None}[fault.step]
        return Order(planned.number, planned.place, fault.act, step)

    def _lay(self, planned: Planned, worker: str) -> None:
        order = self._order(planned)
        self._orders.give(order, worker)
        self._victims.condemned.add(worker)  # whenever it comes by
        self._running.append(Running(planned, time.monotonic(), laid=(order, worker)))

    def _walked_in(self, done: Mapping[str, Any]) -> None:
        """A worker came to its place and did what it was ordered to."""
        running = next(one for one in self._running if one.laid and one.planned.number == done["number"])
        fault, planned, worker = running.fault, running.planned, str(done["worker_id"])
        assert isinstance(fault, Ambush)
        self._world.pids[worker] = int(done["pid"])
        running.laid, running.awaits_place = None, False
        if fault.act is Act.STOP:
            self._running.remove(running)
            self._victims.condemned.discard(worker)
            self._freeze(planned, (worker,), blows.thaw_later, fault.for_s, f"at {planned.place} SIGSTOP to")
            return
        self._teller.injected(planned, self._victims.pids([worker]), int(done["t_mono_ns"]))
        self._teller.told(planned, f"{worker} {fault.act} at {planned.place}")
        self._victims.condemned.add(worker)
        running.injected = True
        running.hit.add(worker)

    def _lies_still(self, running: Running, now_s: float) -> bool:
        """Whether nobody has come into an ambush that waits on; one that has waited too long is given up."""
        if running.laid is None:
            return False
        order, worker = running.laid
        patience_s = PLACE_S if worker == ANYBODY else AMBUSH_S
        gone = worker in self._world.ended
        if (now_s - running.since_s <= patience_s and not gone) or not self._orders.withdraw(order, worker):
            return True  # or somebody has just come, and will be heard of
        running.laid, running.awaits_place = None, False
        because = f"nobody came to {order.point}" + (f", and {worker} has ended" if gone else "")
        if running.injected:
            self._teller.told(running.planned, because)
        else:
            self._victims.condemned.discard(worker)
            self._running.remove(running)
            self._teller.skipped(running.planned, because)
            return True
        return False

    # -------------------------------------------------------------------------------------------------- places

    def _reclaim(self, planned: Planned, healthy: list[str], for_s: float) -> None:
        slot = planned.slot
        if slot is None:
            if len(healthy) < 2:
                raise _NotNow("one member has to be spared")
            slot = slot_of(self._victims.any_of(planned, healthy))
        there = self._world.living(slot)
        if there in healthy and len(healthy) < 2:
            raise Impossible(f"{there} is the last that holds the state")
        begun_ns = time.monotonic_ns()
        hit = (there,) if there is not None and there not in self._victims.condemned else ()
        pids = self._victims.pids(hit)
        blows.send(pids.values(), signal.SIGKILL)
        self._teller.injected(planned, pids, begun_ns, target=f"place {slot}")
        if not hit:
            self._teller.seen(planned, "nobody was there just then")
        self._victims.condemned.update(hit)
        now_s = time.monotonic()
        self._running.append(Running(planned, now_s, hit=set(hit), until_s=now_s + for_s, slot=slot, injected=True))
        self._teller.told(planned, f"the machine of place {slot} is taken away ({', '.join(hit)}), for {for_s:g} s")

    def _hold(self, running: Running, lines: Sequence[dict[str, Any]]) -> None:
        """Whatever was started in a place that has no machine stands still."""
        for line in lines:
            worker = line["worker_id"]
            if line["event"] == "worker_started" and slot_of(worker) == running.slot:
                begun_ns = time.monotonic_ns()
                with contextlib.suppress(Impossible):  # it has ended already
                    blows.send([self._world.pids[worker]], signal.SIGSTOP)
                    running.held.append(worker)
                    self._victims.frozen.add(worker)
                    self._teller.held(running.planned, worker, begun_ns)

    def _let_go(self, running: Running) -> None:
        for worker in running.held:
            self._victims.frozen.discard(worker)
            with contextlib.suppress(Impossible):  # the agent may have ended it
                blows.send([self._world.pids[worker]], signal.SIGCONT)

    # ---------------------------------------------------------------------------------- services and the machine

    def _on_service(self, planned: Planned, module: str, blow: Callable[[int], End | None], for_s: float = 0.0) -> None:
        pid = processes.services(self._mark).get(module)
        if pid is None:
            raise _NotNow(f"no process of {module}")
        self._lasting(planned, module, lambda: blow(pid), for_s, pid=pid)

    def _lasting(
        self, planned: Planned, target: str, blow: Callable[[], End | None], for_s: float, **fields: object
    ) -> None:
        begun_ns = time.monotonic_ns()
        end = blow()
        self._teller.injected(planned, {}, begun_ns, target=target, **fields)
        self._lasts(planned, for_s, end, f"{target}, for {for_s:g} s" if for_s else target)

    def _lasts(
        self, planned: Planned, for_s: float, end: End | None, text: str, frozen: frozenset[str] = frozenset()
    ) -> None:
        self._teller.seen(planned, "it has taken hold")
        now_s = time.monotonic()
        self._running.append(Running(planned, now_s, frozen=frozen, until_s=now_s + for_s, end=end, injected=True))
        self._teller.told(planned, text)

    # -------------------------------------------------------------------------------------------------- ending

    def _settle(self) -> None:
        """Note what has been seen, and end what has lasted long enough."""
        now_s = time.monotonic()
        for running in list(self._running):
            planned = running.planned
            if self._lies_still(running, now_s):
                continue
            if running.awaits_place:
                if now_s - running.since_s <= PLACE_S:
                    continue
                running.awaits_place = False
                self._teller.told(planned, f"{planned.place} did not come with somebody to hit")
            if not running.hit <= self._world.ended:
                continue
            if running.hit and not running.seen:
                running.seen = True
                self._teller.seen(planned, "the agent saw them end")
            if now_s < running.until_s and not self._all_ended(running.frozen):
                continue
            self._let_go(running)
            if running.end is not None:
                running.end()
                self._teller.told(planned, "ends")
            self._teller.ended(planned)
            self._running.remove(running)

    def _all_ended(self, frozen: frozenset[str]) -> bool:
        """Whether a freeze has nobody left that it could let go."""
        return bool(frozen) and frozen <= self._world.ended


def _when(planned: Planned) -> When | None:
    fault = CATALOGUE[planned.kind].fault
    return fault.step if isinstance(fault, Ambush) else None


class _NotNow(Exception):
    """It may become possible."""
