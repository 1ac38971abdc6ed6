"""Measures what is left of a training with rare communication while its workers are killed, behind narrow cables: this
project's DiLoCo with a quorum, and torchft's DiLoCo.

    python -m tests.bench.outer [--minutes 45] [--faults 64] [--quiet-minutes 5] [--seeds 3] [--launchers a,b]
                                [--peer DIR] [--runs 1] [--further] [--small] [--json FILE]

Three nodes train behind cables of 10 Mbit/s with 20 ms, undisturbed and then under a storm: at drawn moments the worker
of a drawn node is killed, the same ones for each launcher. Undisturbed, this project's job is also measured with a
delay, so that its transfers overlap with inner steps. The loss of this project's job is compared with those of
jobs of as many rounds that nothing happens to. Exit code 1 if the storm has stopped it, if another worker was
given up than those that were killed, if its loss came back to that of fresh weights, or if its workers differ.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

from chaos_tests.cluster import Network, Roughness
from chaos_tests.support.processes import exit_on_signals, kill_if_there
from tests.bench import contenders, launchers, outer_work, report, stamps
from tests.bench.launchers import NODES, OURS, TORCHFT, Launcher
from tests.bench.node_deaths import Driver
from tests.bench.outer_work import Mark
from tests.bench.recovery import say
from tests.bench.report import Bench, Row, target
from tests.bench.stamps import Stamp
from tests.bench.storms import span

BENCH = Bench("outer")

QUIET, STORM = "undisturbed", "storm"
DELAY = 10
DELAYED = f"{OURS} with delay={DELAY}"
"""A name among the launchers: differences leave so many inner steps before the end of a round."""
CABLE_KBIT_S, CABLE = 10_000, Roughness(delay_s=0.02)
PACE_S = 0.1
"""Of an inner step: as long as one that computes more would take."""
QUORUM = 2
QUIET_S, POLL_S = 7200.0, 0.05
"""QUIET_S: the longest time for a job that nothing happens to."""
LEARNT_ROUNDS = 50
"""After so many rounds a loss is far below that of fresh weights."""


@dataclass(frozen=True, slots=True)
class Leg:
    """rounds: outer steps, without those of a training that began anew until it was as far as before. samples:
    sequences whose inner steps are in them. dropped: of the others that were computed. stop_s: the longest time
    without any outer step. faults: workers that were killed."""

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
    """Of one run. legs: launcher -> QUIET or STORM -> what was left; with DELAYED there is no STORM. stormy: of this
    project's job, by rounds; empty: it was not measured. quiet: the same of jobs that nothing happened to, each with
    another seed."""

    legs: dict[str, dict[str, Leg]]
    stormy: list[Mark]
    quiet: list[list[Mark]]


Started: TypeAlias = Callable[[Path, Network, Mapping[str, str]], AbstractContextManager[Launcher]]


def judge(told: Mapping[str, Sequence[Stamp]], computed: int, begun_ns: int, ended_ns: int, *, own_parts: bool) -> Leg:
    """What was achieved in that time. computed: inner steps that all workers have made in it. own_parts: `began` of a
    stamp counts the inner steps of its process; otherwise those of all, and each process has a stamp of each round."""
    first: dict[int, Stamp] = {}
    for stamp in sorted((stamp for of in told.values() for stamp in of), key=lambda stamp: stamp.t_ns):
        first.setdefault(stamp.step, stamp)
    within = [stamp for stamp in first.values() if begun_ns < stamp.t_ns <= ended_ns]
    rounds = {stamp.step for stamp in within}
    counting = [stamp for of in told.values() for stamp in _not_again(of, first)] if own_parts else within
    counting = [stamp for stamp in counting if stamp.step in rounds]
    counted = sum(stamp.began for stamp in counting)
    stamped = sorted(stamp.t_ns for of in told.values() for stamp in of if begun_ns < stamp.t_ns <= ended_ns)
    times = [begun_ns, *stamped, ended_ns]
    return Leg(
        seconds=(ended_ns - begun_ns) / 1e9,
        rounds=len(within),
        samples=counted * outer_work.SEQUENCES,
        dropped=max(0, computed - counted) * outer_work.SEQUENCES,
        stop_s=max((later - earlier) / 1e9 for earlier, later in pairwise(times)),
    )


def _not_again(of: Sequence[Stamp], first: Mapping[int, Stamp]) -> Iterator[Stamp]:
    """The stamps of a process, without those of rounds that it makes again: from a round on that comes behind the next
    one, as others made it, until a round that nobody has made before."""
    again = False
    for stamp in of:
        again = stamp is not first[stamp.step] and (again or stamp.t_ns > first.get(stamp.step + 1, stamp).t_ns)
        if not again:
            yield stamp


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


def leg(
    driver: Driver, launcher: Launcher, planned: Sequence[tuple[float, str]], seconds: float
) -> tuple[Leg, set[str]]:
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
            name, pid = await_worker(driver, launcher, node, killed)
            kill_if_there(pid)
            killed.add(name)
            say(f"{launcher.name}: {name} is killed after {at_s:.0f} s")
    ended_ns = time.monotonic_ns()
    found = judge(
        driver.told(), made(launcher.directory) - computed, begun_ns, ended_ns, own_parts=launcher.name == TORCHFT
    )
    return replace(found, faults=len(killed)), killed


def await_worker(driver: Driver, launcher: Launcher, node: str, killed: Container[str]) -> tuple[str, int]:
    """The node's worker, once it has one that was not killed: its name and pid."""
    found: dict[str, int] = {}

    def there() -> bool:
        launcher.revive()
        here = driver.workers_below(launcher.root(node))
        found.update({name: pid for name, pid in here.items() if name not in killed})
        return bool(found)

    driver.until(f"a worker of {node}", there)
    return found.popitem()


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
    """seconds: of the storm with so many faults. quiet_s: before it. seeds: how many quiet jobs."""

    seconds: float
    faults: int
    quiet_s: float
    seeds: int


