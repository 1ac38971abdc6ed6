"""Carries out a plan on a running job: waits for each fault's time and place, does it, sees it, and ends it.

It is told what happens and looks at the clock when it is polled; it has no thread. Every fault comes to the journal
as fault_injected, fault_seen and fault_ended, or as fault_skipped with the reason.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_tests.harness import blows, processes
from chaos_tests.harness.blows import End, Impossible
from chaos_tests.harness.faults import (
    CATALOGUE,
    FillDisk,
    Freeze,
    FreezeService,
    Hog,
    KillService,
    Reclaim,
    Strike,
    choose,
    lethal,
    needed,
)
from chaos_tests.harness.schedule import Planned
from chaos_tests.harness.world import World, slot_of
from elastic.journal import Journal

PATIENCE_S = 30.0
"""How long a fault waits for somebody it can be done to."""
PLACE_S = 10.0
"""How long it waits for its place once it has made a recovery or a join begin."""


@dataclass(slots=True)
class _Running:
    """A fault that has begun. hit: workers whose end is awaited. frozen: those that it makes stand still.

    slot: a place of which each new process is held, in `held`, until the fault ends.
    """

    planned: Planned
    since_s: float
    awaits_place: bool = False
    hit: set[str] = field(default_factory=set)
    frozen: frozenset[str] = frozenset()
    until_s: float = 0.0
    end: End | None = None
    slot: int | None = None
    held: list[str] = field(default_factory=list)
    seen: bool = False


class Breaker:
    """say: for the person who watches. mark: of the job's processes."""

    def __init__(
        self,
        plan: Sequence[Planned],
        seed: int,
        world: World,
        journal: Journal,
        job_dir: Path,
        mark: str,
        say: Callable[[str], None],
    ) -> None:
        self._waiting = list(plan)
        self._seed = seed
        self._world, self._journal, self._dir, self._mark, self._say = world, journal, job_dir, mark, say
        self._begun_s = time.monotonic()
        self._running: list[_Running] = []
        self._frozen: set[str] = set()
        self._condemned: set[str] = set()

    def poll(self, lines: Sequence[dict[str, Any]]) -> None:
        """lines: what the journals say since the last call; the world has heard them already."""
        for running in self._running:
            if running.awaits_place and any(line["event"] == running.planned.place for line in lines):
                self._strike_again(running)
            if running.slot is not None:
                self._hold(running, lines)
        self._settle()
        if self._world.over:
            self.heal("the job came to its end")
        while self._waiting and self._due(self._waiting[0]) and self._begin(self._waiting[0]):
            self._waiting.pop(0)

    def heal(self, because: str) -> None:
        """End whatever lasts, and skip what is still planned."""
        for running in self._running:
            running.awaits_place, running.until_s = False, 0.0
        self._settle()
        for planned in self._waiting:
            self._skip(planned, because)
        self._waiting.clear()

    # ------------------------------------------------------------------------------------------------ beginning

    def _due(self, planned: Planned) -> bool:
        return time.monotonic() - self._begun_s >= planned.at_s and not any(one.awaits_place for one in self._running)

    def _begin(self, planned: Planned) -> bool:
        """False if it has to wait."""
        fault = CATALOGUE[planned.kind].fault
        healthy = self._healthy()
        late = time.monotonic() - self._begun_s > planned.at_s + PATIENCE_S
        try:
            match fault:
                case Strike() | Freeze() if len(healthy) < needed(fault):
                    raise _NotNow(f"{len(healthy)} healthy members, {needed(fault)} are needed")
                case Strike(places=places) if places:
                    self._hit(planned, (self._dice(planned).choice(healthy),), signal.SIGKILL, awaits_place=True)
                case Strike():
                    self._hit(planned, self._targets(planned, fault), fault.number)
                case Freeze():
                    self._stop_workers(planned, fault, self._targets(planned, fault))
                case Reclaim(for_s):
                    self._reclaim(planned, healthy, for_s if planned.for_s is None else planned.for_s)
                case KillService(module):
                    self._on_service(planned, module, lambda pid: blows.kill(pid))
                case FreezeService(module, for_s):
                    self._on_service(planned, module, lambda pid: blows.freeze([pid]), for_s)
                case Hog(for_s):
                    self._lasting(planned, "all cores", lambda: blows.hog(2 * (os.cpu_count() or 1)), for_s)
                case FillDisk(for_s):
                    self._lasting(planned, str(self._dir), lambda: blows.fill(self._dir), for_s)
        except _NotNow as reason:
            if not late:
                return False
            self._skip(planned, f"{reason}, for {PATIENCE_S:.0f} s")
        except Impossible as reason:
            self._skip(planned, str(reason))
        return True

    def _dice(self, planned: Planned) -> random.Random:
        """Of this fault alone, so that a replay hits the same ranks, whatever happened to the faults before it."""
        return random.Random(f"{self._seed}/{planned.number}")

    def _targets(self, planned: Planned, fault: Strike | Freeze) -> tuple[str, ...]:
        dice = self._dice(planned)
        chosen = choose(fault, self._healthy(), sorted(self._world.newcomers - self._condemned), dice)
        if not chosen:
            raise _NotNow("nobody to do it to")
        return chosen

    def _healthy(self) -> list[str]:
        return [w for w in self._world.holders if w not in self._frozen and w not in self._condemned]

    # ------------------------------------------------------------------------------------------------- workers

    def _hit(
        self, planned: Planned, targets: tuple[str, ...], number: signal.Signals, *, awaits_place: bool = False
    ) -> None:
        begun_ns = time.monotonic_ns()
        blows.send([self._world.pids[worker] for worker in targets], number)
        self._note(planned, targets, begun_ns)
        self._condemned.update(targets)
        self._running.append(_Running(planned, time.monotonic(), awaits_place, set(targets)))
        place = f", and again at {planned.place}" if awaits_place else ""
        self._told(planned, f"{number.name} to {', '.join(targets)}{place}")

    def _strike_again(self, running: _Running) -> None:
        fault = CATALOGUE[running.planned.kind].fault
        assert isinstance(fault, Strike)
        dice = self._dice(running.planned)
        targets = choose(fault, self._healthy(), sorted(self._world.newcomers - self._condemned), dice)
        if not targets:
            return  # this place may come once more
        begun_ns = time.monotonic_ns()
        try:
            blows.send([self._world.pids[worker] for worker in targets], fault.number)
        except Impossible:
            return
        running.awaits_place = False
        self._note(running.planned, targets, begun_ns)
        self._condemned.update(targets)
        running.hit.update(targets)
        self._told(running.planned, f"{fault.number.name} to {', '.join(targets)} at {running.planned.place}")

    def _stop_workers(self, planned: Planned, fault: Freeze, targets: tuple[str, ...]) -> None:
        begun_ns = time.monotonic_ns()
        thaw = blows.freeze([self._world.pids[worker] for worker in targets])
        self._note(planned, targets, begun_ns)
        self._frozen.update(targets)

        def end() -> None:
            thaw()
            # Whoever was expelled meanwhile counts as lost by the journal; the others are healthy again.
            self._frozen.difference_update(targets)

        text = f"SIGSTOP to {', '.join(targets)} for {fault.for_s:g} s"
        self._lasts(planned, fault.for_s, end, text, frozenset(targets))

    def _reclaim(self, planned: Planned, healthy: list[str], for_s: float) -> None:
        slot = planned.slot
        if slot is None:
            if len(healthy) < 2:
                raise _NotNow("one member has to be spared")
            slot = slot_of(self._dice(planned).choice(healthy))
        there = self._world.living(slot)
        if there in healthy and len(healthy) < 2:
            raise Impossible(f"{there} is the last that holds the state")
        begun_ns = time.monotonic_ns()
        hit = (there,) if there is not None and there not in self._condemned else ()
        blows.send([self._world.pids[worker] for worker in hit], signal.SIGKILL)
        self._note(planned, hit, begun_ns, target=f"place {slot}")
        if not hit:
            self._journal.write("fault_seen", number=planned.number, because="nobody was there just then")
        self._condemned.update(hit)
        now_s = time.monotonic()
        self._running.append(_Running(planned, now_s, hit=set(hit), until_s=now_s + for_s, slot=slot))
        self._told(planned, f"the machine of place {slot} is taken away ({', '.join(hit)}), for {for_s:g} s")

    def _hold(self, running: _Running, lines: Sequence[dict[str, Any]]) -> None:
        """Whatever was started in a place that has no machine stands still."""
        for line in lines:
            worker = line["worker_id"]
            if line["event"] == "worker_started" and slot_of(worker) == running.slot:
                begun_ns = time.monotonic_ns()
                with contextlib.suppress(Impossible):  # it has ended already
                    blows.send([self._world.pids[worker]], signal.SIGSTOP)
                    running.held.append(worker)
                    self._frozen.add(worker)
                    self._journal.write(
                        "fault_held", t_mono_ns=begun_ns, number=running.planned.number, worker_id=worker
                    )

    def _let_go(self, running: _Running) -> None:
        for worker in running.held:
            self._frozen.discard(worker)
            with contextlib.suppress(Impossible, ProcessLookupError):  # the agent may have ended it
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
        self._note(planned, (), begun_ns, target=target, **fields)
        self._lasts(planned, for_s, end, f"{target}, for {for_s:g} s" if for_s else target)

    def _lasts(
        self, planned: Planned, for_s: float, end: End | None, text: str, frozen: frozenset[str] = frozenset()
    ) -> None:
        self._journal.write("fault_seen", number=planned.number, because="it has taken hold")
        now_s = time.monotonic()
        self._running.append(_Running(planned, now_s, frozen=frozen, until_s=now_s + for_s, end=end))
        self._told(planned, text)

    # -------------------------------------------------------------------------------------------------- ending

    def _settle(self) -> None:
        """Note what has been seen, and end what has lasted long enough."""
        now_s = time.monotonic()
        for running in list(self._running):
            number = running.planned.number
            if running.awaits_place:
                if now_s - running.since_s <= PLACE_S:
                    continue
                running.awaits_place = False
                self._told(running.planned, f"{running.planned.place} did not come with somebody to hit")
            if running.hit and not running.hit <= self._world.ended:
                continue
            if running.hit and not running.seen:
                running.seen = True
                self._journal.write("fault_seen", number=number, because="the agent saw them end")
            if now_s < running.until_s and not self._all_ended(running.frozen):
                continue
            self._let_go(running)
            if running.end is not None:
                running.end()
                self._told(running.planned, "ends")
            self._journal.write("fault_ended", number=number)
            self._running.remove(running)

    def _all_ended(self, frozen: frozenset[str]) -> bool:
        """Whether a freeze has nobody left that it could let go."""
        return bool(frozen) and frozen <= self._world.ended

    # ------------------------------------------------------------------------------------------------- telling

    def _note(self, planned: Planned, workers: tuple[str, ...], begun_ns: int, **fields: object) -> None:
        """Written once it is known to be possible, with the time at which it was begun."""
        about = {
            "t_mono_ns": begun_ns,
            "number": planned.number,
            "fault": planned.kind,
            "place": planned.place,
            "lethal": lethal(CATALOGUE[planned.kind].fault),
            **fields,
        }
        for worker in workers:
            self._journal.write("fault_injected", 0, **{**about, "worker_id": worker, "pid": self._world.pids[worker]})
        if not workers:
            self._journal.write("fault_injected", 0, **about)

    def _skip(self, planned: Planned, because: str) -> None:
        self._journal.write("fault_skipped", number=planned.number, fault=planned.kind, because=because)
        self._say(f"#{planned.number} {planned.kind}: skipped: {because}")

    def _told(self, planned: Planned, text: str) -> None:
        self._say(f"#{planned.number} {planned.kind}: {text}")


class _NotNow(Exception):
    """It may become possible."""
