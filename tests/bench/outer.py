"""Measures what is left of a training with rare communication while its workers are killed, behind narrow cables: this
project's DiLoCo with a quorum, and torchft's DiLoCo.

    python -m tests.bench.outer [--minutes 45] [--faults 64] [--quiet-minutes 5] [--seeds 3] [--launchers a,b]
                                [--peer DIR] [--runs 1] [--further] [--small] [--json FILE]

Three nodes train behind cables of 10 Mbit/s with 20 ms, undisturbed and then under a storm: at drawn moments the worker
of a drawn node is killed, the same ones for each launcher. This project's job then trains to its end, and is compared
with jobs of as many rounds that nothing happens to. Exit code 1 if the storm has stopped it, if another worker was
given up than those that were killed, if its loss came back to that of fresh weights, or if its workers differ.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

from chaos_tests.cluster import Network, Roughness
from chaos_tests.support.processes import exit_on_sigterm, kill_if_there
from tests.bench import contenders, launchers, outer_work, report, stamps
from tests.bench.launchers import NODES, OURS, TORCHFT, Launcher
from tests.bench.node_deaths import Driver
from tests.bench.outer_work import End
from tests.bench.recovery import say
from tests.bench.report import Row, target
from tests.bench.stamps import Stamp
from tests.bench.storms import span

DOCUMENT = contenders.ROOT / "docs" / "performance.md"
MARKERS = ("<!-- bench-outer:begin -->", "<!-- bench-outer:end -->")
JSON_FILE = contenders.ROOT / "build" / "bench" / "outer.json"

QUIET, STORM = "undisturbed", "storm"
CABLE_KBIT_S, CABLE = 10_000, Roughness(delay_s=0.02)
PACE_S = 0.1
"""Of an inner step: as long as one that computes more would take."""
WAIT_S, END_S, POLL_S = 180.0, 3600.0, 0.05
LEARNT_ROUNDS = 50
"""After so many rounds a loss is far below that of fresh weights."""


@dataclass(frozen=True, slots=True)
class Leg:
    """rounds: outer steps. samples: sequences whose inner steps are in them. dropped: of the others that were computed.
    stop_s: the longest time without an outer step. faults: workers that were killed."""

    seconds: float
    rounds: int
    samples: int
    dropped: int
    stop_s: float
    faults: int = 0

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.samples / self.seconds


@dataclass(frozen=True, slots=True)
class Found:
    """Of one run. legs: launcher -> QUIET or STORM -> what was left. end: of this project's job behind the storm, None:
    it was not measured. quiet: of jobs of as many rounds, by seed, the first one the storm's."""

    legs: dict[str, dict[str, Leg]]
    end: End | None
    quiet: list[End]


Started: TypeAlias = Callable[[Path, Network, Mapping[str, str]], AbstractContextManager[Launcher]]


def judge(
    told: Mapping[str, Sequence[Stamp]], computed: int, begun_ns: int, ended_ns: int, *, own_parts: bool
) -> Leg:
    """What was achieved in that time. computed: inner steps that all workers have made in it. own_parts: `began` of a
    stamp counts the inner steps of its process; otherwise those of all, and each process has a stamp of each round."""
    first: dict[int, Stamp] = {}
    for stamp in sorted((stamp for of in told.values() for stamp in of), key=lambda stamp: stamp.t_ns):
        first.setdefault(stamp.step, stamp)
    within = [stamp for stamp in first.values() if begun_ns < stamp.t_ns <= ended_ns]
    rounds = {stamp.step for stamp in within}
    counting = [stamp for of in told.values() for stamp in of if stamp.step in rounds] if own_parts else within
    counted = sum(stamp.began for stamp in counting)
    times = [begun_ns, *(stamp.t_ns for stamp in within), ended_ns]
    return Leg(
        seconds=(ended_ns - begun_ns) / 1e9,
        rounds=len(within),
        samples=counted * outer_work.SEQUENCES,
        dropped=max(0, computed - counted) * outer_work.SEQUENCES,
        stop_s=max((later - earlier) / 1e9 for earlier, later in pairwise(times)),
    )


def moments(faults: int, seconds: float, dice: random.Random) -> list[tuple[float, str]]:
    """When, after how many seconds, the worker of which node is killed: one in each of as many equal stretches."""
    stretch = seconds / max(1, faults)
    return [((number + dice.uniform(0.1, 0.9)) * stretch, dice.choice(NODES)) for number in range(faults)]


