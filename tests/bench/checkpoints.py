"""What a durable checkpoint costs: `python -m tests.bench.checkpoints`.

Three workers with a state of 500 MB take one every so many steps. The stall is what each worker says it stood still
for; the cost is how much longer the steps between taking and completing it took than the quiet ones, as a part of the
time between two checkpoints if one is taken every 30 s.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "bench" / "scripts" / "train_ballast.py"
WORKERS = 3
INTERVAL_S = 30.0


@dataclass(frozen=True, slots=True)
class Figures:
    """stalls_ms: of every worker and checkpoint; extra_s: of every checkpoint; seconds_s: from taking to completing."""

    stalls_ms: list[float]
    extra_s: list[float]
    seconds_s: list[float]
    step_s: float

    @property
    def cost(self) -> float:
        """Part of the throughput that a checkpoint every INTERVAL_S takes."""
        return statistics.median(self.extra_s) / INTERVAL_S


def figures(ended_s: Sequence[float], journal: Sequence[dict[str, Any]], every: int) -> Figures:
    """ended_s: when each step ended, in seconds of the clock of the journal's t_mono_ns. The first is left out: its
    memory is new."""
    lengths = [later - earlier for earlier, later in pairwise(ended_s)]
    written = [line for line in journal if line["event"] == "checkpoint_part_written"]
    complete = {
        line["entry"]: line["t_mono_ns"] / 1e9 for line in journal if line["event"] == "checkpoint_complete"
    }  # the last of those who said so
    windows: list[tuple[float, float]] = []
    for entry, end_s in list(sorted(complete.items()))[1:]:
        own = [line for line in written if line["entry"] == entry]
        begun_s = min(line["t_mono_ns"] / 1e9 - line["seconds"] - line["stall_ms"] / 1e3 for line in own)
        windows.append((begun_s, max([end_s, *(line["t_mono_ns"] / 1e9 for line in own)])))
    busy = [any(ended_s[n] < end and ended_s[n + 1] > begin for begin, end in windows) for n, _ in enumerate(lengths)]
    quiet_s = statistics.median(length for length, is_busy in zip(lengths, busy, strict=True) if not is_busy)
    extra_s = [
        sum(length - quiet_s for n, length in enumerate(lengths) if ended_s[n] < end and ended_s[n + 1] > begin)
        for begin, end in windows
    ]
    names = {entry for entry, _ in list(sorted(complete.items()))[1:]}
    stalls = [line["stall_ms"] for line in written if line["entry"] in names]
    return Figures(stalls, extra_s, [end - begin for begin, end in windows], quiet_s)


def measure(megabytes: int, checkpoints: int, every: int) -> Figures:
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as home:
        directory = Path(home) / "job"
        steps = (checkpoints + 1) * every + every // 2
        command = [sys.executable, "-m", "elastic.cli", "run", "--workers", str(WORKERS), "--quiet"]
        command += ["--job-dir", str(directory), "--checkpoint-every", f"{every} steps", "--keep", "last 1"]
        done = subprocess.run(
            [*command, str(SCRIPT), str(megabytes), str(steps)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        journal = [json.loads(text) for text in (directory / "journal.jsonl").read_text().splitlines()]
        return figures(json.loads(done.stdout.splitlines()[-1]), journal, every)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.checkpoints", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--checkpoints", type=int, default=8)
    parser.add_argument("--every", type=int, default=60, help="steps between two")
    options = parser.parse_args()
    found = measure(options.megabytes, options.checkpoints, options.every)
    print(f"{options.megabytes} MB over {WORKERS} workers, quiet step {1000 * found.step_s:.0f} ms")
    print(f"stall  median {statistics.median(found.stalls_ms):.1f} ms, worst {max(found.stalls_ms):.1f} ms")
    print(f"from taking to complete  median {statistics.median(found.seconds_s):.2f} s")
    print(f"extra time of the steps meanwhile  median {statistics.median(found.extra_s):.2f} s")
    print(f"checkpoints: ckpt_stall_ms={statistics.median(found.stalls_ms):.1f} ckpt_cost={found.cost:.4f}")


if __name__ == "__main__":
    main()
