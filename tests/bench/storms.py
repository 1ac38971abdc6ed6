"""Measures what is left of a training while nodes come and go as a spot market has taken and given them: this project,
torchft and torchrun, one after the other.

    python -m tests.bench.storms [--traces bamboo-p3,..] [--minutes 1] [--speed 60] [--runs 3] [--further] [--peer DIR]
                                 [--json FILE]

Three nodes train, undisturbed and then under each trace. A node that is taken dies with all its processes at one
instant, and is started again when the trace gives it back. --peer: where torchft is installed; without that option it
is left out. The losses of this project's job under the first trace are compared, bit for bit, with those of a job that
nothing happens to.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TypeAlias

from chaos_tests.run.request import trace_path
from chaos_tests.scenario.traces import Absence, absences, divided, read_trace
from chaos_tests.support.processes import exit_on_signals
from tests.bench import contenders, launchers, legs, report, work
from tests.bench.launchers import JOIN_MS, MORTAL, OURS, SILENT_MS, TORCHFT, TORCHRUN, Launcher
from tests.bench.node_deaths import Driver
from tests.bench.recovery import say
from tests.bench.report import Bench, Row
from tests.bench.stamps import Stamp

BENCH = Bench("storms")

TRACES = ("bamboo-p3", "bamboo-g4dn", "parcae-hh", "parcae-hl", "parcae-lh", "parcae-ll")
QUIET = "quiet"
ALIKE_WORKERS = 2
ALIKE_WITHIN_S = 1200.0
"""Of the job that nothing happens to."""
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Leg:
    """steps: by which the training advanced. samples: that are in them, each counted once. dropped: samples of these
    steps that were left out. again: steps that were done a second time. stop_s: the longest time without a step.
    loss: of the last step. taken: how many nodes were. revived: nodes whose processes ended by themselves and were
    started again."""

    seconds: float
    steps: int
    samples: int
    dropped: int
    again: int
    stop_s: float
    loss: float
    taken: int = 0
    revived: int = 0

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.samples / self.seconds


Legs: TypeAlias = Mapping[str, Mapping[str, Leg]]
"""Of one run: launcher -> QUIET or a trace -> what was left."""


def planned(name: str, speed: float, seconds: float) -> tuple[Absence, ...]:
    """When which of the nodes that can be taken is taken, and for how long, in the first so many seconds."""
    path = trace_path(name)
    trace = read_trace(path.read_text(encoding="utf-8"), str(path))
    most = max(accumulate(1 if change.there else -1 for change in trace))
    found = absences(divided(trace, -(-most // len(MORTAL))), len(MORTAL), speed)
    return tuple(one for one in found if one.at_s < seconds)


def judge(told: Mapping[str, Sequence[Stamp]], begun_ns: int, ended_ns: int, *, own_parts: bool) -> Leg:
    """What was achieved in that time. own_parts: a process has a part of the samples of its own, which are in a step
    only if it took part: `began` of its stamps says how many micro-batches these were."""
    within = sorted((s for of in told.values() for s in of if begun_ns < s.t_ns <= ended_ns), key=lambda s: s.t_ns)
    steps = legs.progress(told, ended_ns) - legs.progress(told, begun_ns)
    every = steps * work.SHARDS
    counted = sum(stamp.began for stamp in within) if own_parts else every
    times = [begun_ns, *(stamp.t_ns for stamp in within), ended_ns]
    return Leg(
        seconds=(ended_ns - begun_ns) / 1e9,
        steps=steps,
        samples=max(0, counted) * work.MICRO_BATCH,
        dropped=max(0, every - counted) * work.MICRO_BATCH,
        again=0 if own_parts else _again(within),
        stop_s=max((later - earlier) / 1e9 for earlier, later in pairwise(times)),
        loss=within[-1].loss if within else float("nan"),
    )


def _again(by_time: Sequence[Stamp]) -> int:
    """How many steps were applied after a later one had been: so many were lost, as often as they were."""
    newest, found = -1, set[tuple[int, int]]()
    for stamp in by_time:
        if stamp.step < newest:
            found.add((stamp.group, stamp.step))
        newest = max(newest, stamp.step)
    return len(found)


def storm(driver: Driver, launcher: Launcher, gone: Sequence[Absence], seconds: float, *, own_parts: bool) -> Leg:
    """Let these nodes be taken and given back meanwhile; all are there before, and are started again behind it."""
    driver.steady()
    begun_ns = time.monotonic_ns()
    events = sorted(
        [(one.at_s, MORTAL[one.slot], False) for one in gone]
        + [(one.at_s + one.for_s, MORTAL[one.slot], True) for one in gone]
    )
    there, revived = set(MORTAL), 0
    for at_s, node, back in [*(e for e in events if e[0] < seconds), (seconds, "", True)]:
        while time.monotonic_ns() < begun_ns + at_s * 1e9:
            revived += launcher.revive()
            time.sleep(POLL_S)
        if back and node:
            launcher.start(node)
            there.add(node)
        elif node:
            driver.kill(node)()
            there.discard(node)
    leg = judge(driver.told(), begun_ns, time.monotonic_ns(), own_parts=own_parts)
    for node in set(MORTAL) - there:
        launcher.start(node)
    return replace(leg, taken=sum(not back for at_s, _, back in events if at_s < seconds), revived=revived)


def measure(home: Path, traces: Mapping[str, Sequence[Absence]], seconds: float, peer: Path | None) -> tuple[Legs, int]:
    """One run, and how many steps of this project's job had the losses of a job that nothing happened to. Raises
    RuntimeError if a job ends, TimeoutError if it comes to a stand, AssertionError if a loss differs."""
    found: dict[str, dict[str, Leg]] = {}
    started_by: dict[str, Callable[[Path], AbstractContextManager[Launcher]]] = {
        OURS: lambda home: launchers.elastic(home, None),
        TORCHRUN: launchers.torchrun,
    }
    if peer is not None:
        started_by[TORCHFT] = lambda home: launchers.torchft(home, peer)
    steps = 0
    for name, started in started_by.items():
        found[name] = {}
        with started(home / name) as launcher:
            driver = Driver(launcher, random.Random(0), launcher.revive)
            try:
                for trace, gone in {QUIET: (), **traces}.items():
                    found[name][trace] = leg = measured(driver, launcher, gone, seconds)
                    say(f"{name}, {trace}: {leg}")
                    if name == OURS and len(found[name]) <= 2:
                        losses = by_step(driver.told())
            except (RuntimeError, TimeoutError) as error:
                if name == OURS:
                    raise
                say(f"{name} is left out from here on: {error}")
        if name == OURS:
            steps = alike(home / "alike", losses)
    return found, steps


def measured(driver: Driver, launcher: Launcher, gone: Sequence[Absence], seconds: float) -> Leg:
    """A leg, once all are ready for it."""
    if isinstance(launcher, launchers.Elastic):
        driver.until("all nodes have a standby", launcher.have_standbys)
    return storm(driver, launcher, gone, seconds, own_parts=launcher.name == TORCHFT)


def by_step(told: Mapping[str, Sequence[Stamp]]) -> dict[int, set[float]]:
    """The losses that the workers have written down of each step."""
    losses: dict[int, set[float]] = {}
    for of in told.values():
        for stamp in of:
            losses.setdefault(stamp.step, set()).add(stamp.loss)
    return losses


def alike(home: Path, losses: Mapping[int, set[float]]) -> int:
    """Train the same, with fewer workers and without faults, and count the steps whose losses have the same bits.
    Raises AssertionError if one differs."""
    steps = max(losses, default=-1) + 1
    with contenders.elastic(home, ALIKE_WORKERS) as job:
        job.gate.allow(steps)
        job.until(f"{steps} steps without a fault", lambda: job.latest() + 1 >= steps, ALIKE_WITHIN_S)
        quiet = by_step(job.stamps())
    differ = [step for step in sorted(losses) if losses[step] != quiet[step]]
    assert not differ, f"step {differ[0]}: {losses[differ[0]]}, without a fault {quiet[differ[0]]}"
    return steps


def rows_of(runs: Sequence[Legs]) -> list[Row]:
    """The medians and ranges over the runs."""
    rows = []
    for trace in dict.fromkeys(trace for run in runs for of in run.values() for trace in of):
        for name in dict.fromkeys(name for run in runs for name in run):
            done = [run[name] for run in runs if trace in run.get(name, {})]
            if done:
                rows.append(row_of(name, trace, done))
    return rows


def row_of(name: str, trace: str, runs: Sequence[Mapping[str, Leg]]) -> Row:
    """runs: of one launcher."""
    of = [run[trace] for run in runs]
    words = [
        f"{span(leg.rate for leg in of)} ({len(of)} times)",
        f"{statistics.median(shares(runs, trace)):.2f} of undisturbed",
        f"{of[0].taken} nodes taken",
        f"{span(leg.again for leg in of)} steps again",
        f"{span(leg.dropped for leg in of)} samples dropped",
        f"longest stop {span((leg.stop_s for leg in of), '.1f')} s",
    ]
    if any(leg.revived for leg in of):
        words.append(f"{span(leg.revived for leg in of)} nodes ended by themselves")
    return Row(f"{trace}, {name}: samples/s", f"{statistics.median(leg.rate for leg in of):.0f}", ", ".join(words))


def shares(runs: Sequence[Mapping[str, Leg]], trace: str) -> list[float]:
    """Samples a second under the trace against those of the same launcher in the same run undisturbed."""
    return [run[trace].rate / run[QUIET].rate if run[QUIET].rate else float("nan") for run in runs]


def span(figures: Iterable[float], form: str = ".0f") -> str:
    """The least and the greatest; one if they read the same."""
    ordered = sorted(figures)
    first, last = format(ordered[0], form), format(ordered[-1], form)
    return first if first == last else f"{first} to {last}"


def summary(runs: Sequence[Legs]) -> str:
    """The last line, for scripts: samples a second under each trace against this project's own."""
    words = []
    for trace in dict.fromkeys(trace for run in runs for trace in run[OURS] if trace != QUIET):
        for name in dict.fromkeys(name for run in runs for name in run if name != OURS):
            of = [(run[OURS][trace], run[name][trace]) for run in runs if trace in run[OURS] and trace in run[name]]
            if of:
                ratios = [ours.rate / theirs.rate if theirs.rate else float("inf") for ours, theirs in of]
                words.append(f"{name}:{trace}={statistics.median(ratios):.2f}")
    return "storms: " + " ".join(words)