def fell_back(told: Mapping[str, Sequence[Stamp]]) -> int | None:
    """The first round of a model that has learnt whose loss is nearer to that of the first round than to the least."""
    by_round = {stamp.step: stamp.loss for of in told.values() for stamp in of}
    losses = [by_round[number] for number in sorted(by_round)]
    for number in range(LEARNT_ROUNDS, len(losses)):
        if losses[number] > (losses[0] + min(losses[:number])) / 2:
            return number
    return None


def leg(driver: Driver, launcher: Launcher, planned: Sequence[tuple[float, str]], seconds: float) -> tuple[Leg, set[str]]:
    """All train together, and then these workers are killed; and who these were. One that is not there at its moment is
    killed when it is. Raises RuntimeError if a job ends."""
    driver.steady()
    computed, begun_ns = made(launcher.directory), time.monotonic_ns()
    killed = set[str]()
    for at_s, node in [*planned, (seconds, "")]:
        while time.monotonic_ns() < begun_ns + at_s * 1e9:
            launcher.revive()
            time.sleep(POLL_S)
        if node:
            name, pid = next(iter(await_workers(driver, launcher, node).items()))
            kill_if_there(pid)
            killed.add(name)
            say(f"{launcher.name}: {name} is killed after {at_s:.0f} s")
    ended_ns = time.monotonic_ns()
    found = judge(
        driver.told(), made(launcher.directory) - computed, begun_ns, ended_ns, own_parts=launcher.name == TORCHFT
    )
    return replace(found, faults=len(killed)), killed


def await_workers(driver: Driver, launcher: Launcher, node: str) -> dict[str, int]:
    """The pids of the node's workers, once it has one."""
    found: dict[str, int] = {}

    def there() -> bool:
        launcher.revive()
        found.update(driver.workers_below(launcher.root(node)))
        return bool(found)

    driver.until(f"a worker of {node}", there)
    return found


def made(directory: Path) -> int:
    """Inner steps that were computed so far."""
    return sum(map(len, stamps.read_shards(directory).values()))


def elastic(home: Path, network: Network | None, environment: Mapping[str, str]) -> AbstractContextManager[Launcher]:
    return launchers.elastic(home, network, "train_outer.py", environment)


def torchft(peer: Path) -> Started:
    def started(home: Path, network: Network, environment: Mapping[str, str]) -> AbstractContextManager[Launcher]:
        return launchers.torchft(home, peer, network, "train_torchft_outer.py", environment)

    return started


@dataclass(frozen=True, slots=True)
class Plan:
    """seconds: of the storm with so many faults. rounds: of this project's job. seeds: how many quiet jobs."""

    seconds: float
    faults: int
    quiet_s: float
    seeds: int
    rounds: int


def measure(home: Path, launcher: str, started: Started, plan: Plan) -> tuple[dict[str, Leg], End | None]:
    """Both legs, and with this project the end of the job. Raises AssertionError where a storm has harmed it,
    RuntimeError if a job ends, TimeoutError if it comes to a stand."""
    home.mkdir()
    pace = home / "pace"
    pace.write_text(str(PACE_S))
    environment = {"BENCH_PACE": str(pace), "BENCH_SEED": "1", "BENCH_ROUNDS": str(plan.rounds)}
    with Network() as network:
        for node in NODES:
            network.add(node)
            network.narrow(node, CABLE_KBIT_S)
            network.roughen(node, CABLE)
        with started(home / "job", network, environment) as job:
            driver = Driver(job, random.Random(0), job.revive)
            quiet, _ = leg(driver, job, (), plan.quiet_s)
            say(f"{launcher}, {QUIET}: {quiet}")
            planned = moments(plan.faults, plan.seconds, random.Random(49))
            storm, killed = leg(driver, job, planned, plan.seconds)
            say(f"{launcher}, {STORM}: {storm}")
            end = None
            if isinstance(job, launchers.Elastic):
                set_pace(pace, 0.0)
                end = finish(job, plan.rounds)
                unharmed(job, killed)
    return {QUIET: quiet, STORM: storm}, end


def set_pace(pace: Path, seconds: float) -> None:
    temporary = pace.with_suffix(".tmp")
    temporary.write_text(str(seconds))
    temporary.rename(pace)


