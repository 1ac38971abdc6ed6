"""``python -m tests.sim --seed N [-v]`` replays one run; ``--seeds A B`` runs a range and counts what was reached."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections import Counter

from tests.sim.world import World


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this one")
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 200), metavar=("FIRST", "LAST"))
    parser.add_argument("-v", "--verbose", action="store_true", help="print everything that happens")
    arguments = parser.parse_args()
    seeds = range(*arguments.seeds) if arguments.seed is None else (arguments.seed,)
    reached: Counter[str] = Counter()
    failed = []
    for seed in seeds:
        world = World(seed, print if arguments.verbose else None)
        try:
            reached.update(world.run().reached)
        except Exception as error:
            failed.append(seed)
            print(f"seed {seed} ({world.scene.name}): {type(error).__name__}: {error}", file=sys.stderr)
            if arguments.verbose or not isinstance(error, AssertionError):
                traceback.print_exc()
    for what, times in sorted(reached.items()):
        print(f"{times:8} {what}")
    print(f"{len(seeds)} runs, {len(failed)} failed: {failed[:50]}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
