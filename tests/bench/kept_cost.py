"""Measures what elastic.keep adds to a step, and how much memory it takes.

    python -m tests.bench.kept_cost [--tensors 300] [--width 256] [--step-ms 200] [--pairs 30] [--json FILE]

One process trains with one thread, so another processor is free for the copies. Steps with and without done()
alternate in it, in random order: in a pair, 4 steps behind each other are kept, and 4 are not. Before each of them is
another step of its kind, so that each of the 4 runs beside the copy of the step before it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

import elastic
from runtime.recovery.kept.choice import RoundNumber
from runtime.recovery.kept.place import KeptPlace, directory_of
from tests.bench import report
from tests.bench.report import Row
from tests.memory_directory import memory_directory

BLOCK = 4
"""Steps of each kind in a pair."""
ADDED_MAX = 0.02
MEMORY_MAX = 0.05
COPIES = 3
"""Of the state, as docs/keep.md says."""
RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}


@dataclass(frozen=True)
class Figures:
    """plain_ms, kept_ms: a step of each block, on average. script_ms: CPU time of the script's thread in done()."""

    tensors: int
    state_bytes: int
    memory_bytes: int
    plain_ms: list[float]
    kept_ms: list[float]
    script_ms: list[float]

    @property
    def added(self) -> float:
        """Of a step, as the median of the pairs."""
        return statistics.median(kept / plain - 1.0 for plain, kept in zip(self.plain_ms, self.kept_ms, strict=True))

    @property
    def by_formula(self) -> float:
        """The memory that it takes, as a multiple of the formula."""
        return self.memory_bytes / (COPIES * self.state_bytes)


class Training:
    """A network of square layers with AdamW. A step has as many forward and backward passes as make it long enough."""

    def __init__(self, tensors: int, width: int, step_ms: float) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(tensors // 2)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=True)
        self.batch = torch.randn(16, width)
        self.passes = 1
        self.step()
        times = []
        for self.passes in (1, 3):
            times.append(min(timed(self.step) for _ in range(5)))
        each_ms = (times[1] - times[0]) / 2
        self.passes = max(1, round((step_ms - times[0]) / each_ms) + 1)

    def step(self) -> None:
        self.optimizer.zero_grad()
        for _ in range(self.passes):
            self.model(self.batch).square().mean().backward()
        self.optimizer.step()

    @property
    def state_bytes(self) -> int:
        """Of weights and moments."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return sum(one.nbytes for one in [*self.model.parameters(), *moments])


def timed(call: Callable[[], object]) -> float:
    """Milliseconds of one call."""
    begun = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begun)


def measure(tensors: int, width: int, step_ms: float, pairs: int) -> Figures:
    torch.set_num_threads(1)
    with memory_directory() as memory:
        place = KeptPlace(memory, RoundNumber(0, 1))
        os.environ.update(RANK | place.to_environment())
        training, dice = Training(tensors, width, step_ms), random.Random(0)
        kept = elastic.keep(training.model, training.optimizer)
        script_ms: list[float] = []
        found: dict[bool, list[float]] = {False: [], True: []}

        def steps(count: int, *, keeps: bool) -> None:
            for _ in range(count):
                training.step()
                if keeps:
                    begun = time.thread_time()
                    kept.done()
                    script_ms.append(1e3 * (time.thread_time() - begun))

        for _ in range(pairs):
            for keeps in dice.sample((False, True), 2):
                steps(1, keeps=keeps)
                found[keeps].append(timed(lambda keeps=keeps: steps(BLOCK, keeps=keeps)) / BLOCK)  # type: ignore[misc]
                kept.wait()
        files = directory_of(memory, place.round).iterdir()
        used = sum(512 * path.stat().st_blocks for path in files)
        return Figures(tensors, training.state_bytes, used, found[False], found[True], script_ms)


def rows_of(found: Figures) -> list[Row]:
    at = f"{found.tensors} tensors, {found.state_bytes / 1e6:.0f} MB of state"
    lowest, _, highest = statistics.quantiles(
        [100 * (kept / plain - 1.0) for plain, kept in zip(found.plain_ms, found.kept_ms, strict=True)], n=4
    )
    count = f"{len(found.plain_ms)} pairs"
    return [
        Row(f"{at}: a step that is not kept", f"{statistics.median(found.plain_ms):.1f} ms", count),
        Row(
            f"{at}: added by done()",
            f"{100 * found.added:.1f} %",
            f"quartiles {lowest:.1f} to {highest:.1f} %, {count}",
            report.target(found.added <= ADDED_MAX, f"at most {100 * ADDED_MAX:g} %"),
        ),
        Row(f"{at}: done(), CPU time of the script's thread", f"{statistics.median(found.script_ms):.1f} ms"),
        Row(
            f"{at}: memory of the segments",
            f"{found.memory_bytes / 1e6:.0f} MB",
            f"{found.by_formula:.3f} times {COPIES} times the state",
            report.target(abs(found.by_formula - 1.0) <= MEMORY_MAX, f"within {100 * MEMORY_MAX:g} %"),
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.kept_cost")
    parser.add_argument("--tensors", type=int, default=300, help="parameters of the model (default %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="of its layers (default %(default)s)")
    parser.add_argument("--step-ms", type=float, default=200.0, help="(default %(default)s)")
    parser.add_argument("--pairs", type=int, default=30, help="(default %(default)s)")
    parser.add_argument("--json", type=Path, help="where all figures go")
    options = parser.parse_args(arguments)
    found = measure(options.tensors, options.width, options.step_ms, options.pairs)
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": report.machine(), **asdict(found)}, indent=1) + "\n")
    print(report.table(rows_of(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
