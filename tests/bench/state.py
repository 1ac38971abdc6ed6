"""Measures what moving the state costs: joining, copying, replacing, leaving, checkpoints, host memory.

    python -m tests.bench.state [--small] [--no-targets] [--seed 1] [--json FILE]

Each part has its own job of real processes, one after the other. Exit code 1 if a target is missed. --small is a smoke
run with little state: its figures say nothing, no target is judged, and docs/performance.md stays as it is.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.bench import checkpoints, copying, hostmem, nodes, replacements, report
from tests.bench.checkpoints import Figures
from tests.bench.copying import Copies
from tests.bench.intervals import median_interval, ratios
from tests.bench.nodes import Change, Nodes
from tests.bench.recovery import say, seconds_row, shown_ratio
from tests.bench.replacements import Replacements
from tests.bench.report import Bench, Row, target

BENCH = Bench("state")

JOIN_GAP_STEPS = 1.5
LEAVE_GAP_STEPS = 2.0
COPY_SHARE = 0.5
STALL_MS = 50.0
COST = 0.035
SNAPSHOT_STALL_MS = 20.0
SOONER = 5.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """shard_s: see scripts/train_ballast.py; two or three shards are a worker's step. waiting, busy: rounds of leaving
    and returning without and with processors that compute. block: see checkpoints.py."""

    join_mb: int = 1000
    shard_s: float = 0.25
    waiting: int = 5
    busy: int = 2
    copies: int = 10
    replacements: int = 6
    checkpoint_mb: int = 500
    checkpoints: int = 8
    block: int = 32
    snapshot_mb: int = 100
    snapshots: int = 8


SMALL = Sizes(
    join_mb=20,
    shard_s=0.05,
    waiting=1,
    busy=1,
    copies=2,
    replacements=1,
    checkpoint_mb=20,
    checkpoints=1,
    block=12,
    snapshot_mb=20,
    snapshots=1,
)


@dataclass(frozen=True, slots=True)
class Measured:
    sizes: Sizes
    waiting: Nodes
    busy: Nodes
    copies: Copies
    replacements: Replacements
    checkpoints: Figures
    snapshots: Figures


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    with BENCH.directory(writes=not options.small) as directory:
        found = measure(directory, SMALL if options.small else Sizes(), options.seed)
    rows, words = rows_of(found), f"--seed {options.seed}"
    measured = {"measured": asdict(found)}
    BENCH.publish(measured, rows, notes(found.sizes), words, to=options.json, writes=not options.small)
    print(summary(found), flush=True)
    return 1 if report.missed(rows) and not options.no_targets else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = BENCH.parser()
    parser.add_argument("--no-targets", action="store_true", help="a missed target is no failure")
    parser.add_argument("--seed", type=int, default=1, help="of the moments and victims of kills")
    options = parser.parse_args(arguments)
    options.no_targets |= options.small
    return options


def measure(directory: Path, sizes: Sizes, seed: int) -> Measured:
    return Measured(
        sizes=sizes,
        waiting=nodes.measure(directory / "waiting", sizes.join_mb, sizes.shard_s, sizes.waiting, say),
        busy=nodes.measure(directory / "busy", sizes.join_mb, 0.0, sizes.busy, say),
        copies=copying.measure(sizes.join_mb, sizes.copies, say),
        replacements=replacements.measure(directory / "replacements", sizes.replacements, seed, say),
        checkpoints=checkpoints.measure(
            directory / "checkpoints", sizes.checkpoint_mb, sizes.checkpoints, sizes.block, say
        ),
        snapshots=hostmem.measure(directory / "snapshots", sizes.snapshot_mb, sizes.snapshots, sizes.block // 2, say),
    )


def rows_of(found: Measured) -> list[Row]:
    sizes = found.sizes
    return [
        gap_row(f"a newcomer copies {sizes.join_mb} MB: survivors' longest gap", found.waiting.returns, JOIN_GAP_STEPS),
        gap_row("the same, all processors busy computing", found.busy.returns),
        seconds_row(
            f"a node returns, {sizes.join_mb} MB -> step of the full world",
            [change.to_world_s for change in found.waiting.returns],
        ),
        gap_row("a node is drained: the others' longest gap", found.waiting.leaves, LEAVE_GAP_STEPS),
        gap_row("the same, all processors busy computing", found.busy.leaves),
        Row(
            "shards computed again when nodes leave and return",
            f"{redone(found)}",
            f"in {len(found.waiting.leaves) + len(found.busy.leaves)} leaves and as many returns",
            target(redone(found) == 0, "0"),
        ),
        *copy_rows(found.copies),
        *replacement_rows(found.replacements),
        stall_row(
            f"checkpoint of {sizes.checkpoint_mb} MB, {checkpoints.WORKERS} workers: the loop stands still",
            found.checkpoints,
            STALL_MS,
        ),
        *cost_rows(found.checkpoints),
        stall_row(
            f"snapshot of {sizes.snapshot_mb} MB in memory, {hostmem.WORKERS} workers: the loop stands still",
            found.snapshots,
            SNAPSHOT_STALL_MS,
        ),
    ]


def gap_row(what: str, changes: Sequence[Change], at_most: float | None = None) -> Row:
    gaps = [change.gap_steps for change in changes]
    step_s = statistics.median(change.step_s for change in changes)
    verdict = "" if at_most is None else target(max(gaps) <= at_most, f"worst <= {at_most:g} steps")
    return Row(
        what,
        f"{statistics.median(gaps):.2f} steps",
        f"worst {max(gaps):.2f}, {len(gaps)} times; a step is {step_s:.2f} s",
        verdict,
    )


def replacement_rows(found: Replacements) -> list[Row]:
    sooner = median_interval(ratios(found.cold_s, found.forked_s))
    shown, spread = shown_ratio(sooner)
    return [
        seconds_row("kill -> replacement steps, forked by the fork server", found.forked_s),
        seconds_row("kill -> replacement steps, cold", found.cold_s),
        Row(
            "kill -> replacement steps, cold / forked", shown, spread, target(sooner.median >= SOONER, f">= {SOONER:g}")
        ),
    ]


def copy_rows(found: Copies) -> list[Row]:
    share = median_interval(found.shares)
    shown, spread = shown_ratio(share)
    rates = (("copy between two workers", found.copied), ("plain TCP beside it", found.raw))
    return [
        *(rate_row(name, of) for name, of in rates),
        Row("copy / plain TCP", shown, spread, target(share.median >= COPY_SHARE, f">= {COPY_SHARE:g}")),
        rate_row("copy between two workers, into new memory", found.into_new),
    ]


def rate_row(what: str, rates: Sequence[float]) -> Row:
    spread = f"{min(rates):.2f} to {max(rates):.2f} GB/s, {len(rates)} times"
    return Row(what, f"{statistics.median(rates):.2f} GB/s", spread)


def stall_row(what: str, found: Figures, at_most_ms: float) -> Row:
    stalls_ms, median_ms = found.stalls_ms, statistics.median(found.stalls_ms)
    return Row(
        what,
        f"{median_ms:.1f} ms",
        f"{min(stalls_ms):.1f} to {max(stalls_ms):.1f} ms, {len(stalls_ms)} times",
        target(median_ms <= at_most_ms, f"<= {at_most_ms:g} ms"),
    )


def cost_rows(found: Figures) -> list[Row]:
    extra = median_interval(found.extra_s)
    low, high = (f"{value / checkpoints.INTERVAL_S:.2%}" for value in (extra.low, extra.high))
    return [
        Row(
            f"throughput that one every {checkpoints.INTERVAL_S:g} s costs",
            f"{found.cost:.2%}",
            f"{low} to {high} ({extra.confidence:.0%} interval of {extra.n} pairs)",
            target(found.cost <= COST, f"<= {COST:.1%}"),
        ),
        seconds_row("from taking it to complete on disk", found.seconds_s),
    ]


def redone(found: Measured) -> int:
    return found.waiting.redone + found.busy.redone


def summary(found: Measured) -> str:
    """The last line, for scripts."""
    gap = max(change.gap_steps for change in found.waiting.returns)
    stall_ms = statistics.median(found.checkpoints.stalls_ms)
    return (
        f"state: join_gap={gap:.2f} drain_redone={redone(found)} "
        f"ckpt_stall_ms={stall_ms:.1f} ckpt_cost={found.checkpoints.cost:.4f}"
    )


def notes(sizes: Sizes) -> list[str]:
    """What a reader has to know to judge the table."""
    return [
        "A gap is the longest time between two steps of a worker that stays, from the change until the new world has "
        f"made {nodes.STEADY_STEPS} steps, in medians of its {nodes.STEADY_STEPS} steps before. A step is 6 shards of "
        f"{sizes.shard_s:g} s each, in which a worker sleeps as if it waited for an accelerator, so the processors are "
        "free for the copy. A step takes the time of two shards with three workers, and of three shards with two: this "
        "difference is half a step of the gap of a leave. Where workers compute on the processors, three workers share "
        "2 cores, and a newcomer takes CPU time from them, which it would not do on its own machine.",
        "Shards are counted in the training script, without rehearsals.",
        "Copies and plain TCP alternate, between the same two processes, in the same memory. Plain TCP has the best "
        'of three sizes of its pieces. "Into new memory" includes the kernel\'s page faults, as in a newcomer.',
        "Replacements: two jobs of three workers, one with `--cold-start`, are killed alternately. A step takes about "
        "20 ms, so the start dominates the measured time.",
        "Checkpoints are taken on three workers that keep both cores busy. The cost: blocks of "
        f"{sizes.block} steps with a checkpoint at their beginning alternate with blocks without one, and each is "
        "compared with the mean of its two neighbours; the median difference is divided by 30 s. So the run needs less "
        "than 30 s for each checkpoint, and a drift of the machine has no effect.",
        "Snapshots in memory are measured like checkpoints, with two workers.",
    ]


if __name__ == "__main__":
    sys.exit(main())
