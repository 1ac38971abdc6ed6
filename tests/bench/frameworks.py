"""Measures what a healthy step of a framework's own loop costs in place, beside the same script under torchrun.

    python -m tests.bench.frameworks [--quick] [--rounds 24] [--json FILE]

Two workers with two ranks beside torchrun with two processes, in turns, in blocks of steps of one run. --quick is a
smoke run which leaves docs/performance.md as it is.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tests.bench import report
from tests.bench.contenders import SCRIPTS, Contender
from tests.bench.healthy import NO_COPIES, Start, take_turns
from tests.bench.intervals import median_interval, ratios
from tests.bench.ranks import Figures
from tests.bench.recovery import MS, parse, say, shown_ratio
from tests.bench.report import Bench, Row, target

BENCH = Bench("frameworks")
WORKERS = 2
TORCHRUN, AGAIN, IN_PLACE = "torchrun", "torchrun again", "in place"
FRAMEWORKS = {
    "hf": "train_trainer.py",
    "accelerate": "train_accelerate.py",
    "lightning": "train_lightning.py",
    "keras": "train_keras.py",
}
"""Name in the last line -> script."""
RATIO_MAX = 1.05
"""Of the lower end of the interval of in place / torchrun."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments, BENCH)
    with BENCH.directory(writes=not options.quick) as directory:
        measured = {name: measure(directory / name, script, options.rounds) for name, script in FRAMEWORKS.items()}
    rows = [row for name, step_s in measured.items() for row in rows_of(name, step_s)]
    figures = {"healthy_step_s": measured}
    BENCH.publish(figures, rows, notes(), f"--rounds {options.rounds}", to=options.json, writes=not options.quick)
    print("frameworks: " + " ".join(f"{name}={ratio(step_s):.3f}" for name, step_s in measured.items()), flush=True)
    return 0 if options.quick else len(report.missed(rows)) > 0


def torchrun(name: str, directory: Path, script: str) -> Contender:
    """The script as its user starts it."""
    words = ["--standalone", f"--nproc-per-node={WORKERS}", str(SCRIPTS / script), str(directory / "output")]
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    return Contender(name, directory, [command], {"HF_HUB_OFFLINE": "1"})


def in_place(directory: Path, script: str) -> Contender:
    """The same file under `elastic run --ranks`."""
    words = ["--workers", str(WORKERS), "--ranks", str(WORKERS), "--job-dir", str(directory / "job"), "--quiet"]
    arguments = [*words, *NO_COPIES, str(SCRIPTS / script), str(directory / "output")]
    command = [sys.executable, "-m", "elastic.cli", "run", *arguments]
    return Contender(IN_PLACE, directory, [command], {"HF_HUB_OFFLINE": "1"})


def measure(directory: Path, script: str, rounds: int) -> Figures:
    """By contender, the mean step of each block in seconds."""
    starts: list[Start] = [
        partial(torchrun, TORCHRUN, directory / "torchrun", script),
        partial(torchrun, AGAIN, directory / "again", script),
        partial(in_place, directory / "elastic", script),
    ]
    return take_turns(script.removesuffix(".py"), starts, WORKERS, rounds, say)


def ratio(step_s: Figures) -> float:
    """In place / torchrun, the median of the pairs."""
    return statistics.median(ratios(step_s[IN_PLACE], step_s[TORCHRUN]))


def rows_of(name: str, step_s: Figures) -> list[Row]:
    rows = []
    for contender, of in step_s.items():
        spread = f"{min(of) * MS:.0f} to {max(of) * MS:.0f} ms"
        rows.append(Row(f"{name}, healthy step: {contender}", f"{statistics.median(of) * MS:.0f} ms", spread))
    again = median_interval(ratios(step_s[AGAIN], step_s[TORCHRUN]))
    ours = median_interval(ratios(step_s[IN_PLACE], step_s[TORCHRUN]))
    wanted = target(ours.low <= RATIO_MAX, f"lower end <= {RATIO_MAX}")
    return [
        *rows,
        Row(f"{name}: {AGAIN} / {TORCHRUN}", *shown_ratio(again)),
        Row(f"{name}: {IN_PLACE} / {TORCHRUN}", *shown_ratio(ours), wanted),
    ]


def notes() -> list[str]:
    """What a reader has to know to judge the table."""
    return [
        "GPT-2 with 3.5 M parameters, 4 sequences of 64 words a rank, 2 ranks, 2 workers or 2 processes; no logging, "
        "no snapshots. hf: by `transformers.Trainer`; accelerate: by a loop of its own; lightning: by Lightning's "
        "`Trainer`; keras: by `fit()`, and under torchrun, as `fit()` has no data parallelism on torch, by a loop with "
        "`DistributedDataParallel` over the same model."
    ]


if __name__ == "__main__":
    sys.exit(main())
