"""Measures Horovod's elastic mode here: the death of a node, and a healthy step beside job.steps().

    python -m tests.bench.horovod [--quick] [--kills 10] [--rounds 24] [--seed 1] [--json FILE]

Three nodes on this machine, one worker each, train a script with elastic.horovod; a node dies with all its processes,
and is started again 6 s later. Then two workers with that script and two with job.steps() train the same model in
turns. --quick is a smoke run which leaves docs/performance.md as it is.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from tests.bench import contenders, launchers, report
from tests.bench.healthy import NO_COPIES, Start, take_turns
from tests.bench.intervals import median_interval, ratios
from tests.bench.node_deaths import AWAY_S, Driver, Outcome
from tests.bench.recovery import MS, parse, say, shown_ratio
from tests.bench.report import Bench, Row, target
from tests.bench.stamps import Stamp

BENCH = Bench("horovod")
SCRIPT = "train_horovod.py"
STEPS, STEPS_AGAIN, HOROVOD = "job.steps()", "job.steps() again", "elastic.horovod"
WORKERS = 2
NEXT_MAX_S, RATIO_MAX = 0.5, 1.05
"""Of the median of the next steps after a death, and of the lower end of the interval of the healthy steps."""
Figures = dict[str, list[float]]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments, BENCH)
    with BENCH.directory(writes=not options.quick) as directory:
        deaths, again = measure_deaths(directory / "nodes", options.kills, options.seed)
        step_s = measure_steps(directory / "healthy", options.rounds)
    rows = [*death_rows(deaths, again), *step_rows(step_s)]
    figures = {"deaths": [asdict(death) for death in deaths], "again": again, "healthy_step_s": step_s}
    words = f"--kills {options.kills} --rounds {options.rounds}"
    BENCH.publish(figures, rows, notes(), words, to=options.json, writes=not options.quick)
    return 0 if options.quick else len(report.missed(rows)) > 0


def measure_deaths(home: Path, count: int, seed: int) -> tuple[list[Outcome], int]:
    """What each death has cost, and how many steps workers have done again. Raises RuntimeError, TimeoutError."""
    found: list[Outcome] = []
    with launchers.elastic(home, None, SCRIPT) as job:
        driver = Driver(job, random.Random(seed))
        for number in range(count):
            driver.until("an agent that stands by on each node", job.have_standbys)
            found.append(one := driver.hit(driver.kill, job.start, AWAY_S))
            say(f"death {number + 1}/{count}: next step after {one.next_s:.2f} s, all nodes after {one.full_s:.1f} s")
        return found, done_again(driver.told())


def done_again(told: Mapping[str, Sequence[Stamp]]) -> int:
    """Steps that a worker has applied more than once."""
    return sum(len(of) - len({stamp.step for stamp in of}) for of in told.values())


def measure_steps(directory: Path, rounds: int) -> Figures:
    """By contender, the mean step of each block in seconds. Raises AssertionError if they do not train the same."""
    shards = {"BENCH_SHARDS": str(WORKERS)}
    job = partial(contenders.elastic, settings=shards)
    options = (WORKERS, "exact", *NO_COPIES)
    starts: list[Start] = [
        partial(job, directory / "steps", *options, name=STEPS),
        partial(job, directory / "again", *options, name=STEPS_AGAIN),
        partial(job, directory / "horovod", *options, name=HOROVOD, script=SCRIPT),
    ]
    return take_turns("healthy", starts, WORKERS, rounds, say)


def death_rows(deaths: Sequence[Outcome], again: int) -> list[Row]:
    next_s, full_s = [one.next_s for one in deaths], [one.full_s for one in deaths]
    wanted = target(statistics.median(next_s) <= NEXT_MAX_S, f"median <= {NEXT_MAX_S:g} s")
    return [
        Row("node killed -> next step of the others", *_spread(next_s), wanted),
        Row("start of a node -> step of all", *_spread(full_s)),
        Row("steps done again", str(again), f"{len(deaths)} deaths", target(again == 0, "0")),
    ]


def _spread(of: Sequence[float]) -> tuple[str, str]:
    return f"{statistics.median(of):.2f} s", f"{min(of):.2f} to {max(of):.2f} s"


def step_rows(step_s: Figures) -> list[Row]:
    rows = []
    for name, of in step_s.items():
        spread = f"{min(of) * MS:.0f} to {max(of) * MS:.0f} ms"
        rows.append(Row(f"healthy step, {WORKERS} workers: {name}", f"{statistics.median(of) * MS:.0f} ms", spread))
    again = median_interval(ratios(step_s[STEPS_AGAIN], step_s[STEPS]))
    ours = median_interval(ratios(step_s[HOROVOD], step_s[STEPS]))
    wanted = target(ours.low <= RATIO_MAX, f"lower end <= {RATIO_MAX}")
    return [
        *rows,
        Row(f"{STEPS_AGAIN} / {STEPS}", *shown_ratio(again)),
        Row(f"{HOROVOD} / {STEPS}", *shown_ratio(ours), wanted),
    ]


def notes() -> list[str]:
    """What a reader has to know to judge the table."""
    return [
        "All train the same MLP of 10.0 million float32 parameters with SGD and momentum; the losses are compared. In "
        "the healthy step each worker has one micro-batch of 32 samples; the script with `elastic.horovod` commits "
        "every tenth step. When nodes die, a step has 8 micro-batches, divided among 3 nodes on one machine.",
    ]


if __name__ == "__main__":
    sys.exit(main())
