"""Measures what elastic.keep adds to a step, and how much memory it takes.

    python -m tests.bench.kept_cost [--tensors 300] [--width 256] [--fsdp] [--step-ms 200] [--pairs 30] [--json FILE]

One process trains with one thread, so another processor is free for the copies. Steps with and without done()
alternate in it, in random order: in a pair, 4 steps behind each other are kept, and 4 are not. Before each of them is
another step of its kind, so that each of the 4 runs beside the copy of the step before it. The CPU time of the script's
thread is measured too: it is that of done() and of slower memory beside the copy, and other programs change it less.
How much slower a step is while another process computes tells whether the other processor is a core of its own, or the
second thread of the same core: then each millisecond of the copy costs the script a part of one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import fully_shard

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
    """plain_ms, kept_ms: a step of each block, on average; plain_cpu_ms, kept_cpu_ms: CPU time of the script's thread.
    script_ms: of these, in done(). copy_cpu_ms: CPU time of the copy's thread, for each kept step. beside: in pairs, a
    step beside a process that computes, divided by a step alone."""

    tensors: int
    state_bytes: int
    memory_bytes: int
    plain_ms: list[float]
    kept_ms: list[float]
    plain_cpu_ms: list[float]
    kept_cpu_ms: list[float]
    script_ms: list[float]
    copy_cpu_ms: list[float]
    beside: list[float]

    @property
    def added(self) -> list[float]:
        """To a step, of each pair."""
        return [kept / plain - 1.0 for plain, kept in zip(self.plain_ms, self.kept_ms, strict=True)]

    @property
    def added_cpu(self) -> list[float]:
        return [kept / plain - 1.0 for plain, kept in zip(self.plain_cpu_ms, self.kept_cpu_ms, strict=True)]

    @property
    def by_formula(self) -> float:
        """The memory that it takes, as a multiple of the formula."""
        return self.memory_bytes / (COPIES * self.state_bytes)


class Training:
    """A network of square layers with AdamW. A step has as many forward and backward passes as make it long enough."""

    def __init__(self, tensors: int, width: int, step_ms: float, *, fsdp: bool) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(*(nn.Linear(width, width) for _ in range(tensors // 2)))
        if fsdp:
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
            fully_shard(self.model)
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


def timed(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Milliseconds of one call."""
    begun = clock()
    call()
    return 1e3 * (clock() - begun)


def measure(tensors: int, width: int, step_ms: float, pairs: int, *, fsdp: bool = False) -> Figures:
    torch.set_num_threads(1)
    with memory_directory() as memory:
        place = KeptPlace(memory, RoundNumber(0, 1))
        os.environ.update(RANK | place.to_environment())
        training, dice = Training(tensors, width, step_ms, fsdp=fsdp), random.Random(0)
        kept = elastic.keep(training.model, training.optimizer)
        script_ms: list[float] = []
        copy_cpu_ms: list[float] = []
        found: dict[bool, list[float]] = {False: [], True: []}
        cpu: dict[bool, list[float]] = {False: [], True: []}

        def steps(count: int, *, keeps: bool) -> None:
            for _ in range(count):
                training.step()
                if keeps:
                    script_ms.append(timed(kept.done, time.thread_time))

        for _ in range(pairs):
            for keeps in dice.sample((False, True), 2):
                steps(1, keeps=keeps)
                begun, all_begun = time.thread_time(), time.process_time()
                found[keeps].append(timed(lambda keeps=keeps: steps(BLOCK, keeps=keeps)) / BLOCK)  # type: ignore[misc]
                cpu[keeps].append(1e3 * (time.thread_time() - begun) / BLOCK)
                kept.wait()
                if keeps:
                    others_s = time.process_time() - all_begun - (time.thread_time() - begun)
                    copy_cpu_ms.append(1e3 * others_s / BLOCK)
        files = directory_of(memory, place.round).iterdir()
        used = sum(512 * path.stat().st_blocks for path in files)
        times = found[False], found[True], cpu[False], cpu[True], script_ms, copy_cpu_ms, slower_beside(training.step)
        return Figures(tensors, training.state_bytes, used, *times)


def slower_beside(step: Callable[[], None]) -> list[float]:
    """A step while another process computes, divided by one while none does, in pairs."""
    ratios = []
    for _ in range(10):
        alone = timed(step)
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
            try:
                time.sleep(0.2)  # it has begun
                ratios.append(timed(step) / alone)
            finally:
                other.kill()
    return ratios


def rows_of(found: Figures) -> list[Row]:
    at = f"{found.tensors} tensors, {found.state_bytes / 1e6:.0f} MB of state"
    count = f"{len(found.plain_ms)} pairs"
    wall, cpu = statistics.median(found.added), statistics.median(found.added_cpu)
    return [
        Row(f"{at}: a step that is not kept", f"{statistics.median(found.plain_ms):.1f} ms", count),
        Row(
            f"{at}: added by done()",
            f"{100 * wall:.1f} %",
            f"{quartiles(found.added)}, {count}",
            report.target(wall <= ADDED_MAX, f"at most {100 * ADDED_MAX:g} %"),
        ),
        Row(f"{at}: added to the CPU time of the script's thread", f"{100 * cpu:.1f} %", quartiles(found.added_cpu)),
        Row(f"{at}: done(), CPU time of the script's thread", f"{statistics.median(found.script_ms):.1f} ms"),
        Row(f"{at}: the copy, CPU time of its thread", f"{statistics.median(found.copy_cpu_ms):.1f} ms"),
        Row("a step beside a process that computes / alone", f"{statistics.median(found.beside):.2f}", "10 pairs"),
        Row(
            f"{at}: memory of the segments",
            f"{found.memory_bytes / 1e6:.0f} MB",
            f"{found.by_formula:.3f} times {COPIES} times the state",
            report.target(abs(found.by_formula - 1.0) <= MEMORY_MAX, f"within {100 * MEMORY_MAX:g} %"),
        ),
    ]


def quartiles(added: Sequence[float]) -> str:
    lowest, _, highest = statistics.quantiles(added, n=4)
    return f"quartiles {100 * lowest:.1f} to {100 * highest:.1f} %"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.kept_cost")
    parser.add_argument("--tensors", type=int, default=300, help="parameters of the model (default %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="of its layers (default %(default)s)")
    parser.add_argument("--fsdp", action="store_true", help="with FSDP2, in a world of one")
    parser.add_argument("--step-ms", type=float, default=200.0, help="(default %(default)s)")
    parser.add_argument("--pairs", type=int, default=30, help="(default %(default)s)")
    parser.add_argument("--json", type=Path, help="where all figures go")
    options = parser.parse_args(arguments)
    found = measure(options.tensors, options.width, options.step_ms, options.pairs, fsdp=options.fsdp)
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": report.machine(), **asdict(found)}, indent=1) + "\n")
    print(report.table(rows_of(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
