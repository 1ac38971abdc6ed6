"""Measures what is left of a training with FSDP2 while processes die, with elastic.keep and under torchrun.

    python -m tests.bench.kept [--minutes 2] [--every 20] [--runs 3] [--small] [--json FILE]

Both have three processes and the same script. In each run both train undisturbed, and then with a death each 20 s. With
`elastic run --restart` each step is kept in memory; under torchrun the script writes a checkpoint each 10 steps.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from tests.bench import contenders, legs
from tests.bench.contenders import Contender
from tests.bench.launchers import OURS, TORCHRUN
from tests.bench.legs import Recipe
from tests.bench.recovery import say
from tests.bench.report import Bench, Row
from tests.bench.stamps import Stamp
from tests.bench.storms import QUIET, Leg, judge, shares, span

BENCH = Bench("kept")
SCRIPT = "train_fsdp.py"
WORKERS = 3
DEATHS = "deaths"


def kept(directory: Path) -> Contender:
    script = str(contenders.SCRIPTS / SCRIPT)
    words = ["--workers", str(WORKERS), "--restart", "--job-dir", str(directory / "job"), "--quiet"]
    return Contender(OURS, directory, [[sys.executable, "-m", "elastic.cli", "run", *words, script]])


def torchrun(directory: Path) -> Contender:
    return contenders.torchrun(directory, WORKERS, SCRIPT)


@dataclass(frozen=True, slots=True)
class KeptLeg(Leg):
    """rounds_s: of each death, the seconds from SIGKILL until each of WORKERS new processes has done a step."""

    rounds_s: tuple[float, ...] = ()


def leg(job: Contender, seconds: float, every_s: float, seed: int) -> KeptLeg:
    """With a death so often; 0: without. Raises RuntimeError if the job ends, TimeoutError if it comes to a stand."""
    stamps = job.directory / "stamps"
    deaths: list[int] = []
    driver = legs.Driver(job.gate, stamps, random.Random(seed), job.check)

    def kill(worker: str, pid: int) -> None:
        at_ns = time.monotonic_ns()
        legs.kill(worker, pid)
        deaths.append(at_ns)

    def all_step() -> bool:
        return len(driver.stepping()) == WORKERS

    driver.until("all processes train", all_step)
    driver.begin()
    begun_ns = time.monotonic_ns()
    for at_s, _ in legs.plan(Recipe(every_s), seconds, seed):
        driver.pass_time(begun_ns / 1e9 + at_s)
        driver.hit(kill, lambda victim: None)
    driver.pass_time(begun_ns / 1e9 + seconds)
    told, ended_ns = job.stamps(), time.monotonic_ns()
    found = replace(judge(told, begun_ns, ended_ns, own_parts=False), taken=len(deaths))
    return KeptLeg(**asdict(found), rounds_s=rounds(told, deaths))


def rounds(told: Mapping[str, Sequence[Stamp]], deaths: Sequence[int]) -> tuple[float, ...]:
    """As of KeptLeg, of those deaths behind which so many new processes have come. deaths: in nanoseconds, by time."""
    first = sorted(of[0].t_ns for of in told.values() if of)
    behind = [[t_ns for t_ns in first if t_ns > death] for death in deaths]
    return tuple(
        (new[WORKERS - 1] - death) / 1e9 for death, new in zip(deaths, behind, strict=True) if new[WORKERS - 1 :]
    )


def measure(home: Path, seconds: float, every_s: float, seed: int) -> dict[str, dict[str, KeptLeg]]:
    """One run: launcher -> QUIET or DEATHS -> what was left."""
    found: dict[str, dict[str, KeptLeg]] = {}
    launchers: dict[str, Callable[[Path], Contender]] = {OURS: kept, TORCHRUN: torchrun}
    for name, started in launchers.items():
        found[name] = {}
        with started(home / name) as job:
            job.open()
            for what, often_s in ((QUIET, 0.0), (DEATHS, every_s)):
                found[name][what] = one = leg(job, seconds, often_s, seed)
                say(f"{name}, {what}: {one}")
    return found


def rows_of(runs: Sequence[Mapping[str, Mapping[str, KeptLeg]]], every_s: float) -> list[Row]:
    rows = []
    for name in (OURS, TORCHRUN):
        for what, said in ((QUIET, "undisturbed"), (DEATHS, f"a death each {every_s:g} s")):
            of = [run[name][what] for run in runs]
            words = [
                f"{span((one.steps / one.seconds for one in of), '.2f')} ({len(of)} times)",
                f"{span(one.taken for one in of)} deaths",
                f"{span(one.again for one in of)} steps again",
                f"longest stop {span((one.stop_s for one in of), '.1f')} s",
            ]
            rate = median(one.steps / one.seconds for one in of)
            rows.append(Row(f"{name}, {said}: steps/s", f"{rate:.2f}", ", ".join(words)))
        took = [second for run in runs for second in run[name][DEATHS].rounds_s] or [math.nan]
        spread = f"{span(took, '.1f')} s, {len(took)} deaths"
        rows.append(Row(f"{name}: from SIGKILL to a step of {WORKERS} new processes", f"{median(took):.1f} s", spread))
        share = shares([run[name] for run in runs], DEATHS)
        rows.append(Row(f"{name}: goodput", f"{median(share):.2f}", span(share, ".2f")))
    return rows


def summary(runs: Sequence[Mapping[str, Mapping[str, KeptLeg]]]) -> str:
    """The last line, for scripts."""
    words = [f"{name}={median(shares([run[name] for run in runs], DEATHS)):.2f}" for name in (OURS, TORCHRUN)]
    return "kept: " + " ".join(words)


def notes() -> list[str]:
    return [
        "The model is an MLP of 10.0 million float32 parameters with FSDP2 on gloo, three processes on one machine. A "
        "death is a SIGKILL of one process of the script. Steps count once: those that are done again do not count.",
        "elastic-ring keeps each step in memory. Under torchrun the script writes a checkpoint each 10 steps by "
        "torch.distributed.checkpoint.async_save, and begins with the newest whole one.",
        "Whatever torchrun waits for is set short. Its processes import torch anew in each attempt, those of "
        "elastic-ring are forked from one that has.",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    runs = []
    for seed in range(options.runs):
        with BENCH.directory(writes=not options.small) as directory:
            runs.append(measure(directory, options.minutes * 60, options.every, seed))
    measured = [{name: {what: asdict(one) for what, one in of.items()} for name, of in run.items()} for run in runs]
    rows, words = rows_of(runs, options.every), f"--minutes {options.minutes:g} --every {options.every:g}"
    words = f"{words} --runs {options.runs}"
    BENCH.publish({"measured": measured}, rows, notes(), words, to=options.json, writes=not options.small)
    print(summary(runs), flush=True)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = BENCH.parser("one run of 30 s")
    parser.add_argument("--minutes", type=float, default=2.0, help="of each leg (default %(default)s)")
    parser.add_argument("--every", type=float, default=20.0, metavar="S", help="seconds between deaths (default 20)")
    parser.add_argument("--runs", type=int, default=3, help="(default %(default)s)")
    options = parser.parse_args(arguments)
    if options.small:
        options.minutes, options.runs = 0.5, 1
    return options


if __name__ == "__main__":
    sys.exit(main())