def measure(home: Path, launcher: str, started: Started, plan: Plan) -> tuple[dict[str, Leg], list[Mark]]:
    """The legs, and with this project what the job has come to in a storm. Raises AssertionError where the storm has
    harmed it, RuntimeError if a job ends, TimeoutError if it comes to a stand."""
    home.mkdir()
    pace = home / "pace"
    pace.write_text(str(PACE_S))
    delay = DELAY if launcher == DELAYED else 0
    environment = environment_of(pace, quorum=QUORUM, delay=delay)
    with Network() as network:
        for node in NODES:
            network.add(node)
            network.narrow(node, CABLE_KBIT_S)
            network.roughen(node, CABLE)
        with started(home / "job", network, environment) as job:
            driver = Driver(job, random.Random(0), job.revive)
            quiet, _ = leg(driver, job, (), plan.quiet_s)
            say(f"{launcher}, {QUIET}: {quiet}")
            if delay:
                return {QUIET: quiet}, []
            planned = moments(plan.faults, plan.seconds, random.Random(49))
            storm, killed = leg(driver, job, planned, plan.seconds)
            say(f"{launcher}, {STORM}: {storm}")
            marks = list[Mark]()
            if isinstance(job, launchers.Elastic):
                driver.until("all workers have noted what they have", lambda: all_noted(driver, job))
                marks = agreed(outer_work.marks(job.directory))
                say(f"{launcher}, behind the storm: {marks[-1]}")
                unharmed(job, killed)
    return {QUIET: quiet, STORM: storm}, marks


def environment_of(pace: Path, *, quorum: int, seed: int = 1, delay: int = 0) -> dict[str, str]:
    """Of the workers: see outer_work.py and scripts/train_outer.py."""
    numbers = {"BENCH_SEED": seed, "BENCH_QUORUM": quorum, "BENCH_DELAY": delay}
    return {"BENCH_PACE": str(pace), **{name: str(number) for name, number in numbers.items()}}


def all_noted(driver: Driver, job: launchers.Elastic) -> bool:
    """Whether all workers of three nodes have noted a state that is newer than their youngest."""
    youngest = max(of[0].step for of in driver.told().values() if of)
    noted = outer_work.marks(job.directory)
    return any(rounds > youngest and len(of) == len(NODES) for rounds, of in noted.items())


