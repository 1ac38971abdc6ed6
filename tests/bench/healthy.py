"""What a step costs while nothing happens: jobs of two workers that compute in turns, in short blocks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.bench import contenders
from tests.bench.contenders import Contender

WORKERS = 2
BLOCK_STEPS = 7
"""The first of them warms the caches up and is not measured."""
WARM_UP_BLOCKS = 2
LOSS_TOLERANCE = 1e-3
NO_COPIES = ("--checkpoint-every", "off", "--snapshot-every", "off")
"""DDP takes none, and most of the time a job stands at the turnstile: one that is due by the clock would fall into
every block. `make bench-state` measures what they cost."""


@dataclass(slots=True)
class Healthy:
    """step_s: by contender, the mean step of each block, in seconds; the n-th blocks ran one after another."""

    step_s: dict[str, list[float]] = field(default_factory=dict)


BASELINE = "torch DDP"
NULL = "torch DDP again"
KEEPING = "torch DDP, malloc keeps memory"
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
"""Makes glibc use the memory of freed gradients again, instead of asking the kernel for new pages in each step."""


def measure(directory: Path, rounds: int, reductions: Sequence[str], say: Callable[[str], None]) -> Healthy:
    """Raises AssertionError if the contenders do not train the same thing."""
    starts: list[Start] = [
        partial(contenders.ddp, BASELINE, directory / "ddp", WORKERS),
        partial(contenders.ddp, NULL, directory / "ddp-again", WORKERS),
        partial(contenders.ddp, KEEPING, directory / "ddp-keeping", WORKERS, KEEP_MEMORY),
        *(partial(contenders.elastic, directory / name, WORKERS, name, *NO_COPIES) for name in reductions),
    ]
    return Healthy(take_turns("healthy", starts, WORKERS, rounds, say))


Start = Callable[[], Contender]


def take_turns(
    what: str,
    starts: Sequence[Start],
    workers: int,
    rounds: int,
    say: Callable[[str], None],
    block_steps: int = BLOCK_STEPS,
    at_start: Callable[[Contender], None] = lambda job: None,
    at_end: Callable[[Contender], None] = lambda job: None,
) -> dict[str, list[float]]:
    """By contender, the mean step of each block in seconds.

    at_start: called with each job when it stands before its first step; at_end: after its last one.
    Raises AssertionError if the contenders do not train the same thing.
    """
    step_s: dict[str, list[float]] = {}
    with ExitStack() as stack:
        jobs = []
        for start in starts:
            # One after the other: all at once would be slow enough to miss deadlines of a start.
            jobs.append(stack.enter_context(start()))
            jobs[-1].stand(workers)
            at_start(jobs[-1])
            for _ in range(WARM_UP_BLOCKS):
                jobs[-1].run(block_steps, workers)
        check_same_training(jobs)
        for number in range(rounds):
            # Another contender goes first in each round, so that none always follows the same one.
            turn = number % len(jobs)
            for job in jobs[turn:] + jobs[:turn]:
                first = job.run(block_steps, workers)
                step_s.setdefault(job.name, []).append(contenders.step_s(job.stamps(), first, first + block_steps))
            say(
                f"{what} {number + 1}/{rounds}: "
                + ", ".join(f"{name} {of[-1] * 1e3:.0f} ms" for name, of in step_s.items())
            )
        check_same_training(jobs)
        for job in jobs:
            at_end(job)
    return step_s


def check_same_training(jobs: Sequence[Contender]) -> None:
    """All jobs are at the same step; the mean loss over their workers must be the same, up to the order of sums."""
    losses = {}
    for job in jobs:
        last = [of[-1] for of in job.stamps().values()]
        assert len({stamp.step for stamp in last}) == 1, f"{job.name}: workers at different steps {last}"
        losses[job.name] = (last[0].step, statistics.fmean(stamp.loss for stamp in last))
    (step, expected), *others = losses.values()
    for other_step, loss in others:
        same = other_step == step and abs(loss - expected) <= LOSS_TOLERANCE * abs(expected)
        assert same, f"the contenders do not train the same: (step, loss) {losses}"
