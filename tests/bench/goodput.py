"""Measures how much of a job's work is left when its workers are killed, frozen and drained all the time.

    python -m tests.bench.goodput [--minutes 5] [--rounds 3] [--only mixed29] [--small] [--no-targets] [--seed 1]
                                  [--json FILE]

In each round five jobs train one after the other for so many minutes: this project's undisturbed, under a kill every
15 s, and under a fault of other kinds every 29 s, and torchrun's undisturbed and under the same kills. Three rounds of
five minutes take about 80 minutes. Exit code 1 if a target is missed. --only takes one recipe and its undisturbed legs;
--small only tries whether all of it works: its figures say nothing, and no target is judged. With both of them
docs/performance.md stays as it is.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from chaos_tests.cluster import why_not
from tests.bench import legs, report, work
from tests.bench.legs import DRAIN, FREEZE, KILL, PARTITION, Leg, Recipe
from tests.bench.recovery import say
from tests.bench.report import Bench, Row, target

BENCH = Bench("goodput")

QUIET, KILLS, MIXED, THEIRS, THEIR_KILLS = "quiet", "kill15", "mixed29", "torchrun quiet", "torchrun15"
ORDER = (QUIET, KILLS, MIXED, THEIRS, THEIR_KILLS)
STALLS = {KILLS: "stall15", MIXED: "stall29"}
STALL_MOST = {KILLS: 0.01, MIXED: 0.06}
SAMPLES_LEAST = {KILLS: 0.85, MIXED: 0.88}
QUIET_OF = {KILLS: QUIET, MIXED: QUIET, THEIR_KILLS: THEIRS}
TITLES = {KILLS: "a SIGKILL every {kill_s:g} s", MIXED: "{kinds} every {mixed_s:g} s"}


@dataclass(frozen=True, slots=True)
class Sizes:
    """seconds: of a leg. kill_s, mixed_s: time between two faults of either recipe."""

    seconds: float = 300.0
    rounds: int = 3
    kill_s: float = 15.0
    mixed_s: float = 29.0


SMALL = Sizes(seconds=6.0, rounds=1, kill_s=5.0, mixed_s=2.1)


@dataclass(frozen=True, slots=True)
class Measured:
    """legs: by name, one of each round. together: why nodes are no hosts of their own, and none is cut off; or ""."""

    sizes: Sizes
    legs: dict[str, list[Leg]]
    together: str = ""

    def ratios(self, name: str, quiet: str) -> list[float]:
        """Steps in the same time, against the quiet leg of the round. A step has as many samples in every world."""
        return [
            one.steps / one.seconds / (other.steps / other.seconds)
            for one, other in zip(self.legs[name], self.legs[quiet], strict=True)
        ]

    def shares(self, name: str, seconds: Callable[[Leg], float]) -> list[float]:
        return [seconds(leg) / leg.seconds for leg in self.legs[name]]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    writes = not options.small and not options.only
    sizes = SMALL if options.small else Sizes(seconds=options.minutes * 60, rounds=options.rounds)
    with BENCH.directory(writes=writes) as directory:
        found = measure(directory, sizes, options.seed, options.only)
    rows = rows_of(found)
    BENCH.publish({"measured": asdict(found)}, rows, notes(found), words_of(options), to=options.json, writes=writes)
    print(summary(found), flush=True)
    return 1 if report.missed(rows) and not options.no_targets else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = BENCH.parser()
    parser.add_argument("--minutes", type=float, default=5.0, help="of each of the five legs of a round")
    parser.add_argument("--rounds", type=int, default=3, help="how often all legs are run")
    parser.add_argument("--only", choices=sorted(QUIET_OF), help="one recipe; docs/performance.md stays as it is")
    parser.add_argument("--no-targets", action="store_true", help="a missed target is no failure")
    parser.add_argument("--seed", type=int, default=1, help="of the victims and of the order of kinds")
    options = parser.parse_args(arguments)
    if options.minutes < 1 or options.rounds < 1:
        parser.error("at least --minutes 1 and --rounds 1: a schedule needs time for its faults; or try --small")
    options.no_targets |= options.small
    return options


def words_of(options: argparse.Namespace) -> str:
    only = f" --only {options.only}" if options.only else ""
    return f"--minutes {options.minutes:g} --rounds {options.rounds} --seed {options.seed}{only}"


def measure(directory: Path, sizes: Sizes, seed: int, only: str | None = None) -> Measured:
    """only: one recipe, and what it is compared with. Raises AssertionError if a job ends, TimeoutError if it comes to
    a stand."""
    together = why_not()
    ours = functools.partial(legs.elastic, apart=not together)
    kills, mixed = Recipe(sizes.kill_s), Recipe(sizes.mixed_s, kinds_of(together))
    runs: dict[str, tuple[Callable[[Path, Recipe, float, int], Leg], Recipe]] = {
        QUIET: (ours, Recipe()),
        KILLS: (ours, kills),
        MIXED: (ours, mixed),
        THEIRS: (legs.torchrun, Recipe()),
        THEIR_KILLS: (legs.torchrun, kills),
    }
    order = tuple(name for name in ORDER if only is None or name in (only, QUIET_OF[only]))
    found: dict[str, list[Leg]] = {name: [] for name in order}
    for number in range(sizes.rounds):
        # There and back: what changes evenly with time falls out of the ratios of two rounds.
        for place, name in enumerate(order if number % 2 == 0 else order[::-1]):
            run, recipe = runs[name]
            leg = run(directory / f"{number}-{place}", recipe, sizes.seconds, seed + number)
            found[name].append(leg)
            faults = ", ".join(f"{count} {kind}" for kind, count in leg.faults.items()) or "no faults"
            say(f"round {number + 1}/{sizes.rounds} {name}: {leg.steps} steps in {leg.seconds:.0f} s, {faults}")
            assert not recipe.every_s or any(leg.faults.values()), f"{name}: no fault could be done"
    return Measured(sizes, found, together)


def kinds_of(together: str) -> tuple[str, ...]:
    return (KILL, FREEZE, DRAIN) if together else (KILL, FREEZE, PARTITION, DRAIN)


# ------------------------------------------------------------------------------------------------ the report


def rows_of(found: Measured) -> list[Row]:
    rows = [rate_row(found, name) for name in found.legs]
    for name in (name for name in (KILLS, MIXED) if name in found.legs):
        title = title_of(found, name)
        ratios, stalls = found.ratios(name, QUIET), found.shares(name, lambda leg: leg.stall_s)
        least, most = SAMPLES_LEAST[name], STALL_MOST[name]
        met = target(statistics.median(ratios) >= least, f">= {least:.0%}")
        rows.append(share_row(f"{title}: samples / undisturbed", ratios, met))
        met = target(statistics.median(stalls) <= most, f"<= {most:.0%}")
        rows.append(share_row(f"{title}: nobody computes (stall)", stalls, met))
        rows.append(share_row(f"{title}: interrupted steps are completed (redo)", redo_shares(found, name)))
        rows.append(share_row(f"{title}: processors' time that replacements start in", start_shares(found, name)))
        rows.append(share_row(f"{title}: loss that none of these three explains", rest(found, name)))
    if THEIR_KILLS in found.legs:
        ratios = found.ratios(THEIR_KILLS, THEIRS)
        rows.append(share_row(f"torchrun, {title_of(found, KILLS)}: samples / undisturbed", ratios))
    return rows


def title_of(found: Measured, name: str) -> str:
    *kinds, last = kinds_of(found.together)
    told = f"{', '.join(kinds)} or {last}"
    return TITLES[name].format(kill_s=found.sizes.kill_s, mixed_s=found.sizes.mixed_s, kinds=told)


def redo_shares(found: Measured, name: str) -> list[float]:
    return found.shares(name, lambda leg: leg.redo_s)


def start_shares(found: Measured, name: str) -> list[float]:
    """Of the time of all processors."""
    cores = len(os.sched_getaffinity(0))
    return found.shares(name, lambda leg: leg.start_cpu_s / cores)


def rest(found: Measured, name: str) -> list[float]:
    stalls = found.shares(name, lambda leg: leg.stall_s)
    parts = zip(found.ratios(name, QUIET), stalls, redo_shares(found, name), start_shares(found, name), strict=True)
    return [1 - ratio - stall - redo - start for ratio, stall, redo, start in parts]


def rate_row(found: Measured, name: str) -> Row:
    rates = [leg.steps * work.SHARDS * work.MICRO_BATCH / leg.seconds for leg in found.legs[name]]
    faults = sum(sum(leg.faults.values()) for leg in found.legs[name])
    spread = f"{min(rates):.0f} to {max(rates):.0f}/s, {len(rates)} times, {faults} faults"
    return Row(f"{name}: samples", f"{statistics.median(rates):.0f}/s", spread)


def share_row(what: str, values: Sequence[float], wanted: str = "") -> Row:
    return Row(what, f"{statistics.median(values):.2%}", f"{min(values):.2%} to {max(values):.2%}", wanted)


def summary(found: Measured) -> str:
    """The last line, for scripts: medians over the rounds."""
    there = [name for name in QUIET_OF if name in found.legs]
    ratios = {name: found.ratios(name, QUIET_OF[name]) for name in there}
    stalls = {STALLS[name]: found.shares(name, lambda leg: leg.stall_s) for name in STALLS if name in there}
    order = (KILLS, MIXED, *STALLS.values(), THEIR_KILLS)
    values = {name: of for name in order if (of := (ratios | stalls).get(name))}
    return "goodput: " + " ".join(f"{name}={statistics.median(of):.3f}" for name, of in values.items())


def notes(found: Measured) -> list[str]:
    """What a reader has to know to judge the table."""
    sizes = found.sizes
    cut = (
        f"Partitions are left out: {found.together}."
        if found.together
        else f"A partition cuts a node off from all other nodes, replicas and etcd for {legs.PARTED_S:g} s. Therefore "
        "each node is a separate host, in a network namespace, in all legs of elastic-ring; torchrun's workers share "
        "one host."
    )
    return [
        "Every job trains the same MLP of 10.0 million float32 parameters on three workers of this machine, "
        f"{work.SHARDS} micro-batches of {work.MICRO_BATCH} samples a step. The job of elastic-ring has three nodes "
        "with one worker each; that of torchrun has one agent with three workers and writes a checkpoint every 10 "
        "steps.",
        f"Legs of {sizes.seconds / 60:g} minutes follow each other, in the opposite order in every second round, and "
        "each is compared with the undisturbed leg of its own launcher in its round. The table has the median, lowest "
        "and highest value of the rounds.",
        f"A frozen worker is stopped for {legs.FROZEN_S:g} s, which is longer than it takes to be expelled. A drained "
        f"node gets a notice, leaves between two steps, and returns {legs.DRAINED_S:g} s after the notice. {cut}",
        "Stall is the time in the journals from each loss until all survivors are connected again. It is an upper "
        "bound, because a worker goes on computing its own shard meanwhile. The job waits 2.5 s for a worker that is "
        "stopped or cut off before it expels the worker: this is most of the stall under mixed faults. Redo lasts "
        "until the interrupted step is complete, including the part of the step that was not computed yet.",
        "The time of replacements is the CPU time of each replacement until its first step, divided by the time of "
        "all processors. On two cores this time is taken from the survivors; a newcomer on its own machine takes "
        "nothing from them.",
        "Two workers use two processors as fully as three workers, and disturb each other less, so the loss of a "
        "worker costs little here. Therefore a leg with faults can be faster than the undisturbed one, and the "
        "unexplained part can be negative. If each worker has its own machine, the share of a lost worker is missing "
        "until a replacement has joined.",
        "A job that goes back to a checkpoint loses the steps since then: the steps at the end of the leg count.",
    ]


if __name__ == "__main__":
    sys.exit(main())