def agreed(marks: Mapping[int, Sequence[Mark]]) -> list[Mark]:
    """One after each number of rounds. Raises AssertionError if workers differ."""
    for rounds, of in marks.items():
        assert len(set(of)) == 1, f"after {rounds} rounds workers have different states: {of}"
    return [of[0] for of in marks.values()]


def unharmed(job: launchers.Elastic, killed: set[str]) -> None:
    """Raises AssertionError if somebody else was lost, a copy of the state was, or fresh weights were taken for it."""
    journal = job.cluster.journal()
    lost = {line["worker_id"] for line in journal if line["event"] == "member_lost"}
    assert lost <= killed, f"given up, but not killed: {sorted(lost - killed)}"
    gone = [line for line in journal if line["event"] == "state_lost"]
    assert not gone, gone
    back = fell_back(stamps.read(job.directory))
    assert back is None, f"round {back} has a loss as of fresh weights"


def undisturbed(home: Path, seeds: int, rounds: int) -> Iterator[tuple[int, list[Mark]]]:
    """Each seed and what a job of as many rounds comes to with it, without a quorum and a fault: so one worker has the
    bits of three. All at once, as their speed is not measured."""
    pace = home / "pace"
    pace.write_text("0")
    command = [sys.executable, str(contenders.SCRIPTS / "train_outer.py")]
    with ExitStack() as stack:
        jobs = []
        for seed in range(1, seeds + 1):
            environment = environment_of(pace, quorum=0, seed=seed)
            job = contenders.Contender(f"seed {seed}", home / f"seed-{seed}", [command], environment)
            jobs.append((seed, stack.enter_context(job)))
        for seed, job in jobs:
            noted = job.directory / "stamps"
            job.until(f"{rounds} rounds", partial(has_noted, noted, rounds), QUIET_S)
            yield seed, agreed(outer_work.marks(noted))


def has_noted(directory: Path, rounds: int) -> bool:
    return rounds in outer_work.marks(directory)


def rows_of(runs: Sequence[Found]) -> list[Row]:
    rows = []
    names = dict.fromkeys(name for run in runs for name in run.legs)
    for which in (QUIET, STORM):
        for name in names:
            of = [run.legs[name] for run in runs if name in run.legs and which in run.legs[name]]
            if of:
                rows.append(row_of(name, which, of))
    for run in runs:
        if run.stormy and run.quiet:
            rows.append(loss_row(run.stormy, run.quiet))
    return rows


def row_of(name: str, which: str, runs: Sequence[Mapping[str, Leg]]) -> Row:
    """runs: of one launcher."""
    of = [run[which] for run in runs]
    rates = sorted(one.rate for one in of)
    words = [
        f"{span((one.rate for one in of), '.1f')} ({len(of)} times)",
        *(
            [f"{span((run[which].rate / run[QUIET].rate for run in runs), '.2f')} of undisturbed"]
            if which != QUIET
            else []
        ),
        f"{span(one.faults for one in of)} killed",
        f"{span(one.rounds for one in of)} rounds in {of[0].seconds:.0f} s",
        f"{span(one.dropped for one in of)} samples dropped",
        f"longest time without a round {span((one.stop_s for one in of), '.1f')} s",
    ]
    return Row(f"{which}, {name}: samples/s", f"{rates[len(rates) // 2]:.1f}", ", ".join(words))


def loss_row(stormy: Sequence[Mark], quiet: Sequence[Sequence[Mark]]) -> Row:
    """After the last rounds that all of them have made."""
    by_rounds = [{mark.rounds: mark.loss for mark in of} for of in (stormy, *quiet)]
    rounds = max(set(by_rounds[0]).intersection(*by_rounds[1:]))
    loss, *losses = (of[rounds] for of in by_rounds)
    return Row(
        f"held-out loss after {rounds} rounds, {OURS}",
        f"{loss:.4f}",
        f"{span(losses, '.4f')} in {len(quiet)} quiet jobs with a seed each",
        target(loss <= max(losses), "not above all quiet jobs"),
    )


