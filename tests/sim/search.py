"""Runs many seeds in several processes, and says what they reached. A failing seed is shrunk."""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from tests.sim import arms
from tests.sim.reach import Reach, judge, to_json, to_text
from tests.sim.shrink import fewest_faults
from tests.sim.taken import Tests
from tests.sim.wanted import EXCLUDED
from tests.sim.world import World

BATCH = 50
TOLD_S = 20.0


def search(schedules: int, processes: int, first: int, report: Path | None, limit: int | None = None) -> int:
    """schedules: so many of enough events. limit: at most so many seeds. Returns the exit code."""
    began_s = time.monotonic()
    reach, told_s = Reach(), began_s
    tests = Tests(sorted({why.test for why in EXCLUDED.values()}))
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for part in pool.imap_unordered(run_batch, _batches(first, limit)):
            reach.merge(part)
            for seed, why in part.failed:
                print(f"seed {seed}: {why}", file=sys.stderr, flush=True)
            if time.monotonic() >= told_s + TOLD_S:
                told_s = time.monotonic()
                print(f"{reach.schedules} schedules, {len(reach.failed)} failed", file=sys.stderr, flush=True)
            if reach.schedules >= schedules or len(reach.failed) >= 20:
                pool.terminate()
                break
    took_s = time.monotonic() - began_s
    verdict = judge(reach, arms.NAMES, tests.taken())
    if report is not None:
        report.write_text(json.dumps(to_json(reach, verdict, arms.NAMES, took_s), indent=1), encoding="utf-8")
    print(to_text(reach, verdict, arms.NAMES, took_s))
    if reach.failed:
        seed = min(seed for seed, _ in reach.failed)
        print("\n".join(fewest_faults(seed)))
    short = reach.schedules < schedules
    return int(bool(reach.failed or not verdict.holds or short))


def _batches(first: int, limit: int | None) -> Iterator[tuple[int, int]]:
    for start in count(first, BATCH):
        end = start + BATCH if limit is None else min(start + BATCH, first + limit)
        if start >= end:
            return
        yield start, end


def run_batch(seeds: tuple[int, int]) -> Reach:
    reach = Reach()
    for seed in range(*seeds):
        arms.forget()
        world = World(seed)
        try:
            world.run()
        except Exception as error:
            reach.failed.append((seed, f"{world.scene.name}: {type(error).__name__}: {str(error)[:300]}"))
            continue
        reach.add(world.scene.name, world.events, arms.taken(), world.changes, world.reached)
    return reach
