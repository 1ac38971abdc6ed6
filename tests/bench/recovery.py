"""Measures what a failure costs, what joining costs, and what a step costs while nothing happens.

    python -m tests.bench.recovery [--quick] [--kills 10] [--rounds 24] [--seed 1] [--json FILE]

All contenders train the same model on the same micro-batches in one run. Kills of this project's job and of torchrun's
take turns, and so do the blocks of healthy steps; a job that is not measured stands still. --quick is a smoke run
which leaves docs/performance.md as it is.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from elastic.records.journal import PHASES, Journal, read_all, recoveries
from tests.bench import contenders, healthy, kills, work
from tests.bench.healthy import BASELINE, KEEP_MEMORY, KEEPING, NULL, Healthy
from tests.bench.intervals import Interval, median_interval, ratios
from tests.bench.kills import Kill
from tests.bench.report import Bench, Row, target

BENCH = Bench("recovery", "bench")
REDUCTIONS = ("exact", "allreduce")
MS = 1e3


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    with BENCH.directory(writes=not options.quick) as directory:
        ours, theirs, story = measure_kills(directory, options.kills, options.seed)
        steps = healthy.measure(directory / "healthy", options.rounds, REDUCTIONS, say)
    figures = {
        "micro_batch": work.MICRO_BATCH,
        "elastic_kills": [asdict(kill) for kill in ours],
        "torchrun_kills": [asdict(kill) for kill in theirs],
        "recoveries": story,
        "healthy_step_s": steps.step_s,
    }
    rows = [*recovery_rows(story), *kill_rows(ours, theirs), *healthy_rows(steps)]
    BENCH.publish(figures, rows, notes(), words_of(options), to=options.json, writes=not options.quick)
    return 0


def parse(arguments: Sequence[str] | None, bench: Bench = BENCH) -> argparse.Namespace:
    parser = bench.parser("2 kills and 3 rounds", "--quick")
    parser.add_argument("--kills", type=int, default=10, help="of each contender")
    parser.add_argument("--rounds", type=int, default=24, help="of healthy blocks")
    parser.add_argument("--seed", type=int, default=1, help="of the moments and victims")
    options = parser.parse_args(arguments)
    if options.quick:
        options.kills, options.rounds = 2, 3
    return options


def words_of(options: argparse.Namespace) -> str:
    return f"--kills {options.kills} --rounds {options.rounds} --seed {options.seed}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure_kills(directory: Path, count: int, seed: int) -> tuple[list[Kill], list[Kill], list[dict[str, Any]]]:
    """(kills of ours, kills of torchrun's, what our journals tell about them). Raises AssertionError if a kill does
    not have exactly one finished recovery in the journals."""
    dice = random.Random(seed)
    ours: list[Kill] = []
    theirs: list[Kill] = []
    job_dir = directory / "elastic" / "job"
    with (
        contenders.elastic(directory / "elastic", kills.WORKERS) as job,
        contenders.torchrun(directory / "torchrun", kills.WORKERS) as rival,
    ):
        for contender in (job, rival):
            contender.run(kills.STEADY_STEPS, kills.WORKERS)
        with Journal(job_dir / "journal" / "harness.jsonl", job="bench", who="harness", node="local") as journal:
            for number in range(count):
                ours.append(
                    kills.kill_one(
                        job, dice, lambda worker: journal.write("fault_injected", worker_id=worker, fault="SIGKILL")
                    )
                )
                theirs.append(kills.kill_one(rival, dice))
                for name, kill in (("elastic", ours[-1]), ("torchrun", theirs[-1])):
                    say(
                        f"kill {number + 1}/{count} {name}: a step after {kill.to_step_s:.2f} s, "
                        f"full world after {kill.to_full_s:.1f} s, longest pause {kill.pause_s:.2f} s, "
                        f"{kill.lost_steps} steps lost; a step takes {kill.step_s:.2f} s"
                    )
        story = recoveries(read_all(job_dir))
    told = [(episode["lost"], episode["complete"]) for episode in story]
    assert told == [([kill.victim], True) for kill in ours], f"kills {ours}, journals {story}"
    return ours, theirs, story


def recovery_rows(story: Sequence[dict[str, Any]]) -> list[Row]:
    total_ms = [episode["recovery_ms"] for episode in story]
    median_ms = statistics.median(total_ms)
    rows = [
        Row(
            f"recovery of {len(story)} SIGKILLs, 3 workers",
            f"{median_ms:.0f} ms",
            f"worst {max(total_ms):.0f} ms",
            f"{target(median_ms <= 150, 'median <= 150 ms')}, {target(max(total_ms) <= 500, 'worst <= 500 ms')}",
        )
    ]
    for phase in PHASES:
        spent_ms = [episode[f"{phase}_ms"] for episode in story]
        name = "beside it: the redo of the interrupted step" if phase == "redo" else f"of it: {phase}"
        rows.append(Row(name, f"{statistics.median(spent_ms):.1f} ms", f"worst {max(spent_ms):.1f} ms"))
    return rows


def kill_rows(ours: Sequence[Kill], theirs: Sequence[Kill]) -> list[Row]:
    gaps = [kill.pause_s / kill.step_s for kill in ours]
    faster = median_interval(ratios([kill.to_step_s for kill in theirs], [kill.to_step_s for kill in ours]))
    rows = [
        Row(
            "longest pause of a survivor while a newcomer joins",
            f"{statistics.median(gaps):.2f} steps",
            f"worst {max(gaps):.2f} steps",
            target(max(gaps) <= 3, "<= 3 steps"),
        )
    ]
    for name, of in (("elastic", ours), ("torchrun", theirs)):
        rows += [
            seconds_row(f"{name}: kill -> next step", [kill.to_step_s for kill in of]),
            seconds_row(f"{name}: kill -> step of the full world", [kill.to_full_s for kill in of]),
            Row(
                f"{name}: finished steps done again",
                f"{statistics.median(kill.lost_steps for kill in of):g}",
                f"worst {max(kill.lost_steps for kill in of)}",
            ),
        ]
    shown, spread = shown_ratio(faster)
    return [*rows, Row("kill -> next step, torchrun / elastic", shown, spread, target(faster.median >= 10, ">= 10"))]


def seconds_row(what: str, values_s: Sequence[float]) -> Row:
    return Row(what, f"{statistics.median(values_s):.2f} s", f"{min(values_s):.2f} to {max(values_s):.2f} s")


def healthy_rows(found: Healthy) -> list[Row]:
    rows = []
    for name, step_s in found.step_s.items():
        spread = f"{min(step_s) * MS:.0f} to {max(step_s) * MS:.0f} ms"
        rows.append(Row(f"healthy step, 2 workers: {name}", f"{statistics.median(step_s) * MS:.0f} ms", spread))
    for name, step_s in found.step_s.items():
        if name == BASELINE:
            continue
        interval = median_interval(ratios(step_s, found.step_s[BASELINE]))
        wanted = "" if name in (NULL, KEEPING) else target(interval.low <= 1.10, "lower end <= 1.10")
        rows.append(Row(f"{name} / {BASELINE}", *shown_ratio(interval), wanted))
    for name, step_s in found.step_s.items():
        if name not in (BASELINE, NULL, KEEPING):
            interval = median_interval(ratios(step_s, found.step_s[KEEPING]))
            rows.append(Row(f"{name} / {KEEPING}", *shown_ratio(interval), ""))
    return rows


def shown_ratio(interval: Interval) -> tuple[str, str]:
    spread = f"{interval.low:.3f} to {interval.high:.3f} ({interval.confidence:.0%} interval of {interval.n} pairs)"
    return f"{interval.median:.3f}", spread


def notes() -> list[str]:
    """What a reader has to know to judge the table."""
    return [
        f"Every contender trains the same MLP of 10.0 million float32 parameters with SGD and momentum, {work.SHARDS} "
        f"micro-batches of {work.MICRO_BATCH} samples a step, one torch thread a worker; their losses are compared.",
        'The healthy step is measured without checkpoints and snapshots; "Moving the state" has their cost.',
        "A ratio compares values that were measured one after the other in the same run. The table has the median of "
        "the ratios and its distribution-free interval (order statistics). DDP against DDP shows the noise.",
        f'"{KEEPING}" is DDP with an allocator that does not return freed gradients to the kernel '
        f"({', '.join(KEEP_MEMORY)}): a remaining difference is not caused by page faults.",
        "Recovery is detect + abort + decide + build + sync, read from the journals; detect begins at the kill. The "
        "other times are measured from outside, by the same time stamps in the training scripts of both.",
        "torchrun runs one elastic agent with three workers, a c10d rendezvous, a separate store for each attempt, "
        "and a checkpoint every 10 steps. Its next step may be a step that was finished before and is computed again. "
        "No worker survives a restart, so there is no pause to measure.",
        "A pause is given in median steps of the full world before the kill. It includes the CPU time that the start "
        "of the newcomer takes from the survivors.",
    ]


if __name__ == "__main__":
    raise SystemExit(main())
