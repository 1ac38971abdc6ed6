"""Measures what a shard and a tensor cost in this project itself, on models that compute nearly nothing: CPU time.

    python -m tests.bench.tiny [--small] [--no-targets]

One process each trains with a plain loop, with DDP in a world of one, and alone under `elastic.join()`; the three are
forks of one process and compute in turns. Exit code 1 if a target is missed. --small is a smoke run: no target is
judged, and docs/performance.md stays as it is.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import elastic
from tests.bench import contenders, report
from tests.bench.intervals import median_interval, ratios
from tests.bench.recovery import MS, say, shown_ratio
from tests.bench.report import Bench, Row, target

BENCH = Bench("tiny")
SHARDS, SAMPLES, CLASSES = 8, 8, 10
"""Micro-batches of a step, and their samples."""
PLAIN, DDP, EXACT = "plain loop", "torch DDP", "elastic exact"
TINY, DEEP = "10 thousand parameters", "300 tensors"
TINY_MAX, DEEP_MAX_MS = 1.25, 1.5
"""Of elastic / DDP, and of elastic - DDP."""
ROUNDS = 24
BLOCKS = {TINY: 100, DEEP: 10}
"""Steps that one contender computes before the next one does."""
WARM_UP_BLOCKS = 2
Figures = dict[str, list[float]]


def build(model: str) -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    """The model, its optimizer and inputs of shape (SHARDS, SAMPLES, features)."""
    torch.manual_seed(1)
    if model == TINY:
        module = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))
        features = 64
    else:
        module = nn.Sequential(*(layer for _ in range(150) for layer in (nn.Linear(8, 8), nn.ReLU())))
        features = 8
    return module, torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9), torch.randn(SHARDS, SAMPLES, features)


def loss_of(module: nn.Module, inputs: Tensor) -> Tensor:
    outputs = module(inputs)
    return F.cross_entropy(outputs, torch.zeros(SAMPLES, dtype=torch.int64))


def plain(model: str) -> Iterator[float]:
    """Yields the loss of each step, as the next two."""
    module, optimizer, inputs = build(model)
    while True:
        total = 0.0
        for shard in range(SHARDS):
            loss = loss_of(module, inputs[shard])
            (loss / SHARDS).backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        yield total / SHARDS


def ddp(model: str) -> Iterator[float]:
    dist.init_process_group("gloo", f"file://{os.getcwd()}/store-{os.getpid()}", rank=0, world_size=1)
    module, optimizer, inputs = build(model)
    wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True)
    while True:
        total = 0.0
        for shard in range(SHARDS):
            with nullcontext() if shard == SHARDS - 1 else wrapped.no_sync():
                loss = loss_of(wrapped, inputs[shard])
                (loss / SHARDS).backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        yield total / SHARDS


def exact(model: str) -> Iterator[float]:
    job = elastic.join()
    module, optimizer, inputs = build(model)
    job.register(model=module, optimizer=optimizer)
    for step in job.steps(shards=SHARDS, total=sys.maxsize):
        for shard in step:
            loss = loss_of(module, inputs[shard.index])
            loss.backward()
            step.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        yield step.metrics["loss"]


CONTENDERS: dict[str, Callable[[str], Iterator[float]]] = {PLAIN: plain, DDP: ddp, EXACT: exact}


def train(contender: str, model: str, driver: Connection) -> None:
    """In a process of its own: run as many steps as the driver says, and tell the CPU time of a step and the loss."""
    torch.set_num_threads(1)
    steps = CONTENDERS[contender](model)
    while count := driver.recv():
        begun_s = time.process_time()
        losses = [next(steps) for _ in range(count)]
        driver.send(((time.process_time() - begun_s) / count, losses[-1]))
    os._exit(0)


def measure(model: str, rounds: int, block: int) -> Figures:
    """CPU seconds of a step by contender, per block. Raises AssertionError if they do not train the same."""
    context = get_context("fork")
    drivers: dict[str, Connection] = {}
    workers = []
    for name in CONTENDERS:
        drivers[name], theirs = context.Pipe()
        workers.append(context.Process(target=train, args=(name, model, theirs), daemon=True))
        workers[-1].start()
        theirs.close()
    step_s: Figures = {name: [] for name in drivers}
    for number in range(-WARM_UP_BLOCKS, rounds):
        names = list(drivers)
        losses = []
        for name in names[number % len(names) :] + names[: number % len(names)]:
            drivers[name].send(block)
            cpu_s, loss = drivers[name].recv()
            losses.append(loss)
            if number >= 0:
                step_s[name].append(cpu_s)
        assert max(losses) - min(losses) <= 1e-4 * abs(max(losses)), f"they do not train the same: losses {losses}"
        if number >= 0:
            say(
                f"{model} {number + 1}/{rounds}: "
                + ", ".join(f"{name} {of[-1] * MS:.2f} ms" for name, of in step_s.items())
            )
    for driver in drivers.values():
        driver.send(0)
    for worker in workers:
        worker.join()
    return step_s


def rows_of(found: dict[str, Figures]) -> list[Row]:
    rows = []
    for model, step_s in found.items():
        for name, of in step_s.items():
            spread = f"{min(of) * MS:.2f} to {max(of) * MS:.2f} ms"
            rows.append(Row(f"{model}: {name}", f"{statistics.median(of) * MS:.2f} ms", spread))
        interval = median_interval(ratios(step_s[EXACT], step_s[DDP]))
        wanted = target(interval.median <= TINY_MAX, f"<= {TINY_MAX}") if model == TINY else ""
        rows.append(Row(f"{model}: {EXACT} / {DDP}", *shown_ratio(interval), wanted))
        for other in (PLAIN, DDP):
            more = median_interval([(a - b) * MS for a, b in zip(step_s[EXACT], step_s[other], strict=True)])
            wanted = target(more.median <= DEEP_MAX_MS, f"<= {DEEP_MAX_MS} ms") if (model, other) == (DEEP, DDP) else ""
            spread = f"{more.low:.2f} to {more.high:.2f} ms ({more.confidence:.0%} interval of {more.n} pairs)"
            rows.append(Row(f"{model}: {EXACT} - {other}", f"{more.median:.2f} ms", spread, wanted))
    return rows


def summary(rows: Sequence[Row]) -> str:
    """The last line, for scripts: the two figures that have a target."""
    tiny, tensors = (row.figure for row in rows if row.target)
    return f"tiny={tiny} tensors300={tensors.removesuffix(' ms')}"


def notes() -> list[str]:
    """What a reader has to know to judge the table."""
    return [
        f"CPU time of the process, one torch thread, SGD with momentum, {SHARDS} micro-batches (shards) of {SAMPLES} "
        "samples a step, whose losses are read. The small model has 9,344 parameters in 4 tensors; the deep one 150 "
        "layers of 8 features, 300 tensors.",
        "DDP runs with one process over gloo, with gradient_as_bucket_view, and with no_sync() except for the last "
        "micro-batch.",
        "The values are those of blocks of steps that were measured one after the other. The table has medians; for "
        "ratios and differences also their distribution-free interval (order statistics).",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = BENCH.parser()
    parser.add_argument("--no-targets", action="store_true", help="a missed target is no failure")
    options = parser.parse_args(arguments)
    rounds, blocks = (2, dict.fromkeys(BLOCKS, 3)) if options.small else (ROUNDS, BLOCKS)
    with BENCH.directory(writes=not options.small) as directory:
        os.chdir(directory)
        found = {model: measure(model, rounds, block) for model, block in blocks.items()}
        os.chdir(contenders.ROOT)
    rows = rows_of(found)
    BENCH.publish({}, rows, notes(), to=options.json, writes=not options.small)
    print(summary(rows), flush=True)
    return 1 if report.missed(rows) and not (options.no_targets or options.small) else 0


if __name__ == "__main__":
    sys.exit(main())
