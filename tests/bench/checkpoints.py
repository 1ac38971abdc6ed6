"""What a durable checkpoint costs: `python -m tests.bench.checkpoints`.

Three workers with a state of 500 MB keep all processors busy. Blocks of steps with a checkpoint at their beginning and
blocks without one take turns; each block with one is compared with the mean of the two beside it, so that a drift of
the machine falls out, and whatever a checkpoint costs later than its steps is in it: what is written back, what is
pruned. The cost is that difference as a part of the 30 s between two checkpoints.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos_tests.support.processes import exit_on_signals
from elastic.records.journal import read_all
from tests.bench import contenders

WORKERS = 3
INTERVAL_S = 30.0
WITHIN_S = 600.0
"""For all steps, on a machine that does other things too."""


@dataclass(frozen=True, slots=True)
class Figures:
    """stalls_ms: of every worker and checkpoint; extra_s: of every checkpoint, how much longer its block of steps took;
    seconds_s: from taking to completing; step_s: median of the blocks without one."""

    stalls_ms: list[float]
    extra_s: list[float]
    seconds_s: list[float]
    step_s: float

    @property
    def cost(self) -> float:
        """Part of the throughput that a checkpoint every INTERVAL_S takes."""
        return statistics.median(self.extra_s) / INTERVAL_S


def figures(
    ended_s: Sequence[float], journal: Sequence[dict[str, Any]], block: int, kind: str = "checkpoint"
) -> Figures:
    """From a run that takes a checkpoint before every second block. Raises RuntimeError for one that was not complete
    in its block. kind: what the events of the journal begin with.

    ended_s: when each step ended, from step 0 on, in seconds of the clock of the journal's t_mono_ns. The first
    checkpoint is left out: its memory is new.
    """

    def length_s(first: int) -> float:
        """Of the block that begins with this step."""
        return ended_s[first + block - 1] - ended_s[first - 1]

    written: dict[str, list[dict[str, Any]]] = {}
    for line in journal:
        if line["event"] == f"{kind}_part_written":
            written.setdefault(line["entry"], []).append(line)
    complete = {line["entry"]: line for line in journal if line["event"] == f"{kind}_complete"}
    taken = sorted((line["step"], entry, line["t_mono_ns"] / 1e9) for entry, line in complete.items())
    taken = [one for one in taken if one[0] + 2 * block <= len(ended_s)][1:]
    stalls_ms, extra_s, seconds_s, quiet_s = [], [], [], []
    for step, entry, complete_s in taken:
        if complete_s > ended_s[step + block - 1]:
            raise RuntimeError(f"the {kind} before step {step} was not complete {block} steps later: try more")
        beside_s = [length_s(step - block), length_s(step + block)]
        extra_s.append(length_s(step) - statistics.fmean(beside_s))
        quiet_s += beside_s
        stalls_ms += [line["stall_ms"] for line in written[entry]]
        begun_s = [line["t_mono_ns"] / 1e9 - line["seconds"] - line["stall_ms"] / 1e3 for line in written[entry]]
        seconds_s.append(complete_s - min(begun_s))
    return Figures(stalls_ms, extra_s, seconds_s, statistics.median(quiet_s) / block)


def measure(home: Path, megabytes: int, checkpoints: int, block: int, say: Callable[[str], None]) -> Figures:
    """home: on the file system that is measured. So many checkpoints, and one before them."""
    options = ["--checkpoint-every", f"{2 * block} steps", "--keep", "last 1", "--snapshot-every", "off"]
    return run_blocks("checkpoint", home, WORKERS, megabytes, checkpoints, block, options, say)


def run_blocks(
    kind: str,
    home: Path,
    workers: int,
    megabytes: int,
    count: int,
    block: int,
    options: Sequence[str],
    say: Callable[[str], None],
) -> Figures:
    """A job that takes `count` of that kind, and one before them, one in every other block of steps. options: of
    `elastic run`, that make it do so."""
    with contenders.ballast(f"{kind}s", home, workers, megabytes, 0.0, *options) as job:
        steps = (2 * count + 4) * block
        say(f"{kind}s: {steps} steps with {count + 1} of {megabytes} MB")
        job.gate.allow(steps)
        job.gate.await_stop(workers, WITHIN_S, job.check)
        stamps = next(iter(job.stamps().values()))
        journal = read_all(home / "job")
    return figures([stamp.t_ns / 1e9 for stamp in stamps], journal, block, kind=kind)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.checkpoints")
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--checkpoints", type=int, default=8)
    parser.add_argument("--block", type=int, default=32, help="steps with a checkpoint, and steps without")
    options = parser.parse_args()
    exit_on_signals()
    with tempfile.TemporaryDirectory(prefix="elastic-checkpoints-", dir=os.environ.get("BENCH_DIR")) as home:
        found = measure(Path(home) / "job", options.megabytes, options.checkpoints, options.block, print)
    print(f"{options.megabytes} MB over {WORKERS} workers, step {1000 * found.step_s:.0f} ms")
    print(f"stall  median {statistics.median(found.stalls_ms):.1f} ms, worst {max(found.stalls_ms):.1f} ms")
    print(f"from taking to complete  median {statistics.median(found.seconds_s):.2f} s")
    print(f"extra time of the steps meanwhile  median {statistics.median(found.extra_s):.2f} s")
    print(f"checkpoints: ckpt_stall_ms={statistics.median(found.stalls_ms):.1f} ckpt_cost={found.cost:.4f}")


if __name__ == "__main__":
    main()
