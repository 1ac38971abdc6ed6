"""The simulator: whole jobs under virtual time, each from a seed.

python -m tests.sim --schedules 20000 --json reach.json   search; exit 1 if anything was not reached
python -m tests.sim --seed 17 -v                          one run, and everything that happens in it
python -m tests.sim --seed 17 --shrink                    what of it has to go wrong for it to fail
python -m tests.sim --seed 17 --keep 0,3,store_trouble    the run with only these faults and troubles
python -m tests.sim --seed 17 --quorum                    the run with rounds of replicas instead of passes
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.sim import arms


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sim", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", type=int, default=20_000, help="how many, of at least 200 events each")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the seed to begin with")
    parser.add_argument("--runs", type=int, metavar="N", help="at most so many seeds")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole report there")
    parser.add_argument("--seed", type=int, help="replay this one")
    parser.add_argument("--keep", default="", metavar="A,B", help="with --seed: nothing else goes wrong; or 'nothing'")
    parser.add_argument("--shrink", action="store_true", help="with --seed: leave out what is not needed to fail")
    parser.add_argument("--quorum", action="store_true", help="with --seed: passes are rounds with a quorum")
    parser.add_argument("-v", "--verbose", action="store_true", help="with --seed: print everything that happens")
    options = parser.parse_args()
    if options.seed is None:
        arms.install()
        from tests.sim.search import search  # once marks are made in the machines

        return search(options.schedules, options.processes, options.first, options.json, options.runs)
    from tests.sim.directed import draw
    from tests.sim.replicas import with_quorum
    from tests.sim.shrink import fewest_faults, kept
    from tests.sim.world import World

    if options.shrink:
        print("\n".join(fewest_faults(options.seed, quorum=options.quorum)))
        return 0
    scene = with_quorum(draw(options.seed), options.seed) if options.quorum else draw(options.seed)
    if options.keep:
        scene = kept(scene, () if options.keep == "nothing" else options.keep.split(","))
    print(scene)
    world = World(options.seed, print if options.verbose else None, scene)
    verdict = world.run()
    for path, times in sorted(verdict.reached.items()):
        print(f"{times:8} {path}")
    print(
        f"seed {options.seed} ({scene.name}): {verdict.ended} after {verdict.duration_s:.1f} s, {world.events} events"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
