"""Measures what is left of a training while nodes come and go as a spot market has taken and given them: this project,
torchft and torchrun, one after the other.

    python -m tests.bench.storms [--traces bamboo-p3,bamboo-g4dn] [--minutes 2] [--speed 60] [--peer DIR] [--json FILE]

Three nodes train, undisturbed and then under each trace. A node that is taken dies with all its processes at one
instant, and is started again when the trace gives it back. --peer: where torchft is installed; without that option it
is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path

from chaos_tests.cluster import Network, why_not
from chaos_tests.run.request import trace_path
from chaos_tests.scenario.traces import Absence, absences, divided, read_trace
from chaos_tests.support.processes import exit_on_sigterm
from tests.bench import contenders, legs, node_deaths, report, work
from tests.bench.node_deaths import MORTAL, NODES, Commands, Driver, Launcher
from tests.bench.recovery import say
from tests.bench.report import Row
from tests.bench.stamps import Stamp
from tests.bench.turnstile import OPEN, Gate

DOCUMENT = contenders.ROOT / "docs" / "performance.md"
MARKERS = ("<!-- bench-storms:begin -->", "<!-- bench-storms:end -->")
JSON_FILE = contenders.ROOT / "build" / "bench" / "storms.json"

OURS, TORCHFT, TORCHRUN = "elastic-ring", "torchft", "torchrun"
TRACES = ("bamboo-p3", "bamboo-g4dn")
QUIET = "quiet"
POLL_S = 0.02
TICK_MS, JOIN_MS, SILENT_MS = 100, 1000, 1000
"""torchft's lighthouse: how often it looks, waits for stragglers, and for the heartbeat of a replica that is dead."""


@dataclass(frozen=True, slots=True)
class Leg:
    """steps: by which the training advanced. samples: that are in them, each counted once. dropped: samples of these
    steps that were left out. again: steps that were done a second time. stop_s: the longest time without a step.
    loss: of the last step. taken: how many nodes were."""

    seconds: float
    steps: int
    samples: int
    dropped: int
    again: int
    stop_s: float
    loss: float
    taken: int = 0


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
    there = set(MORTAL)
    for at_s, node, back in [*(e for e in events if e[0] < seconds), (seconds, "", True)]:
        while time.monotonic_ns() < begun_ns + at_s * 1e9:
            launcher.check()
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
    return replace(leg, taken=sum(not back for at_s, _, back in events if at_s < seconds))


class Torchft(Commands):
    """torchft's lighthouse, and a replica group of one process on each node. Whatever they wait for is set short."""

    name = TORCHFT

    def __init__(self, home: Path, gate: Gate, peer: Path) -> None:
        super().__init__(home, gate)
        self._environment = {
            "PYTHONPATH": os.pathsep.join(map(str, (contenders.ROOT, peer))),
            "OMP_NUM_THREADS": "1",
            "BENCH_GATE": str(gate.path),
            "BENCH_STAMPS": str(self.directory),
            "BENCH_NODES": ",".join(NODES),
            "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{self._port}",
        }
        waits = (f"--quorum_tick_ms={TICK_MS}", f"--join_timeout_ms={JOIN_MS}", f"--heartbeat_timeout_ms={SILENT_MS}")
        lighthouse = (str(peer / "bin" / "torchft_lighthouse"), "--min_replicas=1", f"--bind=127.0.0.1:{self._port}")
        self._run("the lighthouse", [sys.executable, *lighthouse, *waits], self._environment)

    def start(self, node: str) -> None:
        program = str(contenders.SCRIPTS / "train_torchft.py")
        self._run(node, [sys.executable, program], {**self._environment, "BENCH_NODE": node})


@contextmanager
def torchft(home: Path, peer: Path) -> Iterator[Torchft]:
    (home / "stamps").mkdir(parents=True)
    with closing(Gate(home / "gate")) as gate:
        gate.allow(OPEN)
        with closing(Torchft(home, gate, peer)) as job:
            for node in NODES:
                job.start(node)
            yield job


def measure(
    home: Path, traces: Mapping[str, Sequence[Absence]], seconds: float, peer: Path | None
) -> dict[str, dict[str, Leg]]:
    """Launcher -> QUIET or a trace -> what was left. Raises RuntimeError if a job ends, TimeoutError if it comes to a
    stand."""
    found: dict[str, dict[str, Leg]] = {}
    with ExitStack() as outer:
        network = None if why_not() else outer.enter_context(Network())
        launchers: dict[str, Callable[[Path], AbstractContextManager[Launcher]]] = {
            OURS: lambda home: node_deaths.elastic(home, network),
            TORCHRUN: node_deaths.torchrun,
        }
        if peer is not None:
            launchers[TORCHFT] = lambda home: torchft(home, peer)
        for name, started in launchers.items():
            found[name] = {}
            with started(home / name) as launcher:
                driver = Driver(launcher, random.Random(0))
                for trace, gone in {QUIET: (), **traces}.items():
                    found[name][trace] = leg = storm(driver, launcher, gone, seconds, own_parts=name == TORCHFT)
                    say(f"{name}, {trace}: {leg}")
    return found


