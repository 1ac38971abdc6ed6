"""One leg of the goodput benchmark: a job of three workers trains for a while, undisturbed or under faults.

A job of this project stands on three nodes of this machine, so that one of them can leave; torchrun's has one agent.
The nodes can be hosts of their own, in network namespaces, so that one of them can be cut off.
What was achieved is told from the stamps of the training scripts, alike for both; where time went from the journals.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from chaos_tests.cluster import Network
from chaos_tests.nemesis import signals
from chaos_tests.nemesis.signals import End, Impossible
from elastic.agent.process.worker_process import facts
from elastic.protocol.worker_id import node_of
from elastic.records.journal import Journal, journal_path, read_all, recoveries
from elastic.store.embedded import EmbeddedEtcd
from tests.bench import contenders, stamps
from tests.bench.stamps import Stamp
from tests.bench.turnstile import OPEN, Gate
from tests.live.spread import Spread

WORKERS = 3
NODES = ("a", "b", "c")
WARM_UP_STEPS = 4
KILL, FREEZE, PARTITION, DRAIN = "kill", "freeze", "partition", "drain"
FROZEN_S = 6.0
"""Longer than it takes to be expelled. Where that takes longer, a frozen worker stands still until it is."""
PARTED_S = 6.0
"""How long a node is cut off from all; longer, if its worker is not expelled by then."""
DRAINED_S = 8.0
"""From a notice until it is withdrawn and the node returns."""
BUDGET_S = 60.0
"""What a notice says."""
POLL_S = 0.05
WAIT_S = 180.0
JOB = "bench"


@dataclass(frozen=True, slots=True)
class Recipe:
    """every_s: time between two faults, the first after half of it; 0: there are none. kinds: in turn, each order drawn
    anew."""

    every_s: float = 0.0
    kinds: tuple[str, ...] = (KILL,)


@dataclass(slots=True)
class Leg:
    """steps: what training had advanced by at the end. faults: how many of each kind. stall_s: no member computes;
    redo_s: interrupted steps are completed; start_cpu_s: CPU time of replacements until each has made its first step;
    all three of this project's jobs only."""

    seconds: float
    steps: int
    faults: dict[str, int] = field(default_factory=dict)
    stall_s: float = 0.0
    redo_s: float = 0.0
    start_cpu_s: float = 0.0


def plan(recipe: Recipe, seconds: float, seed: int) -> list[tuple[float, str]]:
    """(when, kind) of each fault, in seconds from the beginning."""
    dice = random.Random(seed)
    planned: list[tuple[float, str]] = []
    bag: list[str] = []
    at_s = recipe.every_s / 2
    while recipe.every_s and at_s < seconds:
        if not bag:
            bag = dice.sample(recipe.kinds, len(recipe.kinds))
        planned.append((at_s, bag.pop()))
        at_s += recipe.every_s
    return planned


def progress(of: Mapping[str, Sequence[Stamp]], at_ns: int) -> int:
    """Steps that the state of the job holds at that time: one more than the step that was applied last. A job that goes
    back to a checkpoint has less than before."""
    last = max((s for worker in of.values() for s in worker if s.t_ns <= at_ns), key=lambda s: s.t_ns, default=None)
    return last.step + 1 if last else 0


def split(lines: Sequence[Mapping[str, Any]], victims: Sequence[str]) -> tuple[float, float]:
    """(stall, redo) in seconds over all losses that the journals tell of. lines: by time. Raises AssertionError unless
    each victim is among them."""
    told = recoveries(dict(line) for line in lines)
    missing = set(victims) - {worker for episode in told for worker in episode["lost"]}
    assert not missing, f"the journals do not tell of the loss of {sorted(missing)}"
    return sum(one["recovery_ms"] for one in told) / 1e3, sum(one["redo_ms"] for one in told) / 1e3


Lasting: TypeAlias = tuple[float, End]
"""After so many seconds, and once the victim is lost to the job, it ends so."""
Blow: TypeAlias = Callable[[str, int], Lasting | None]
"""blow(worker, pid): what is done to one. Raises Impossible."""


def kill(worker: str, pid: int) -> None:
    signals.send([pid], signal.SIGKILL)