def notes() -> list[str]:
    step = outer_work.INNER_STEPS
    return [
        "Every job trains the same GPT of 0.14 million float32 parameters on three nodes with a worker each: network "
        f"namespaces of this machine behind cables of {CABLE_KBIT_S / 1000:g} Mbit/s with "
        f"{CABLE.delay_s * 1000:g} ms in each direction. Replicas make {step} inner steps of "
        f"{outer_work.SEQUENCES} sequences each, and then an outer step. An inner step is made to take "
        f"{PACE_S:g} s, so that the cores of one machine do.",
        "Whose worker is killed when was drawn once, and is the same for all. Whoever is killed is started again at "
        "once: by this project's agent, and torchft's by the bench, without a wait. The lighthouse of torchft is "
        "behind no cable, and nobody kills it; so are etcd and the rendezvous here.",
        "Samples are those of inner steps that are in an outer step; dropped are all others that were computed: of the "
        "dead, of rounds that were given up, and of a torchft process that starts, and trains fresh weights until its "
        "first synchronisation. Rounds that are made again, because fresh weights became the state, do not count.",
        f"elastic-ring: `.with_quorum({QUORUM}, grace_s=1)`. With delay={DELAY} its differences are sent while the "
        f"last {DELAY} inner steps of a round are made; this was measured undisturbed only.",
        "torchft: the nightly 2026.10.26, `local_sgd.DiLoCo`, "
        f"min_replica_size={QUORUM}, {launchers.SILENT_MS / 1000:g} s for a heartbeat, {launchers.JOIN_MS / 1000:g} s "
        "for stragglers. Both have the same optimizers: AdamW inside, outside SGD 0.7 with Nesterov momentum 0.9.",
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


def found_of(run: Mapping[str, Any]) -> Found:
    """As it is written."""
    legs = {name: {which: Leg(**one) for which, one in of.items()} for name, of in run["legs"].items()}
    stormy, *quiet = ([Mark(**one) for one in of] for of in (run["stormy"], *run["quiet"]))
    return Found(legs, stormy, quiet)


def measured(home: Path, names: Sequence[str], peer: Path | None, plan: Plan) -> Found:
    """One run."""
    legs, stormy = dict[str, dict[str, Leg]](), list[Mark]()
    for name in names:
        if name == OURS:
            legs[name], stormy = measure(home / name, name, elastic, plan)
        elif name == DELAYED:
            legs[name], _ = measure(home / "delayed", name, elastic, plan)
        elif peer is not None:
            legs[name], _ = measure(home / name, name, torchft(peer), plan)
    quiet = []
    for seed, marks in undisturbed(home, plan.seeds, stormy[-1].rounds) if stormy else ():
        quiet.append(marks)
        say(f"quiet, seed {seed}: {marks[-1]}; behind the storm: {stormy[-1]}")
    return Found(legs, stormy, quiet)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if not options.small:
        report.around_section(report.DOCUMENT, BENCH.markers)
    exit_on_signals()
    plan = Plan(options.minutes * 60, options.faults, options.quiet_minutes * 60, options.seeds)
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
        report.write_section(report.DOCUMENT, text, BENCH.markers)
    print(report.table(rows), flush=True)
    return 1 if report.missed(rows) else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = BENCH.parser("two minutes")
    parser.add_argument("--minutes", type=float, default=45.0, help="of the storm (default %(default)s)")
    parser.add_argument("--faults", type=int, default=64, help="in it (default %(default)s)")
    parser.add_argument("--quiet-minutes", type=float, default=5.0, help="before it (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="of quiet jobs (default %(default)s)")
    parser.add_argument("--launchers", default=f"{OURS},{DELAYED},{TORCHFT}", help="(default %(default)s)")
    parser.add_argument("--peer", type=Path, metavar="DIR", help="a directory in which torchft is installed")
    parser.add_argument("--runs", type=int, default=1, help="(default %(default)s)")
    parser.add_argument("--further", action="store_true", help="count also the runs that the file of --json has")
    options = parser.parse_args(arguments)
    if options.small:
        options.minutes, options.faults, options.quiet_minutes, options.seeds = 1.0, 2, 0.5, 1
    return options


if __name__ == "__main__":
    sys.exit(main())
