"""Measures what a step costs while nothing happens, against torch DDP: time, memory and bytes sent.

    python -m tests.bench.step [--small] [--no-targets] [--json FILE]

Two models on 2 and 4 workers, three bucket sizes, 3 workers with 8, 12 and 24 shards, and what it would gain to overlap
the reduction with backward. All contenders of a part train the same thing in turns. Exit code 1 if a target is missed.
--small is a smoke run: its figures say nothing, no target is judged, and docs/performance.md stays as it is.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from chaos_tests.support.processes import Command
from tests.bench import contenders, overlap, report, work
from tests.bench.contenders import Contender
from tests.bench.healthy import BASELINE, KEEP_MEMORY, KEEPING, NO_COPIES, NULL, Start, take_turns
from tests.bench.intervals import median_interval, ratios
from tests.bench.recovery import MS, say, shown_ratio
from tests.bench.report import Bench, Row, target

BENCH = Bench("step")

EXACT, NATIVE = "elastic exact", "elastic allreduce"
BARS = {EXACT: 1.05, NATIVE: 1.03}
"""Of the lower end of the interval of (contender / torch DDP), where two workers have a core each."""
DDP_GRADIENTS = 3
"""What DDP needs in gradients: momentum, gradients, buckets."""
ELEMENTS = {"mlp": 10_020_874, "transformer": 3_423_754}
"""Parameters, all float32."""
BUCKETS_MB = (1, 25, 100)
"""DDP's bucket_cap_mb; 25 is its default."""
PIECES_KB = (256, 1024, 4096)
"""What this project's ring adds and sends on at a time; 1024 is what it uses."""
SHARDS = (8, 12, 24)
OVERLAP_BUCKETS_MB = {"mlp": 8, "transformer": 4}
"""What is exchanged while backward goes on, of those tried the size that does best."""
OVERLAP_S = 900.0
"""Until the measurement of the overlap is given up; it takes less than a minute on a machine that does nothing else."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Rounds of blocks: with two workers, where a bar is judged, and elsewhere. block: steps; the first one of a block
    is not measured."""

    judged: int = 24
    shown: int = 6
    overlap: int = 12
    block: int = 6
    models: tuple[str, ...] = ("mlp", "transformer")
    workers: tuple[int, ...] = (2, 4)
    buckets: tuple[tuple[int, int], ...] = tuple(zip(BUCKETS_MB, PIECES_KB, strict=True))
    shards: tuple[int, ...] = SHARDS


SMALL = Sizes(
    judged=2, shown=1, overlap=1, block=3, models=("transformer",), workers=(2,), buckets=((1, 256),), shards=(8,)
)


@dataclass(frozen=True, slots=True)
class Part:
    """One comparison. step_s: by contender, per block. peak_bytes: by contender, of the worker with the most, above
    what it had before its first step. sent_bytes: by contender of this project, of a worker and step, their mean."""

    model: str
    workers: int
    shards: int
    step_s: dict[str, list[float]]
    peak_bytes: dict[str, int]
    sent_bytes: dict[str, float]


@dataclass(frozen=True, slots=True)
class Measured:
    """compared: by model and workers; buckets: of sizes; shards: of three workers; overlap: by model and way, the mean
    step of each block in seconds."""

    compared: list[Part]
    buckets: Part
    shards: list[Part]
    overlap: dict[str, dict[str, list[float]]]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    with BENCH.directory(writes=not options.small) as directory:
        found = measure(directory, SMALL if options.small else Sizes())
    rows = rows_of(found)
    BENCH.publish({"measured": asdict(found)}, rows, notes(), to=options.json, writes=not options.small)
    print(summary(found), flush=True)
    return 1 if report.missed(rows) and not options.no_targets else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = BENCH.parser()
    parser.add_argument("--no-targets", action="store_true", help="a missed target is no failure")
    options = parser.parse_args(arguments)
    options.no_targets |= options.small
    return options


def measure(directory: Path, sizes: Sizes) -> Measured:
    return Measured(
        [
            compare(directory / f"{model}-{workers}", model, workers, sizes)
            for model in sizes.models
            for workers in sizes.workers
        ],
        compare_buckets(directory / "buckets", sizes),
        [compare_shards(directory / f"shards-{shards}", shards, sizes) for shards in sizes.shards],
        {model: compare_overlap(directory, model, sizes) for model in sizes.models},
    )


def compare(directory: Path, model: str, workers: int, sizes: Sizes) -> Part:
    common = {"BENCH_MODEL": model}
    starts = [
        ddp(BASELINE, directory / "ddp", workers, common),
        ddp(NULL, directory / "again", workers, common),
        ddp(KEEPING, directory / "keeping", workers, {**common, **KEEP_MEMORY}),
        elastic(EXACT, directory / "exact", workers, "exact", common),
        elastic(NATIVE, directory / "allreduce", workers, "allreduce", common),
    ]
    return run(starts, model, workers, 8, sizes.judged if workers == 2 else sizes.shown, sizes.block)


