"""Measures what logical ranks cost beside job.steps(): a healthy step, and a death until the next step.

    python -m tests.bench.ranks [--quick] [--kills 10] [--rounds 24] [--seed 1] [--json FILE]

A healthy step: two workers with two shards, which are two ranks, beside torch DDP with two processes. A death: three
workers with eight shards, or eight ranks. Blocks of steps, and kills, take turns in one run. --quick is a smoke run
which leaves docs/performance.md as it is.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from tests.bench import contenders, kills, report, work
from tests.bench.contenders import Contender
from tests.bench.healthy import BASELINE, KEEP_MEMORY, KEEPING, NO_COPIES, NULL, Start, take_turns
from tests.bench.intervals import median_interval, ratios
from tests.bench.kills import Kill
from tests.bench.recovery import MS, parse, say, seconds_row, shown_ratio, words_of
from tests.bench.report import Bench, Row, target

BENCH = Bench("ranks")
STEPS, RANKS = "job.steps()", "--ranks"
WORKERS = 2
"""In the healthy step; as many shards and ranks."""
HEALTHY_MAX, KILL_MAX = 1.05, 1.2
"""Of the lower end of the interval of --ranks / job.steps()."""
Figures = dict[str, list[float]]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments, BENCH)
    with BENCH.directory(writes=not options.quick) as directory:
        killed = measure_kills(directory, options.kills, options.seed)
        step_s = measure_steps(directory / "healthy", options.rounds)
    rows = [*step_rows(step_s), *kill_rows(killed)]
    told = {name: [asdict(kill) for kill in of] for name, of in killed.items()}
    figures = {"healthy_step_s": step_s, "kills": told}
    BENCH.publish(figures, rows, notes(), words_of(options), to=options.json, writes=not options.quick)
    return 0 if options.quick else len(report.missed(rows)) > 0


def ranks(directory: Path, workers: int, count: int, *options: str) -> Contender:
    """The measured training as a script for so many ranks."""
    words = ("--ranks", str(count), *options)
    settings = {"BENCH_SHARDS": str(count)}
    return contenders.elastic(
        directory, workers, "exact", *words, name=RANKS, settings=settings, script="train_ranks.py"
    )


def measure_steps(directory: Path, rounds: int) -> Figures:
    """By contender, the mean step of each block in seconds. Raises AssertionError if they do not train the same."""
    shards = {"BENCH_SHARDS": str(WORKERS)}
    steps = partial(contenders.elastic, directory / "steps", WORKERS, "exact", *NO_COPIES, name=STEPS, settings=shards)
    starts: list[Start] = [
        partial(contenders.ddp, BASELINE, directory / "ddp", WORKERS, shards),
        partial(contenders.ddp, NULL, directory / "ddp-again", WORKERS, shards),
        partial(contenders.ddp, KEEPING, directory / "ddp-keeping", WORKERS, {**shards, **KEEP_MEMORY}),
        steps,
        partial(ranks, directory / "ranks", WORKERS, WORKERS, *NO_COPIES),
    ]
    return take_turns("healthy", starts, WORKERS, rounds, say)


def measure_kills(directory: Path, count: int, seed: int) -> dict[str, list[Kill]]:
    """Pairs of kills at the same moment of a step, of the same member."""
    found: dict[str, list[Kill]] = {STEPS: [], RANKS: []}
    with (
        contenders.elastic(directory / "steps", kills.WORKERS, name=STEPS) as steps,
        ranks(directory / "ranks", kills.WORKERS, work.SHARDS) as of_ranks,
    ):
        for contender in (steps, of_ranks):
            contender.run(kills.STEADY_STEPS, kills.WORKERS)
        for number in range(count):
            for contender in (steps, of_ranks):
                found[contender.name].append(kill := kills.kill_one(contender, random.Random(f"{seed} {number}")))
                say(
                    f"kill {number + 1}/{count} {contender.name}: a step after {kill.to_step_s:.2f} s, full world "
                    f"after {kill.to_full_s:.1f} s, longest pause {kill.pause_s:.2f} s, {kill.lost_steps} steps lost; "
                    f"a step takes {kill.step_s:.2f} s"
                )
    return found


def step_rows(step_s: Figures) -> list[Row]:
    rows = []
    for name, of in step_s.items():
        spread = f"{min(of) * MS:.0f} to {max(of) * MS:.0f} ms"
        rows.append(Row(f"healthy step, 2 workers: {name}", f"{statistics.median(of) * MS:.0f} ms", spread))
    rows.append(Row(f"{NULL} / {BASELINE}", *shown_ratio(median_interval(ratios(step_s[NULL], step_s[BASELINE])))))
    for other in (BASELINE, KEEPING):
        interval = median_interval(ratios(step_s[RANKS], step_s[other]))
        rows.append(Row(f"{RANKS} / {other}", *shown_ratio(interval)))
    interval = median_interval(ratios(step_s[RANKS], step_s[STEPS]))
    wanted = target(interval.low <= HEALTHY_MAX, f"lower end <= {HEALTHY_MAX}")
    return [*rows, Row(f"{RANKS} / {STEPS}", *shown_ratio(interval), wanted)]


def kill_rows(killed: dict[str, list[Kill]]) -> list[Row]:
    rows = []
    for name, of in killed.items():
        rows += [
            seconds_row(f"{name}: kill -> next step", [kill.to_step_s for kill in of]),
            seconds_row(f"{name}: kill -> step of the full world", [kill.to_full_s for kill in of]),
            Row(f"{name}: finished steps done again", f"{statistics.median(kill.lost_steps for kill in of):g}"),
        ]
    after = {name: [kill.to_step_s for kill in of] for name, of in killed.items()}
    interval = median_interval(ratios(after[RANKS], after[STEPS]))
    wanted = target(interval.low <= KILL_MAX, f"lower end <= {KILL_MAX}")
    return [*rows, Row(f"kill -> next step, {RANKS} / {STEPS}", *shown_ratio(interval), wanted)]


def notes() -> list[str]:
    """What a reader has to know to judge the table."""
    return [
        f"The MLP of 10.0 million float32 parameters, SGD with momentum, {work.MICRO_BATCH} samples a shard or rank, "
        "one torch thread a worker. The healthy step has 2 workers and as many shards or ranks; deaths come to 3 "
        f"workers with {work.SHARDS}. Losses of the healthy step are compared.",
        "A ratio compares values that were measured one after the other in the same run. The table has the median of "
        "the ratios and its distribution-free interval (order statistics).",
    ]


if __name__ == "__main__":
    sys.exit(main())
