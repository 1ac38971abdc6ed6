"""What a node costs the others when it leaves, and when it comes back and copies the state.

Three nodes on this machine, one worker each. One gets a notice, leaves, and returns when the notice is withdrawn, again
and again; its return is a newcomer that copies all state from the members. Judged by the stamps of the workers that
stay, and by which shards all workers have computed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from elastic.store.embedded import EmbeddedEtcd
from runtime.loop.passes import REHEARSALS
from tests.bench import stamps
from tests.bench.contenders import SCRIPTS
from tests.bench.stamps import Stamp
from tests.bench.turnstile import OPEN, Gate
from tests.live.spread import Spread

STAYING = ("a", "b")
LEAVING = "c"
WORLD = len(STAYING) + 1
STEADY_STEPS = 6
"""Steps of a world before a change, and after it."""
BUDGET_S = 300.0
"""What the notice says: none of the copies below takes so long."""


@dataclass(frozen=True, slots=True)
class Change:
    """gap_s: the staying workers' longest time between two steps, from the change until the new world is steady.
    step_s: median of their steps before it. to_world_s: from the change to the first step of the new world."""

    gap_s: float
    step_s: float
    to_world_s: float

    @property
    def gap_steps(self) -> float:
        return self.gap_s / self.step_s


@dataclass(slots=True)
class Nodes:
    """redone: shards that were computed more than once."""

    leaves: list[Change] = field(default_factory=list)
    returns: list[Change] = field(default_factory=list)
    redone: int = 0


def measure(home: Path, megabytes: int, shard_s: float, rounds: int, say: Callable[[str], None]) -> Nodes:
    """shard_s: see scripts/train_ballast.py. Raises AssertionError if the job comes to a stand."""
    found = Nodes()
    directory = home / "stamps"
    directory.mkdir(parents=True)
    command = (sys.executable, str(SCRIPTS / "train_ballast.py"), str(home), str(megabytes), str(shard_s))
    with (
        EmbeddedEtcd() as etcd,
        closing(Gate(home / "gate")) as gate,
        Spread(home, etcd, "bench", command=command, workers=WORLD) as job,
    ):
        gate.allow(OPEN)
        job.rendezvous()
        for node in (*STAYING, LEAVING):
            job.agent(node)
        staying = [f"{node}.0.0" for node in STAYING]

        def steady(world: int, since_ns: int) -> bool:
            assert not (job.dir / "result.json").exists(), "the job has ended"
            return is_steady(_of(directory, staying), world, since_ns)

        def change(what: str, act: Callable[[], None], world: int) -> Change:
            begun_ns = time.monotonic_ns()
            act()
            job.until(f"{STEADY_STEPS} steps of a world of {world}", lambda: steady(world, begun_ns))
            seen = judge(_of(directory, staying), begun_ns, world)
            say(f"{what}: a gap of {seen.gap_steps:.2f} steps of {seen.step_s:.2f} s, over in {seen.to_world_s:.1f} s")
            return seen

        job.until(f"{STEADY_STEPS} steps of all", lambda: steady(WORLD, 0))
        for number in range(rounds):
            turn = f"{number + 1}/{rounds}"
            found.leaves.append(change(f"leave {turn}", lambda: job.give_notice(LEAVING, BUDGET_S), WORLD - 1))
            job.until("an empty node", lambda: len(job.events("node_empty", node=LEAVING)) > number)  # noqa: B023
            found.returns.append(change(f"return {turn}", job.notice(LEAVING).unlink, WORLD))
    found.redone = redone(stamps.read_shards(directory))
    return found


def _of(directory: Path, workers: Sequence[str]) -> list[list[Stamp]]:
    found = stamps.read(directory)
    return [found.get(worker, []) for worker in workers]


def is_steady(workers: Sequence[Sequence[Stamp]], world: int, since_ns: int) -> bool:
    """Whether the last steps of all these workers were in a world of that size, and came after that moment."""
    return all(
        len(of) >= STEADY_STEPS and all(stamp.world == world and stamp.t_ns > since_ns for stamp in of[-STEADY_STEPS:])
        for of in workers
    )


def judge(workers: Sequence[Sequence[Stamp]], begun_ns: int, world: int) -> Change:
    """From the stamps of the workers that stay, which were steady before, and are so again in a world of that size."""
    before = [[stamp.t_ns for stamp in of if stamp.t_ns <= begun_ns][-STEADY_STEPS:] for of in workers]
    steps_s = [(later - earlier) / 1e9 for of in before for earlier, later in pairwise(of)]
    gaps_s = [
        (later.t_ns - earlier.t_ns) / 1e9 for of in workers for earlier, later in pairwise(of) if later.t_ns > begun_ns
    ]
    there_ns = min(stamp.t_ns for of in workers for stamp in of if stamp.t_ns > begun_ns and stamp.world == world)
    return Change(max(gaps_s), statistics.median(steps_s or gaps_s), (there_ns - begun_ns) / 1e9)


def redone(shards: Mapping[str, Sequence[tuple[int, int]]]) -> int:
    """How often a shard was computed that somebody had computed before. Rehearsals do not count."""
    computed = Counter(one for of in shards.values() for one in of[REHEARSALS:])
    return sum(times - 1 for times in computed.values())