def compare_buckets(directory: Path, sizes: Sizes) -> Part:
    starts: list[Start] = []
    for bucket_mb, piece_kb in sizes.buckets:
        settings = {"BENCH_BUCKET_MB": str(bucket_mb), "BENCH_PIECE_KB": str(piece_kb), **KEEP_MEMORY}
        starts += [
            ddp(f"DDP, buckets of {bucket_mb} MB", directory / f"ddp-{bucket_mb}", 2, settings),
            elastic(f"exact, pieces of {piece_kb} KB", directory / f"exact-{piece_kb}", 2, "exact", settings),
        ]
    return run(starts, "mlp", 2, 8, sizes.shown, sizes.block)


def compare_shards(directory: Path, shards: int, sizes: Sizes) -> Part:
    settings = {"BENCH_SHARDS": str(shards), **KEEP_MEMORY}
    starts = [ddp(KEEPING, directory / "ddp", 3, settings), elastic(EXACT, directory / "exact", 3, "exact", settings)]
    return run(starts, "mlp", 3, shards, sizes.shown, sizes.block)


def compare_overlap(directory: Path, model: str, sizes: Sizes) -> dict[str, list[float]]:
    """By a process of its own, whose workers have the ring of this project and nothing else of it."""
    found = directory / f"overlap-{model}.json"
    sized = ["--bucket-mb", str(OVERLAP_BUCKETS_MB[model]), "--rounds", str(sizes.overlap), "--block", str(sizes.block)]
    command = [sys.executable, "-m", "tests.bench.overlap", *sized, "--json", str(found)]
    environment = {"BENCH_MODEL": model, **KEEP_MEMORY}
    with Command(command, directory / f"overlap-{model}.out", environment=environment, cwd=contenders.ROOT) as running:
        code = running.process.wait(OVERLAP_S)
        say(running.output.strip())
        if code:
            raise RuntimeError(f"tests.bench.overlap ended with {code}")
    by_way: dict[str, list[float]] = json.loads(found.read_bytes())
    return by_way


def ddp(name: str, directory: Path, workers: int, settings: dict[str, str]) -> Start:
    return partial(contenders.ddp, name, directory, workers, settings)


def elastic(name: str, directory: Path, workers: int, reduction: str, settings: dict[str, str]) -> Start:
    return partial(contenders.elastic, directory, workers, reduction, *NO_COPIES, name=name, settings=settings)


def run(starts: Sequence[Start], model: str, workers: int, shards: int, rounds: int, block: int) -> Part:
    resident: dict[int, int] = {}
    peak_bytes: dict[str, int] = {}
    sent_bytes: dict[str, float] = {}

    def at_start(job: Contender) -> None:
        resident.update({pid: now for pid, (now, _) in job.memory().items()})

    def at_end(job: Contender) -> None:
        peak_bytes[job.name] = max(most - resident[pid] for pid, (_, most) in job.memory().items())
        if counts := job.sent():
            sent_bytes[job.name] = statistics.fmean(count / steps for steps, count in counts.values())

    what = f"{model}, {workers} workers, {shards} shards"
    step_s = take_turns(what, starts, workers, rounds, say, block, at_start, at_end)
    return Part(model, workers, shards, step_s, peak_bytes, sent_bytes)


# ------------------------------------------------------------------------------------------------ the report


def rows_of(found: Measured) -> list[Row]:
    rows: list[Row] = []
    for part in found.compared:
        rows += compared_rows(part)
    for part in found.compared:
        rows += memory_rows(part)
    rows += bucket_rows(found.buckets)
    for part in found.shards:
        what = f"MLP, 3 workers, {part.shards} shards"
        rows.append(ratio_row(what, part, EXACT, KEEPING))
        rows.append(sent_row(what, part, EXACT))
    for model, by_way in found.overlap.items():
        rows += overlap_rows(f"{title(model)}, 2 workers, bare ring", by_way)
    return rows


def compared_rows(part: Part) -> list[Row]:
    what = f"{title(part.model)}, {part.workers} workers"
    rows = [time_row(f"{what}: {name}", of) for name, of in part.step_s.items()]
    rows += [ratio_row(what, part, name, BASELINE) for name in (NULL, KEEPING)]
    for name in (EXACT, NATIVE):
        rows.append(ratio_row(what, part, name, BASELINE, BARS[name] if part.workers == 2 else None))
        rows.append(ratio_row(what, part, name, KEEPING))
    return [*rows, *(sent_row(what, part, name) for name in (EXACT, NATIVE))]


def time_row(what: str, step_s: Sequence[float]) -> Row:
    spread = f"{min(step_s) * MS:.0f} to {max(step_s) * MS:.0f} ms"
    return Row(what, f"{statistics.median(step_s) * MS:.0f} ms", spread)


def ratio_row(what: str, part: Part, name: str, baseline: str, bar: float | None = None) -> Row:
    interval = median_interval(ratios(part.step_s[name], part.step_s[baseline]))
    wanted = "" if bar is None else target(interval.low <= bar, f"lower end <= {bar:.2f}")
    return Row(f"{what}: {name} / {baseline}", *shown_ratio(interval), wanted)