def finish(job: launchers.Elastic, rounds: int) -> End:
    """What the job has come to. Raises AssertionError if its workers differ, or it has failed."""
    deadline_s = time.monotonic() + END_S
    while not (over := [line for line in job.cluster.journal() if line["event"] == "job_over"]):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the job does not end within {END_S:g} s")
        time.sleep(1.0)  # files of other processes: there is nothing to wait on
    assert over[0]["exit_code"] == 0, over[0]["because"]
    ends = outer_work.ends(job.directory)
    assert ends and set(ends) == {ends[0]} and ends[0].rounds == rounds, f"workers came to different ends: {ends}"
    return ends[0]


def unharmed(job: launchers.Elastic, killed: set[str]) -> None:
    """Raises AssertionError if somebody else was lost, a copy of the state was, or fresh weights were taken for it."""
    journal = job.cluster.journal()
    lost = {line["worker_id"] for line in journal if line["event"] == "member_lost"}
    assert lost <= killed, f"given up, but not killed: {sorted(lost - killed)}"
    gone = [line for line in journal if line["event"] == "state_lost"]
    assert not gone, gone
    back = fell_back(stamps.read(job.directory))
    assert back is None, f"round {back} has a loss as of fresh weights"


def undisturbed(home: Path, seed: int, rounds: int) -> End:
    """A job of as many rounds on this machine, as fast as it can."""
    home.mkdir()
    pace = home / "pace"
    pace.write_text("0")
    environment = {"BENCH_PACE": str(pace), "BENCH_SEED": str(seed), "BENCH_ROUNDS": str(rounds)}
    with launchers.elastic(home / "job", None, "train_outer.py", environment) as job:
        return finish(job, rounds)


def rows_of(runs: Sequence[Found]) -> list[Row]:
    rows = []
    names = dict.fromkeys(name for run in runs for name in run.legs)
    for which in (QUIET, STORM):
        for name in names:
            of = [run.legs[name] for run in runs if name in run.legs]
            rows.append(row_of(name, which, of))
    for run in runs:
        if run.end is not None and run.quiet:
            rows.append(loss_row(run.end, run.quiet))
    return rows


def row_of(name: str, which: str, runs: Sequence[Mapping[str, Leg]]) -> Row:
    """runs: of one launcher."""
    of = [run[which] for run in runs]
    rates = sorted(one.rate for one in of)
    words = [
        f"{span((one.rate for one in of), '.1f')} ({len(of)} times)",
        *([f"{span((run[which].rate / run[QUIET].rate for run in runs), '.2f')} of undisturbed"] if which != QUIET else []),
        f"{span(one.faults for one in of)} killed",
        f"{span(one.rounds for one in of)} rounds in {of[0].seconds:.0f} s",
        f"{span(one.dropped for one in of)} samples dropped",
        f"longest time without a round {span((one.stop_s for one in of), '.1f')} s",
    ]
    return Row(f"{which}, {name}: samples/s", f"{rates[len(rates) // 2]:.1f}", ", ".join(words))


def loss_row(end: End, quiet: Sequence[End]) -> Row:
    losses = [one.loss for one in quiet]
    return Row(
        f"held-out loss after {end.rounds} rounds, {OURS}",
        f"{end.loss:.4f}",
        f"{span(losses, '.4f')} in {len(quiet)} quiet jobs with other seeds",
        target(end.loss <= max(losses), "not above all quiet jobs"),
    )


def notes() -> list[str]:
    step = outer_work.INNER_STEPS
    return [
        "Every job trains the same GPT of 0.14 million float32 parameters on three nodes with a worker each: network "
        f"namespaces of this machine behind cables of {CABLE_KBIT_S / 1000:g} Mbit/s with "
        f"{CABLE.delay_s * 1000:g} ms in each direction. Replicas make {step} inner steps of "
        f"{outer_work.SEQUENCES} sequences each, and then an outer step. An inner step is made to take {PACE_S:g} s, so "
        "that the cores of one machine do.",
        "Whose worker is killed when was drawn once, and is the same for all. Whoever is killed is started again at "
        "once: by this project's agent, and torchft's by the bench, without a wait. The lighthouse of torchft is "
        "behind no cable, and nobody kills it; so are etcd and the rendezvous here.",
        "Samples are those of inner steps that are in an outer step; dropped are all others that were computed: of the "
        "dead, of rounds that were given up, and of a torchft process that starts, and trains fresh weights until its "
        "first synchronisation.",
        "elastic-ring: `.with_quorum(2, grace_s=1)`. torchft: the nightly 2026.10.26, `local_sgd.DiLoCo`, "
        f"min_replica_size=1, {launchers.SILENT_MS / 1000:g} s for a heartbeat, {launchers.JOIN_MS / 1000:g} s for "
        "stragglers. The inner and the outer optimizer are the same: AdamW, and SGD 0.7 with Nesterov momentum 0.9.",
    ]