def freeze(worker: str, pid: int) -> Lasting:
    return FROZEN_S, signals.freeze([pid])


def partition(network: Network) -> Blow:
    def cut_off(worker: str, pid: int) -> Lasting:
        network.isolate(node_of(worker))
        return PARTED_S, network.heal

    return cut_off


class Driver:
    """Lets time pass, and does what is planned to whoever is there."""

    def __init__(
        self,
        gate: Gate,
        directory: Path,
        dice: random.Random,
        check: Callable[[], None],
        lost: Callable[[], set[str]] = set,
    ) -> None:
        """directory: of the stamps. check: called often; raises if the job has ended. lost: workers that the job has
        given up so far."""
        self._gate, self._directory, self._dice, self._check, self._lost = gate, directory, dice, check, lost
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._known: set[str] = set()
        self._seen: set[str] = set()
        self.victims: list[str] = []
        self.start_cpu_s = 0.0

    def until(self, what: str, reached: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not reached():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not within {WAIT_S:.0f} s: {what}")
            self.turn()

    def pass_time(self, until_s: float) -> None:
        while (left_s := until_s - time.monotonic()) > 0:
            self.turn(min(POLL_S, left_s))

    def turn(self, for_s: float = POLL_S) -> None:
        time.sleep(for_s)
        self._check()
        self._watch_starts()
        now_s = time.monotonic()
        for due in [one for one in self._later if one[0] <= now_s]:
            self._later.remove(due)
            due[1]()

    @property
    def healed(self) -> bool:
        """Whether all that was to end later has ended."""
        return not self._later

    def stepping(self) -> dict[str, int]:
        """Pids of the workers that are there and have made a step, by name."""
        return {
            name: pid
            for name, pid in self._gate.workers.items()
            if name not in self.victims and self._has_stepped(name)
        }

    def begin(self) -> None:
        """From here on, whoever starts is a replacement."""
        self._known |= set(self._gate.workers)

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, act))

    def hit(self, blow: Blow, before: Callable[[str], None]) -> bool:
        """Do that to a worker, one of at least two that step. False if there are not so many. before: told whom."""
        there = self.stepping()
        if len(there) < 2:
            return False
        victim = self._dice.choice(sorted(there))
        before(victim)
        try:
            lasting = blow(victim, there[victim])
        except Impossible:
            return False
        if lasting is not None:
            for_s, end = lasting
            self.after(for_s, lambda: self._end(victim, end))
        self.victims.append(victim)
        return True

    def _end(self, victim: str, end: End) -> None:
        if victim in self._lost():
            end()
        else:
            self.after(1.0, lambda: self._end(victim, end))

    def _has_stepped(self, name: str) -> bool:
        try:
            return (self._directory / f"{name}.stamps").stat().st_size > 0
        except FileNotFoundError:
            return False

    def _watch_starts(self) -> None:
        there = self._gate.workers
        for name, pid in there.items():
            if name not in self._known and name not in self._seen and self._has_stepped(name):
                self._seen.add(name)
                if (seen := facts(pid)) is not None:
                    self.start_cpu_s += seen.cpu_ticks / os.sysconf("SC_CLK_TCK")


def elastic(home: Path, recipe: Recipe, seconds: float, seed: int, *, apart: bool) -> Leg:
    """A leg of this project. apart: on hosts of their own. Raises AssertionError if the job ends or a fault leaves no
    trace, TimeoutError if it comes to a stand."""
    with ExitStack() as stack:
        network = stack.enter_context(Network()) if apart else None
        job, gate, directory = stack.enter_context(_nodes(home, network))
        dice = random.Random(seed)
        blow_of: dict[str, Blow] = {KILL: kill, FREEZE: freeze}
        if network is not None:
            blow_of[PARTITION] = partition(network)

        def check() -> None:
            assert not (job.dir / "result.json").exists(), f"the job has ended\n{job.story()}"

        def lost() -> set[str]:
            return {worker for one in recoveries(_lines(job)) for worker in one["lost"]}

        driver = Driver(gate, directory, dice, check, lost)
        with Journal(journal_path(job.dir, "harness"), JOB, "harness", "local") as journal:

            def note(victim: str, kind: str) -> None:
                journal.write("fault_injected", worker_id=victim, fault=kind)

            def act(kind: str) -> bool:
                if kind != DRAIN:
                    return driver.hit(blow_of[kind], lambda victim: note(victim, kind))
                staying = {node_of(name) for name in driver.stepping()}
                if len(staying) < 2:
                    return False
                node = dice.choice(sorted(staying))
                job.give_notice(node, BUDGET_S)
                driver.after(DRAINED_S, lambda: job.notice(node).unlink(missing_ok=True))
                return True

            leg = _drive(driver, directory, plan(recipe, seconds, seed), seconds, act)
            driver.until("the last faults have ended", lambda: driver.healed and set(driver.victims) <= lost())
            last = progress(stamps.read(directory), time.monotonic_ns())
            driver.until("a step after them", lambda: progress(stamps.read(directory), time.monotonic_ns()) > last)
        leg.stall_s, leg.redo_s = split(_lines(job), driver.victims)
        return leg


