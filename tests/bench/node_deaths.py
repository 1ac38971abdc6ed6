"""Measures what a node costs that dies, falls silent, has a frozen worker, and comes back; and that of two peers.

    python -m tests.bench.node_deaths [--rounds 10] [--minutes 2] [--small] [--no-targets] [--seed 1] [--peer DIR]
                                      [--json FILE]

Three nodes on this machine, one worker each, train without end. A node dies with all its processes at one instant and
is started again 6 s later; this project, torchrun and torchft are judged by the same stamps of their training scripts.
--peer: where torchft is installed; without that option it is left out. Exit code 1 if a target is missed. --small only
tries whether all of it works, and leaves docs/performance.md as it is.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from chaos_tests.cluster import Network, why_not
from chaos_tests.support.processes import descendants, kill_if_there
from tests.bench import launchers, report, stamps
from tests.bench.launchers import MORTAL, NODES, OURS, TORCHFT, TORCHRUN, Launcher
from tests.bench.recovery import say
from tests.bench.report import Bench, Row, target
from tests.bench.stamps import Stamp

BENCH = Bench("node_deaths", "bench-nodes")

STEADY_STEPS = 6
AWAY_S = 6.0
DEATH_EVERY_S = 15.0
FROZEN_S = 4.0
WAIT_S = 180.0
POLL_S = 0.02

PER_BATCH = "longest time for a whole batch at a node's return"
CPU = "CPU time of a node from its start to the step of all"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds. next_s: from the fault to the next step of those that are left. full_s: from the return to the first
    step of all nodes. pause_s: the longest time between two steps from the return until all nodes are steady. batch_s:
    the same for as many samples as all nodes have in a step: a step without the samples of one of three nodes counts
    as two thirds of a batch. step_s: the median of the steps before the fault. processes, cpu_s: of the node at the
    first step of all nodes, since it was started; 0: the fault has not ended its processes."""

    next_s: float
    full_s: float
    pause_s: float
    batch_s: float
    step_s: float
    processes: int = 0
    cpu_s: float = 0.0


@dataclass(slots=True)
class Found:
    """Of one launcher. goodput: steps under deaths, of those without. An empty list: was not measured."""

    deaths: list[Outcome] = field(default_factory=list)
    warm: list[Outcome] = field(default_factory=list)
    silent: list[Outcome] = field(default_factory=list)
    freezes: list[Outcome] = field(default_factory=list)
    goodput: float = 0.0


def judge(
    told: Mapping[str, Sequence[Stamp]],
    gone: set[str],
    fault_ns: int,
    return_ns: int,
    nodes: int = len(NODES),
    own_parts: bool = False,
) -> Outcome | None:
    """gone: workers that the fault has hit. own_parts: a node has a part of the samples of its own, which a step lacks
    while the node is away. None: all nodes are not back yet, or not steady."""
    merged = sorted((stamp for of in told.values() for stamp in of), key=lambda stamp: stamp.t_ns)
    before = [stamp for stamp in merged if stamp.t_ns <= fault_ns]
    known, group = _known(told, fault_ns)
    after = sorted(
        stamp.t_ns
        for name, of in told.items()
        if name not in gone
        for stamp in of
        if stamp.t_ns > fault_ns and (name not in known or stamp.group > group)
    )
    full = _full(told, fault_ns, return_ns, nodes)
    steps = _first(full)
    if not after or len(steps) < STEADY_STEPS:
        return None
    last_ns = steps[STEADY_STEPS - 1].t_ns
    around = [stamp for stamp in _first([s for s in merged if s.t_ns > fault_ns]) if stamp.t_ns <= last_ns]
    gaps = [(_gap_s(pair), pair[1].world) for pair in pairwise(around) if pair[1].t_ns > return_ns]
    step_s = statistics.median(_gap_s(pair) for pair in pairwise(_first(before)[-STEADY_STEPS:]))
    return Outcome(
        next_s=(after[0] - fault_ns) / 1e9,
        full_s=(full[0].t_ns - return_ns) / 1e9,
        pause_s=max(gap_s for gap_s, _ in gaps),
        batch_s=max(gap_s * (nodes / world if own_parts else 1) for gap_s, world in gaps),
        step_s=step_s,
    )