@dataclass(frozen=True, slots=True)
class Records:
    """What FILE holds. about: machine and date of the last run."""

    about: dict[str, str]
    command: str
    runs: list[Found]

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Records:
        held = json.loads(path.read_text(encoding="utf-8"))
        return cls(held["about"], held["command"], [found_of(run) for run in held["runs"]])


def found_of(run: Mapping[str, dict[str, dict[str, object]]]) -> Found:
    """As it is written."""
    legs = {name: {which: Leg(**one) for which, one in of.items()} for name, of in run["legs"].items()}  # type: ignore[arg-type]
    return Found(legs, None if run["end"] is None else End(**run["end"]), [End(**one) for one in run["quiet"]])  # type: ignore[arg-type]


def measured(home: Path, names: Sequence[str], peer: Path | None, plan: Plan) -> Found:
    """One run."""
    legs, end = dict[str, dict[str, Leg]](), None
    for name in names:
        if name == TORCHFT and peer is None:
            continue
        started = elastic if peer is None or name == OURS else torchft(peer)
        legs[name], ended = measure(home / name, name, started, plan)
        end = ended or end
    quiet = []
    for seed in range(1, plan.seeds + 1) if end is not None else ():
        quiet.append(undisturbed(home / f"seed-{seed}", seed, plan.rounds))
        say(f"quiet, seed {seed}: {quiet[-1]}; behind the storm: {end}")
    return Found(legs, end, quiet)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if not options.small:
        report.around_section(DOCUMENT, MARKERS)
    exit_on_sigterm()
    seconds, quiet_s = options.minutes * 60, options.quiet_minutes * 60
    round_s = PACE_S * outer_work.INNER_STEPS
    # None of the legs can have more rounds than this, and a leg begins when all have made some together.
    rounds = int((seconds + quiet_s + WAIT_S) / round_s)
    plan = Plan(seconds, options.faults, quiet_s, options.seeds, rounds)
    records = Records.read(options.json) if options.further else Records({}, "", [])
    command = f"python -m tests.bench.outer --minutes {options.minutes:g} --faults {options.faults}"
    for _ in range(options.runs):
        with tempfile.TemporaryDirectory(prefix="elastic-bench-", ignore_cleanup_errors=True) as directory:
            found = measured(Path(directory), options.launchers.split(","), options.peer, plan)
        records = Records(report.machine(), command, [*records.runs, found])
        records.write(options.json)
    rows = rows_of(records.runs)
    if not options.small:
        text = report.section(records.command, records.about, rows, notes())
        report.write_section(DOCUMENT, text, MARKERS)
    print(report.table(rows), flush=True)
    return 1 if report.missed(rows) else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.outer")
    parser.add_argument("--minutes", type=float, default=45.0, help="of the storm (default %(default)s)")
    parser.add_argument("--faults", type=int, default=64, help="in it (default %(default)s)")
    parser.add_argument("--quiet-minutes", type=float, default=5.0, help="before it (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="of quiet jobs (default %(default)s)")
    parser.add_argument("--launchers", default=f"{OURS},{TORCHFT}", help="(default %(default)s)")
    parser.add_argument("--peer", type=Path, metavar="DIR", help="a directory in which torchft is installed")
    parser.add_argument("--runs", type=int, default=1, help="(default %(default)s)")
    parser.add_argument("--further", action="store_true", help="count also the runs that the file of --json has")
    parser.add_argument("--small", action="store_true", help="two minutes; docs/performance.md stays as it is")
    parser.add_argument("--json", type=Path, default=JSON_FILE, help="where all figures go")
    options = parser.parse_args(arguments)
    if options.small:
        options.minutes, options.faults, options.quiet_minutes, options.seeds = 1.0, 2, 0.5, 1
    return options


if __name__ == "__main__":
    sys.exit(main())