def torchrun(home: Path, recipe: Recipe, seconds: float, seed: int) -> Leg:
    """The same of torchrun with a checkpoint every 10 steps. recipe: of kills only."""
    with contenders.torchrun(home, WORKERS) as job:
        job.stand(WORKERS)
        job.open()
        directory = home / "stamps"
        driver = Driver(job.gate, directory, random.Random(seed), job.check)
        planned = plan(recipe, seconds, seed)
        leg = _drive(driver, directory, planned, seconds, lambda kind: driver.hit(kill, lambda victim: None))
        leg.start_cpu_s = 0.0  # all its workers start anew: nothing to compare with
        return leg


def _drive(
    driver: Driver, directory: Path, planned: Sequence[tuple[float, str]], seconds: float, act: Callable[[str], bool]
) -> Leg:
    """Warm up, and then measure for so many seconds. A fault for which there is nobody yet comes as soon as there is;
    one whose turn the next one takes, or the end, is left out."""

    def warm() -> bool:
        found = stamps.read(directory)
        return sum(len(of) >= WARM_UP_STEPS for of in found.values()) >= WORKERS

    driver.until(f"{WARM_UP_STEPS} steps of all", warm)
    driver.begin()
    begun_ns = time.monotonic_ns()
    begun_s = begun_ns / 1e9
    done: dict[str, int] = {}
    ends = [*(at_s for at_s, _ in planned[1:]), seconds]
    for (at_s, kind), end_s in zip(planned, ends, strict=bool(planned)):
        driver.pass_time(begun_s + at_s)
        while not (did := act(kind)) and time.monotonic() < begun_s + end_s:
            driver.turn()
        done[kind] = done.get(kind, 0) + int(did)
    driver.pass_time(begun_s + seconds)
    ended_ns = time.monotonic_ns()
    found = stamps.read(directory)
    steps = progress(found, ended_ns) - progress(found, begun_ns)
    return Leg((ended_ns - begun_ns) / 1e9, steps, done, start_cpu_s=driver.start_cpu_s)


@contextmanager
def _nodes(home: Path, network: Network | None) -> Iterator[tuple[Spread, Gate, Path]]:
    """A job on three nodes, its turnstile, which is open, and the directory of its stamps."""
    directory = home / "stamps"
    directory.mkdir(parents=True)
    with ExitStack() as stack:
        etcd = stack.enter_context(EmbeddedEtcd())
        gate = stack.enter_context(closing(Gate(home / "gate")))
        command = (sys.executable, str(contenders.SCRIPTS / "train_elastic.py"))
        settings = (f"BENCH_GATE={gate.path}", f"BENCH_STAMPS={directory}")
        job = stack.enter_context(Spread(home, etcd, JOB, network, command=command, workers=WORKERS, env=settings))
        gate.allow(OPEN)
        job.rendezvous()
        for node in NODES:
            job.agent(node)
        yield job, gate, directory


def _lines(job: Spread) -> list[dict[str, Any]]:
    """Of the journals of all nodes, by time."""
    lines = [line for path in sorted(job.home.glob("*/job.json")) for line in read_all(path.parent)]
    return sorted(lines, key=lambda line: int(line["t_mono_ns"]))