def _known(told: Mapping[str, Sequence[Stamp]], fault_ns: int) -> tuple[set[str], int]:
    """The workers from before the fault, and the last group that they were."""
    known = {name for name, of in told.items() if of and of[0].t_ns <= fault_ns}
    return known, max(stamp.group for of in told.values() for stamp in of if stamp.t_ns <= fault_ns)


def _full(told: Mapping[str, Sequence[Stamp]], fault_ns: int, return_ns: int, nodes: int) -> list[Stamp]:
    """The steps that all nodes have made together since the return, by time."""
    known, group = _known(told, fault_ns)
    full = (
        stamp
        for name, of in told.items()
        for stamp in of
        if stamp.t_ns > return_ns and stamp.world == nodes and (name not in known or stamp.began > group)
    )
    return sorted(full, key=lambda stamp: stamp.t_ns)


def _effort(root: int) -> tuple[int, float]:
    """The living processes of a node, and the CPU seconds of these and of those that they have waited for."""
    ticks, pids = 0, 0
    for pid in (root, *descendants(root)):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            continue  # has ended meanwhile
        pids, ticks = pids + 1, ticks + sum(map(int, fields[11:15]))
    return pids, ticks / os.sysconf("SC_CLK_TCK")


def _gap_s(pair: tuple[Stamp, Stamp]) -> float:
    return (pair[1].t_ns - pair[0].t_ns) / 1e9


def _first(of: Sequence[Stamp]) -> list[Stamp]:
    """The first stamp of each step, in each size of the world in which it was applied."""
    first: dict[tuple[int, int], Stamp] = {}
    for stamp in sorted(of, key=lambda stamp: stamp.t_ns):
        first.setdefault((stamp.world, stamp.step), stamp)
    return list(first.values())


class Driver:
    """What is done to the nodes of one launcher, and what comes of it."""

    def __init__(self, launcher: Launcher, dice: random.Random, watch: Callable[[], object] | None = None) -> None:
        """watch: called while something is awaited. None: what raises if the job has ended."""
        self._job = launcher
        self._watch = watch or launcher.check
        self._dice = dice

    def until(self, what: str, reached: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not reached():
            self._watch()
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{self._job.name}: not within {WAIT_S:g} s: {what}")
            time.sleep(POLL_S)  # files of other processes: there is nothing to wait on

    def told(self) -> dict[str, list[Stamp]]:
        return stamps.read(self._job.directory)

    def steady(self) -> None:
        """Until all nodes have made steps together, from now on."""
        since_ns = time.monotonic_ns()

        def settled() -> bool:
            recent = {
                name: [s for s in of if s.t_ns > since_ns and s.world == len(NODES)] for name, of in self.told().items()
            }
            return sum(len(of) >= STEADY_STEPS for of in recent.values()) == len(NODES)

        self.until("all nodes train together", settled)

    def workers_below(self, pid: int) -> dict[str, int]:
        below = {pid, *descendants(pid)}
        return {name: worker for name, worker in self._job.gate.workers.items() if worker in below}

    def hit(self, aim: Callable[[str], Callable[[], None]], undo: Callable[[str], None], away_s: float) -> Outcome:
        """A node is steady, is hit, and is given back after that time. aim: looks for what is to be hit, and returns
        what does it."""
        self.steady()
        node = self._dice.choice(MORTAL)
        root = self._job.root(node)
        gone = set(self.workers_below(root))
        time.sleep(self._dice.uniform(0, 0.5))
        strike = aim(node)
        fault_ns = time.monotonic_ns()
        strike()
        time.sleep(away_s)
        return_ns = time.monotonic_ns()
        undo(node)
        found: list[Outcome] = []
        efforts: list[tuple[int, float]] = []

        def judged() -> bool:
            told = self.told()
            if not efforts and _full(told, fault_ns, return_ns, len(NODES)):
                efforts.append(_effort(self._job.root(node)) if self._job.root(node) != root else (0, 0.0))
            if (outcome := judge(told, gone, fault_ns, return_ns, own_parts=self._job.name == TORCHFT)) is not None:
                found.append(replace(outcome, processes=efforts[0][0], cpu_s=efforts[0][1]))
            return bool(found)

        self.until(f"all nodes after {node} was hit", judged)
        return found[0]

    def kill(self, node: str) -> Callable[[], None]:
        root = self._job.root(node)
        below = descendants(root)

        def strike() -> None:
            for pid in (root, *below):
                kill_if_there(pid)
            self._job.end(node)

        return strike

    def freeze(self, node: str) -> Callable[[], None]:
        pids = self.workers_below(self._job.root(node)).values()

        def strike() -> None:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)

        return strike

    def thaw(self, node: str) -> None:
        for pid in self.workers_below(self._job.root(node)).values():
            os.kill(pid, signal.SIGCONT)

    def progress(self, seconds: float, every_s: float) -> int:
        """Steps that are applied meanwhile, with a death so often; 0: without."""
        self.steady()
        first, begun_s = self._latest(), time.monotonic()
        away: dict[str, float] = {}
        next_s = begun_s + every_s / 2 if every_s else float("inf")
        while (now_s := time.monotonic()) < begun_s + seconds:
            self._job.check()
            for node, back_s in list(away.items()):
                if now_s >= back_s:
                    del away[node]
                    self._job.start(node)
            if now_s >= next_s and not away:
                node = self._dice.choice(MORTAL)
                self.kill(node)()
                away[node] = now_s + AWAY_S
                next_s += every_s
            time.sleep(POLL_S)
        made = self._latest() - first
        for node in away:
            self._job.start(node)
        return made

    def _latest(self) -> int:
        return max(of[-1].step for of in self.told().values() if of)