def rows_of(found: Mapping[str, Mapping[str, Leg]]) -> list[Row]:
    rows = []
    for trace in next(iter(found.values())):
        for name, of in found.items():
            leg, quiet = of[trace], of[QUIET]
            share = leg.samples / leg.seconds / (quiet.samples / quiet.seconds) if quiet.samples else float("nan")
            rest = ", ".join(
                (
                    f"{leg.samples / leg.seconds:.0f}/s",
                    f"{leg.taken} nodes taken",
                    f"{leg.again} steps again",
                    f"{leg.dropped} samples dropped",
                    f"longest stop {leg.stop_s:.1f} s",
                    f"loss {leg.loss:.3f}",
                )
            )
            rows.append(Row(f"{trace}, {name}: samples / undisturbed", f"{share:.2f}", rest))
    return rows


def summary(found: Mapping[str, Mapping[str, Leg]]) -> str:
    """The last line, for scripts: samples under each trace against those of the same launcher undisturbed."""
    words = [
        f"{name}:{trace}={leg.samples / leg.seconds / (of[QUIET].samples / of[QUIET].seconds):.2f}"
        for name, of in found.items()
        for trace, leg in of.items()
        if trace != QUIET
    ]
    return "storms: " + " ".join(words)


def notes(seconds: float, speed: float) -> list[str]:
    return [
        "Every job trains the same MLP of 10.0 million float32 parameters on three nodes of this machine with a worker "
        "each. A node that is taken dies by SIGKILL of all its processes; the first node stays, because torchrun and "
        "torchft keep there what their nodes agree on.",
        f"The traces are those of `elastic chaos`, {speed:g} times faster, the first {seconds:.0f} s of each; two of "
        "the three nodes stand for all machines of a trace, in such a way that each instant with a loss takes a node, "
        "if one is there.",
        "Samples count once: with torchrun steps that are done again after a checkpoint (one each 10 steps) do not "
        "count, with torchft the samples of a replica that a step was committed without do not: they are dropped.",
        f"torchft is the nightly 2026.10.26. Its waits are short: {SILENT_MS / 1000:g} s for a heartbeat, "
        f"{JOIN_MS / 1000:g} s for stragglers. Those of torchrun are set to 1 s, too.",
        "The nodes of elastic-ring are hosts of their own, in network namespaces, where that is possible: their bytes "
        "go through virtual cables. Those of torchrun and torchft use the loopback interface, which costs less.",
        "All nodes share the cores of one machine. Two workers use two cores as fully as three, so a taken node costs "
        "little of the machine's speed: the shares can be above what separate machines would have, alike for all.",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if not options.small:
        report.around_section(DOCUMENT, MARKERS)
    exit_on_sigterm()
    seconds = options.minutes * 60
    traces = {name: planned(name, options.speed, seconds) for name in options.traces.split(",")}
    with tempfile.TemporaryDirectory(prefix="elastic-bench-", ignore_cleanup_errors=True) as directory:
        found = measure(Path(directory), traces, seconds, options.peer)
    about, rows = report.machine(), rows_of(found)
    figures = {
        "machine": about,
        "measured": {name: {trace: asdict(leg) for trace, leg in of.items()} for name, of in found.items()},
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if not options.small:
        command = f"python -m tests.bench.storms --traces {options.traces} --minutes {options.minutes:g}"
        report.write_section(DOCUMENT, report.section(command, about, rows, notes(seconds, options.speed)), MARKERS)
    print(report.table(rows))
    print(summary(found), flush=True)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.storms")
    parser.add_argument("--traces", default=",".join(TRACES), help="of `elastic chaos list` (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=2.0, help="of each leg (default %(default)s)")
    parser.add_argument("--speed", type=float, default=60.0, help="of the traces (default %(default)s)")
    parser.add_argument("--peer", type=Path, metavar="DIR", help="a directory in which torchft is installed")
    parser.add_argument("--small", action="store_true", help="20 s of each; docs/performance.md stays as it is")
    parser.add_argument("--json", type=Path, default=JSON_FILE, help="where all figures go")
    options = parser.parse_args(arguments)
    if options.small:
        options.minutes = 1 / 3
    return options


if __name__ == "__main__":
    sys.exit(main())
