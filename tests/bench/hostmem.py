"""What a snapshot in memory costs: `python -m tests.bench.hostmem`.

The job and the blocks of steps of checkpoints.py, with snapshots instead of checkpoints: how long the loop stands
still for one, and how much longer the steps of its block take. Both are of a job that keeps all processors busy, so
that what the side threads compute is taken from the training, as on a machine without accelerators.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from chaos_tests.support.processes import exit_on_signals
from elastic.checkpoints.policy import SNAPSHOT_LEAST_S
from tests.bench.checkpoints import Figures, run_blocks

WORKERS = 2


def measure(home: Path, megabytes: int, snapshots: int, block: int, say: Callable[[str], None]) -> Figures:
    """So many snapshots of a state of that size, and one before them. home: for the job, on any file system."""
    options = ["--checkpoint-every", "off", "--snapshot-every", f"{2 * block} steps"]
    return run_blocks("snapshot", home, WORKERS, megabytes, snapshots, block, options, say)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.hostmem")
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--snapshots", type=int, default=12)
    parser.add_argument("--block", type=int, default=12, help="steps with a snapshot, and steps without")
    options = parser.parse_args()
    exit_on_signals()
    with tempfile.TemporaryDirectory(prefix="elastic-hostmem-") as home:
        found = measure(Path(home) / "job", options.megabytes, options.snapshots, options.block, print)
    extra_s = statistics.median(found.extra_s)
    print(f"{options.megabytes} MB over {WORKERS} workers, step {1000 * found.step_s:.0f} ms")
    print(f"stall  median {statistics.median(found.stalls_ms):.1f} ms, worst {max(found.stalls_ms):.1f} ms")
    print(f"from taking to complete  median {statistics.median(found.seconds_s):.2f} s")
    print(f"extra time of the steps meanwhile  median {1000 * extra_s:.0f} ms, {extra_s / SNAPSHOT_LEAST_S:.2%} of 5 s")
    print(f"hostmem: snap_stall_ms={statistics.median(found.stalls_ms):.1f} snap_extra_s={extra_s:.3f}")


if __name__ == "__main__":
    main()