# ------------------------------------------------------------------------------------------------ the measuring


def measure(home: Path, rounds: int, seconds: float, seed: int, peer: Path | None) -> dict[str, Found]:
    """Raises RuntimeError if a job ends, TimeoutError if it comes to a stand."""
    found = {OURS: Found()}
    with launchers.elastic(home / OURS, None) as ours:
        driver, of = Driver(ours, random.Random(seed)), found[OURS]
        _repeat(rounds, "death", of.deaths, lambda: _hit(ours, driver, driver.kill, ours.start, AWAY_S))
        _repeat(rounds, "agent's death", of.warm, lambda: _hit(ours, driver, ours.kill_agent, lambda node: None, 0.0))
        _repeat(rounds, "freeze", of.freezes, lambda: _hit(ours, driver, driver.freeze, driver.thaw, FROZEN_S))
        of.goodput = _goodput(driver, seconds)
    if not why_not():
        found[OURS].silent = _silent(home / "silent", rounds, seed)
    others: dict[str, Callable[[Path], AbstractContextManager[Launcher]]] = {TORCHRUN: launchers.torchrun}
    if peer is not None:
        others[TORCHFT] = lambda home: launchers.torchft(home, peer)
    for name, started in others.items():
        with started(home / name) as theirs:
            found[name] = _deaths(theirs, rounds, seconds, seed)
    return found


def _deaths(theirs: Launcher, rounds: int, seconds: float, seed: int) -> Found:
    driver, of = Driver(theirs, random.Random(seed)), Found()
    _repeat(rounds, f"{theirs.name}: death", of.deaths, lambda: driver.hit(driver.kill, theirs.start, AWAY_S))
    of.goodput = _goodput(driver, seconds)
    return of


def _hit(
    ours: launchers.Elastic,
    driver: Driver,
    aim: Callable[[str], Callable[[], None]],
    undo: Callable[[str], None],
    away_s: float,
) -> Outcome:
    driver.until("an agent that stands by on each node", ours.have_standbys)
    return driver.hit(aim, undo, away_s)


