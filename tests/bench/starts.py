"""Measures what it takes to start workers: forked by the fork server against cold, in turns in one run.

    python -m tests.bench.starts [--rounds 12]

A start is timed from the decision to start to the return of `elastic.join()`, and to the end of the first step of an
optimizer; a first world from the decision to start the node's first worker until all have done that step, the fork
server's own imports included. CPU time is that of the worker alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.bench import report
from tests.bench.report import Row
from tests.live.nodes import PATIENCE_S, Node, Worker

SCRIPT = Path(__file__).parent / "scripts" / "start.py"
COMMAND = (sys.executable, str(SCRIPT))
WORLDS = (1, 2, 4)
WAYS = {"forked": True, "cold": False}
MARKS = ("joined", "stepped")

Figures = dict[str, list[float]]


async def start(node: Node) -> dict[str, float]:
    """Start one worker, and end it when it has told its figures: seconds, and MiB."""
    begun_ns = time.monotonic_ns()
    worker = node.start()
    await asyncio.wait_for(worker.spoke.wait(), PATIENCE_S)
    said = json.loads(worker.lines[0])
    await end([worker])
    seconds = {mark: (said[f"{mark}_ns"] - begun_ns) / 1e9 for mark in MARKS}
    return {**seconds, **{f"{mark} cpu": said[f"{mark}_cpu_s"] for mark in MARKS}}


async def first_world(home: Path, fork: bool, size: int) -> dict[str, float]:
    """A node's first workers, all at once: until the last has done its step, in seconds, and each one's MiB."""
    begun_ns = time.monotonic_ns()
    node = Node(home, COMMAND, fork)
    workers = [node.start() for _ in range(size)]
    for worker in workers:
        await asyncio.wait_for(worker.spoke.wait(), PATIENCE_S)
    said = [json.loads(worker.lines[0]) for worker in workers]
    shares_mb = [pss_mb((await worker.process).pid) for worker in workers]
    await end(workers)
    await node.close()
    return {"last": (max(one["stepped_ns"] for one in said) - begun_ns) / 1e9, "share": sum(shares_mb) / size}


def pss_mb(pid: int) -> float:
    """Its share of the memory it uses: pages of several processes count in parts."""
    return int(Path(f"/proc/{pid}/smaps_rollup").read_text().partition("\nPss:")[2].split()[0]) / 1024


async def end(workers: list[Worker]) -> None:
    for worker in workers:
        (await worker.process).signal(signal.SIGKILL)
    for worker in workers:
        await asyncio.wait_for(worker.status, PATIENCE_S)


async def measure(home: Path, rounds: int) -> tuple[dict[str, Figures], dict[tuple[int, str], Figures]]:
    nodes: dict[str, Node] = {}
    for way, fork in WAYS.items():
        (home / way).mkdir()
        nodes[way] = Node(home / way, COMMAND, fork)
    await nodes["forked"].await_nurseries(1)
    single: dict[str, Figures] = {way: {} for way in WAYS}
    for _ in range(rounds):
        for way, node in nodes.items():
            for name, value in (await start(node)).items():
                single[way].setdefault(name, []).append(value)
    for node in nodes.values():
        await node.close()
    worlds: dict[tuple[int, str], Figures] = {}
    for number in range(max(1, rounds // 4)):
        for size in WORLDS:
            for way, fork in WAYS.items():
                directory = home / f"{way}-{size}-{number}"
                directory.mkdir()
                for name, value in (await first_world(directory, fork, size)).items():
                    worlds.setdefault((size, way), {}).setdefault(name, []).append(value)
    return single, worlds


def rows(single: dict[str, Figures], worlds: dict[tuple[int, str], Figures]) -> list[Row]:
    found = []
    for name, what in (("joined", "start to elastic.join()"), ("stepped", "start to the first optimizer step")):
        for way in WAYS:
            found.append(row(f"{what}, {way}", single[way][name], "ms"))
            found.append(row(f"{what}, {way}: CPU", single[way][f"{name} cpu"], "ms"))
    for (size, way), figures in worlds.items():
        found.append(row(f"first world of {size}, {way}: all have stepped", figures["last"], "s"))
    for (size, way), figures in worlds.items():
        found.append(row(f"memory of each of {size} workers, {way}", figures["share"], "MiB"))
    return found


def row(what: str, values: list[float], unit: str) -> Row:
    scale, digits = {"ms": (1e3, 0), "s": (1, 2), "MiB": (1, 0)}[unit]
    wanted = (statistics.median(values), min(values), max(values))
    middle, least, most = (f"{scale * value:.{digits}f}" for value in wanted)
    return Row(what, f"{middle} {unit}", f"{least} to {most} {unit}, {len(values)} times")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.starts")
    parser.add_argument("--rounds", type=int, default=12, help="single starts of each kind")
    options = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="elastic-starts-"))
    try:
        single, worlds = asyncio.run(measure(home, options.rounds))
    finally:
        shutil.rmtree(home)
    facts = ", ".join(f"{name} {value}" for name, value in report.machine().items())
    print(f"`python -m tests.bench.starts --rounds {options.rounds}`: {facts}.\n")
    print(report.table(rows(single, worlds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