def notes(seconds: float, speed: float, alike_steps: Sequence[int]) -> list[str]:
    equal = (
        f"elastic-ring's losses of the first {' and '.join(map(str, alike_steps))} steps, under the first trace, have "
        f"the bits of a job of {ALIKE_WORKERS} workers that nothing happened to."
    )
    return [
        *([equal] if alike_steps else []),
        "Every job trains the same MLP of 10.0 million float32 parameters on three nodes of this machine with a worker "
        "each, over the loopback interface. A node that is taken dies by SIGKILL of all its processes; the first node "
        "stays, because torchrun and torchft keep there what their nodes agree on. Processes of a launcher that end by "
        "themselves are started again at once, as by a service manager.",
        f"The traces are those of `elastic chaos`, {speed:g} times faster, the first {seconds:.0f} s of each; two of "
        "the three nodes stand for all machines of a trace, in such a way that each instant with a loss takes a node, "
        "if one is there. A leg begins when all nodes train, with elastic-ring also when each has its standby.",
        "Samples count once: with torchrun steps that are done again after a checkpoint (one each 10 steps) do not "
        "count, with torchft the samples of a replica that a step was committed without do not: they are dropped.",
        f"torchft is the nightly 2026.10.26. Its waits are short: {SILENT_MS / 1000:g} s for a heartbeat, "
        f"{JOIN_MS / 1000:g} s for stragglers. Those of torchrun are set to 1 s, too.",
        "Undisturbed, elastic-ring makes fewer steps here than the others: to sum eight micro-batches in an order that "
        "does not depend on the workers takes a quarter more CPU time a step, in a model that computes little and "
        "sends much.",
        "All nodes share the cores of one machine. Two workers use two cores as fully as three, so a taken node costs "
        "little of the machine's speed: the shares can be above what separate machines would have, alike for all.",
    ]