def _silent(home: Path, rounds: int, seed: int) -> list[Outcome]:
    """On nodes that are hosts of their own, so that they can be cut off."""
    found: list[Outcome] = []
    with Network() as links, launchers.elastic(home, links) as ours:
        driver = Driver(ours, random.Random(seed))

        def cut_off() -> Outcome:
            return _hit(ours, driver, _cut(links), lambda node: links.heal(), AWAY_S)

        _repeat(rounds, "silence", found, cut_off)
    return found


def _cut(links: Network) -> Callable[[str], Callable[[], None]]:
    return lambda node: lambda: links.isolate(node)


def _repeat(rounds: int, what: str, into: list[Outcome], act: Callable[[], Outcome]) -> None:
    for number in range(rounds):
        into.append(one := act())
        say(
            f"{what} {number + 1}/{rounds}: next step after {one.next_s:.2f} s, all nodes after {one.full_s:.1f} s, "
            f"a pause of {one.pause_s / one.step_s:.1f} steps of {one.step_s:.2f} s"
        )


def _goodput(driver: Driver, seconds: float) -> float:
    quiet = driver.progress(seconds, 0.0)
    under = driver.progress(seconds, DEATH_EVERY_S)
    say(f"{under} steps in {seconds:.0f} s with a death every {DEATH_EVERY_S:g} s, {quiet} without")
    return under / quiet


def rows_of(found: Mapping[str, Found]) -> list[Row]:
    ours = found[OURS]
    rows = [
        _seconds("node killed -> next step of the others", [one.next_s for one in ours.deaths], 0.3, 0.6),
        _seconds("node silent (cut off) -> next step of the others", [one.next_s for one in ours.silent], 3.0),
        _seconds("worker stopped -> next step of the others", [one.next_s for one in ours.freezes], 1.2),
        _seconds("start of a node -> step of all", [one.full_s for one in ours.deaths], 4.5),
        _seconds("death of a job's agent, daemon lives -> step of all", [one.full_s for one in ours.warm], 1.5),
        _steps("longest pause at a node's return", [one.pause_s / one.step_s for one in ours.deaths], 1.5),
        _seconds(PER_BATCH, [one.batch_s for one in ours.deaths]),
        _effort_row(CPU, ours.deaths),
        _steps("longest pause at an agent's return", [one.pause_s / one.step_s for one in ours.warm], 1.5),
        _share(f"steps with a death every {DEATH_EVERY_S:g} s / without", ours.goodput, 0.93),
    ]
    for name, theirs in list(found.items())[1:]:
        rows += [
            _seconds(f"{name}: node killed -> next step of the others", [one.next_s for one in theirs.deaths]),
            _seconds(f"{name}: start of a node -> step of all", [one.full_s for one in theirs.deaths]),
            _steps(f"{name}: longest pause at a node's return", [one.pause_s / one.step_s for one in theirs.deaths]),
            _seconds(f"{name}: {PER_BATCH}", [one.batch_s for one in theirs.deaths]),
            _effort_row(f"{name}: {CPU}", theirs.deaths),
            _share(f"{name}: steps with a death every {DEATH_EVERY_S:g} s / without", theirs.goodput),
        ]
    return [row for row in rows if row is not None]


def _seconds(what: str, of: Sequence[float], most: float | None = None, worst: float | None = None) -> Row | None:
    if not of:
        return None
    wanted = [target(statistics.median(of) <= most, f"median <= {most:g} s")] if most is not None else []
    wanted += [target(max(of) <= worst, f"worst <= {worst:g} s")] if worst is not None else []
    return Row(what, f"{statistics.median(of):.2f} s", f"{min(of):.2f} to {max(of):.2f} s", ", ".join(wanted))


def _effort_row(what: str, of: Sequence[Outcome]) -> Row | None:
    found = _seconds(what, [one.cpu_s for one in of])
    return found and replace(
        found, spread=f"{found.spread}, {statistics.median(one.processes for one in of):g} processes"
    )


def _steps(what: str, of: Sequence[float], most: float | None = None) -> Row:
    wanted = target(statistics.median(of) <= most, f"median <= {most:g} steps") if most is not None else ""
    return Row(what, f"{statistics.median(of):.1f} steps", f"{min(of):.1f} to {max(of):.1f}", wanted)