def bucket_rows(part: Part) -> list[Row]:
    rows = []
    for name, of in part.step_s.items():
        row = time_row(f"{title(part.model)}, {part.workers} workers: {name}", of)
        rows.append(replace(row, spread=f"{row.spread}; peak memory {part.peak_bytes[name] / 2**20:.0f} MiB"))
    return rows


def overlap_rows(what: str, by_way: dict[str, list[float]]) -> list[Row]:
    """Below 1, the step is shorter with the overlap."""
    off = by_way[overlap.AFTERWARDS]
    return [
        time_row(f"{what}: reduction after backward, as it is", off),
        time_row(f"{what}: reduction overlapped with backward", by_way[overlap.OVERLAPPED]),
        *(
            Row(f"{what}: {shown}", *shown_ratio(median_interval(ratios(by_way[way], off))))
            for way, shown in ((overlap.OVERLAPPED, "overlapped / after"), (overlap.AGAIN, "after again / after"))
        ),
    ]


def needed(shards: int) -> float:
    """What a worker of this project needs, in gradients: docs/performance.md, *Memory*. shards: of a worker."""
    momentum, gradients, results = 1, 2, 2
    return momentum + gradients + max(1.0, math.log2(shards)) + results


def memory_rows(part: Part) -> list[Row]:
    """What DDP needs beyond its own formula is activations and the like, which this project needs too."""
    one = ELEMENTS[part.model] * 4
    wanted = needed(part.shards // part.workers)
    rest = part.peak_bytes[KEEPING] / one - DDP_GRADIENTS
    formula = f"; formula {wanted:g} N, with DDP's rest {wanted + rest:.1f} N"
    return [
        Row(
            f"{title(part.model)}, {part.workers} workers: peak memory of a worker: {name}",
            f"{peak / 2**20:.0f} MiB",
            f"{peak / one:.1f} N, N = {one / 2**20:.0f} MiB{formula if name in BARS else ''}",
        )
        for name, peak in part.peak_bytes.items()
        if name != NULL
    ]


def sent_row(what: str, part: Part, name: str) -> Row:
    """Patarasuk & Yuan 2009: no algorithm sends less than 2 (P - 1) / P of the data."""
    bound = 2 * (part.workers - 1) / part.workers * ELEMENTS[part.model] * 4
    return Row(
        f"{what}: bytes a worker sends a step: {name}",
        f"{part.sent_bytes[name] / 1e6:.2f} MB",
        f"{part.sent_bytes[name] / bound:.4f} of 2 (P - 1) / P N = {bound / 1e6:.2f} MB",
    )


def title(model: str) -> str:
    return {"mlp": "MLP", "transformer": "transformer"}[model]


def summary(found: Measured) -> str:
    """The last line, for scripts: of the model that does worse, with two workers."""
    worst = {
        name: max(
            median_interval(ratios(part.step_s[name], part.step_s[BASELINE])).median
            for part in found.compared
            if part.workers == 2
        )
        for name in (EXACT, NATIVE)
    }
    return f"step: exact={worst[EXACT]:.3f} allreduce={worst[NATIVE]:.3f}"


def notes() -> list[str]:
    """What a reader has to know to judge the table."""
    return [
        f"The MLP has {ELEMENTS['mlp'] / 1e6:.1f} million float32 parameters in 8 tensors and micro-batches of "
        f"{work.MICRO_BATCH} samples; the transformer (4 layers of 256) {ELEMENTS['transformer'] / 1e6:.1f} million in "
        f"51 and micro-batches of {work.SEQUENCES} sequences of {work.LENGTH} tokens. 8 micro-batches (shards) a step "
        "where nothing else is said, SGD with momentum, one torch thread a worker. Losses are compared.",
        "A ratio compares blocks that were measured one after the other. The table has the median of the ratios and "
        "its distribution-free interval (order statistics). DDP against DDP shows the noise. Targets hold where each "
        "worker has its own core: with two workers.",
        f'"{KEEPING}" is DDP with an allocator that does not return freed gradients to the kernel '
        f"({', '.join(KEEP_MEMORY)}), which `elastic run` sets for its workers. Bucket sizes, three "
        "workers and the overlap use it too.",
        "Peak memory is VmHWM at the end minus VmRSS before the first step, when the model is built and the optimizer "
        "has no state yet. The section Memory has the formula, without activations and memory that malloc cannot use "
        f"again. DDP's rest is the memory of '{KEEPING}' beyond its own {DDP_GRADIENTS} N of momentum, gradients and "
        "buckets.",
        "Overlap: the same model over the ring of elastic-ring without its fault tolerance, once as in the product and "
        "once with buckets that are sent while the last backward is running. Within one machine `--overlap auto` is "
        "off: docs/decisions/overlap.md. A ratio below 1 would be a gain.",
        "Bytes are counted where they leave the process, with frames and headers, for all steps and the start.",
    ]


if __name__ == "__main__":
    sys.exit(main())