@dataclass(frozen=True, slots=True)
class Records:
    """What FILE holds. about: machine and date of the last run. alike: steps with equal losses, by run."""

    about: dict[str, str]
    minutes: float
    speed: float
    runs: list[Legs]
    alike: list[int]

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Records:
        held = json.loads(path.read_text(encoding="utf-8"))
        runs = [
            {name: {trace: Leg(**leg) for trace, leg in of.items()} for name, of in run.items()} for run in held["runs"]
        ]
        return cls(**{**held, "runs": runs})


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if not options.small:
        report.around_section(report.DOCUMENT, BENCH.markers)
    exit_on_signals()
    seconds = options.minutes * 60
    traces = {name: planned(name, options.speed, seconds) for name in options.traces.split(",")}
    records = Records({}, options.minutes, options.speed, [], [])
    if options.further:
        records = Records.read(options.json)
        if (records.minutes, records.speed) != (options.minutes, options.speed):
            raise SystemExit(
                f"{options.json} has runs of --minutes {records.minutes:g} --speed {records.speed:g}: say the same"
            )
    for _ in range(options.runs):
        with tempfile.TemporaryDirectory(prefix="elastic-bench-", ignore_cleanup_errors=True) as directory:
            found, equal = measure(Path(directory), traces, seconds, options.peer)
        records = replace(records, about=report.machine(), runs=[*records.runs, found], alike=[*records.alike, equal])
        records.write(options.json)
    rows = rows_of(records.runs)
    if not options.small:
        command = f"python -m tests.bench.storms --minutes {options.minutes:g} --runs {len(records.runs)}"
        text = report.section(command, records.about, rows, notes(seconds, options.speed, records.alike))
        report.write_section(report.DOCUMENT, text, BENCH.markers)
    print(report.table(rows))
    print(summary(records.runs), flush=True)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = BENCH.parser("20 s of each")
    parser.add_argument("--traces", default=",".join(TRACES), help="of `elastic chaos list` (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=1.0, help="of each leg (default %(default)s)")
    parser.add_argument("--speed", type=float, default=60.0, help="of the traces (default %(default)s)")
    parser.add_argument("--runs", type=int, default=1, help="(default %(default)s)")
    parser.add_argument("--further", action="store_true", help="count also the runs that the file of --json has")
    parser.add_argument("--peer", type=Path, metavar="DIR", help="a directory in which torchft is installed")
    options = parser.parse_args(arguments)
    if options.small:
        options.minutes = 1 / 3
    return options


if __name__ == "__main__":
    sys.exit(main())