def _share(what: str, share: float, least: float | None = None) -> Row:
    return Row(what, f"{share:.2f}", "", target(share >= least, f">= {least:g}") if least is not None else "")


def summary(found: Mapping[str, Found]) -> str:
    """The last line, for scripts: medians; nan for what was not measured."""
    ours = found[OURS]

    def median(of: Sequence[float]) -> float:
        return statistics.median(of) if of else float("nan")

    values = {
        "death_s": median([one.next_s for one in ours.deaths]),
        "worst_s": max(one.next_s for one in ours.deaths),
        "silent_s": median([one.next_s for one in ours.silent]),
        "freeze_s": median([one.next_s for one in ours.freezes]),
        "return_cold_s": median([one.full_s for one in ours.deaths]),
        "return_warm_s": median([one.full_s for one in ours.warm]),
        "pause_steps": median([one.pause_s / one.step_s for one in ours.deaths]),
        "goodput": ours.goodput,
    }
    return "nodes: " + " ".join(f"{name}={value:.2f}" for name, value in values.items())


def notes() -> list[str]:
    """What a reader has to know to judge the table."""
    return [
        "Every job trains the same MLP of 10.0 million float32 parameters on three nodes of this machine with a worker "
        f"each. A node dies by SIGKILL of all its processes at one instant, and is started again {AWAY_S:g} s later; "
        "the first node is spared, because torchrun keeps what its nodes agree on there.",
        "Times are read from the time stamps of the training scripts, in the same way for all. The next step is the "
        "first step that a group without the node applies; with torchrun it may be a step that was finished before "
        "and is computed again.",
        "With elastic-ring each fault comes when all nodes have a standby agent, half a minute after the last return: "
        "the standby imports torch, here on the cores of the other nodes. The steps under deaths have no such pause.",
        "All nodes use the loopback interface, but for the silent ones: those are hosts of their own, in network "
        "namespaces, and are cut off from all others. torchrun and torchft were not measured with a silent node or a "
        "stopped worker.",
        f"torchft is the nightly 2026.10.26. Its waits are short: {launchers.SILENT_MS / 1000:g} s for a heartbeat, "
        f"{launchers.JOIN_MS / 1000:g} s for stragglers. Its steps under deaths lack the samples of the absent node. "
        "So do those that it makes while the node returns: the time for a whole batch counts each as two thirds.",
        "All nodes share the cores of one machine: a node that starts takes CPU time from the others, most of all "
        "while it imports torch. A standby agent has imported torch already. Two workers use two cores as fully as "
        "three workers, and disturb each other less, so the number of steps under deaths can be higher than without "
        "deaths. If each node is a machine, the share of a lost node is missing.",
    ]


# ---------------------------------------------------------------------------------------------------- the command


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    with BENCH.directory(writes=not options.small) as directory:
        found = measure(directory, options.rounds, options.minutes * 60, options.seed, options.peer)
    rows = rows_of(found)
    measured = {"measured": {name: asdict(of) for name, of in found.items()}}
    words = f"--rounds {options.rounds} --minutes {options.minutes:g}"
    BENCH.publish(measured, rows, notes(), words, to=options.json, writes=not options.small)
    print(summary(found), flush=True)
    return 1 if report.missed(rows) and not options.no_targets else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = BENCH.parser()
    parser.add_argument("--rounds", type=int, default=10, help="of each fault")
    parser.add_argument("--minutes", type=float, default=2.0, help="with deaths, and as long without")
    parser.add_argument("--no-targets", action="store_true", help="a missed target is no failure")
    parser.add_argument("--seed", type=int, default=1, help="of the victims and moments")
    parser.add_argument("--peer", type=Path, metavar="DIR", help="a directory in which torchft is installed")
    options = parser.parse_args(arguments)
    if options.small:
        options.rounds, options.minutes, options.no_targets = 1, 0.4, True
    return options


if __name__ == "__main__":
    sys.exit(main())
