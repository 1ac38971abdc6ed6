"""What a SIGKILL costs: a job of three workers, one killed at a random moment, measured from outside, alike for all.

A contender's own words are not used here: only the moment of the kill and the stamps of its training script.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tests.bench.contenders import Contender
from tests.bench.stamps import Stamp

WORKERS = 3
STEADY_STEPS = 6
"""Steps of the full world before a kill, and after its return."""
RECOVER_S = 180.0


@dataclass(frozen=True, slots=True)
class Kill:
    """step_s: median step of the full world before the kill. to_step_s: kill -> first step applied by the group that
    goes on. to_full_s: kill -> first step of all three again. pause_s: the survivors' longest time between two steps
    from that first step until the full world is steady again; 0 if nobody survives. lost_steps: applied before, and
    done again."""

    victim: str
    step_s: float
    to_step_s: float
    to_full_s: float
    pause_s: float
    lost_steps: int


def kill_one(job: Contender, dice: random.Random, before: Callable[[str], None] = lambda victim: None) -> Kill:
    """Let the job run, kill a random worker, wait for the full world, and let the job rest.

    before: told the victim just before the kill.
    """
    job.open()
    start = job.latest() + 1
    # Up to ten more steps: where the last checkpoint lies must not favour anybody.
    steady = start + STEADY_STEPS + dice.randrange(10)
    job.until(f"step {steady}", lambda: job.latest() >= steady and len(job.gate.workers) == WORKERS)
    workers = job.gate.workers
    step_s = median_step_s(job.stamps(), set(workers), start)
    time.sleep(dice.uniform(0, step_s))
    victim, pid = dice.choice(sorted(workers.items()))
    group = max(of[-1].group for of in job.stamps().values() if of)
    before(victim)
    killed_ns = time.monotonic_ns()
    os.kill(pid, signal.SIGKILL)

    def full_at() -> Stamp | None:
        return first_full(job.stamps(), {victim}, group)

    def steady_again() -> bool:
        full = full_at()
        return full is not None and job.latest() >= full.step + STEADY_STEPS and len(job.gate.workers) == WORKERS

    job.until(f"three workers again after the loss of {victim}", steady_again, RECOVER_S)
    job.rest(WORKERS)
    full = full_at()
    assert full is not None
    return judge(job.stamps(), victim, set(workers) - {victim}, group, killed_ns, full, step_s)


def judge(
    stamps: Mapping[str, Sequence[Stamp]],
    victim: str,
    survivors: set[str],
    group: int,
    killed_ns: int,
    full: Stamp,
    step_s: float,
) -> Kill:
    """Tell what one kill cost from the stamps around it. group: that of the stamps before it."""
    before = {name: max((s.step for s in of if s.t_ns < killed_ns), default=-1) for name, of in stamps.items()}
    applied = max(before.values())

    def is_late(name: str, step: int) -> bool:
        """A survivor that is not quite as far as others were: nothing was done for this step after the kill."""
        return name in survivors and before[name] < step <= applied

    after = [
        stamp
        for name, of in stamps.items()
        if name != victim
        for stamp in of
        if stamp.group > group and not is_late(name, stamp.step)
    ]
    first = min(after, key=lambda stamp: stamp.t_ns)
    pauses = [
        (later.t_ns - earlier.t_ns) / 1e9
        for name in survivors
        for earlier, later in pairwise(stamps[name])
        if earlier.group > group and earlier.t_ns >= first.t_ns and earlier.step <= full.step + STEADY_STEPS - 2
    ]
    return Kill(
        victim=victim,
        step_s=step_s,
        to_step_s=(first.t_ns - killed_ns) / 1e9,
        to_full_s=(full.t_ns - killed_ns) / 1e9,
        pause_s=max(pauses, default=0.0),
        lost_steps=max(0, applied - first.step + 1),
    )


def first_full(stamps: Mapping[str, Sequence[Stamp]], gone: set[str], group: int) -> Stamp | None:
    """The first step that a later group of all workers began."""
    found = (
        stamp
        for name, of in stamps.items()
        if name not in gone
        for stamp in of
        if stamp.began > group and stamp.world == WORKERS
    )
    return min(found, key=lambda stamp: stamp.t_ns, default=None)


def median_step_s(stamps: Mapping[str, Sequence[Stamp]], workers: set[str], start: int) -> float:
    """Over all steps since `start` of these workers. The job rested before `start`, so that step is left out."""
    return statistics.median(
        (later.t_ns - earlier.t_ns) / 1e9
        for name in workers
        for earlier, later in pairwise(stamps[name])
        if earlier.step >= start
    )
