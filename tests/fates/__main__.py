"""Many trials, in as many processes as asked for: python -m tests.fates --help."""

from __future__ import annotations

import argparse
import secrets
import sys
from pathlib import Path

from tests.fates.draw import FRAMEWORKS, KINDS, draw
from tests.fates.many import many

EXAMPLES = """\
examples:
  python -m tests.fates --minutes 10              other trials each time, two at once
  python -m tests.fates --seed 42 --trials 1      one trial again
  python -m tests.fates --kinds trainer,lightning     scripts of these frameworks, in place
  python -m tests.fates --seed 42 --show          what it trains and what is done to it, without doing it

One seed is one trial: the same training, and the same things done to the same workers at the same steps and events.
Where a process is within its step then is up to the machine. Exits with 1 if a trial did not end as its quiet run.
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fates", description=__doc__, epilog=EXAMPLES)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--seed", type=int, default=secrets.randbelow(10**9), help="of the first trial (default: drawn)"
    )
    parser.add_argument("--trials", type=int, default=0, help="how many (default: as many as the minutes allow)")
    parser.add_argument("--minutes", type=float, default=10.0, help="after this no trial is begun (default 10)")
    parser.add_argument("--processes", type=int, default=2, help="trials at once (default 2)")
    parser.add_argument("--home", type=Path, help="where trials that fail leave their files (default: a temporary one)")
    parser.add_argument(
        "--kinds", default=",".join(KINDS), help="of scripts (default %(default)s; trainer and lightning if installed)"
    )
    parser.add_argument("--show", action="store_true", help="print the trial, and do nothing")
    options = parser.parse_args()
    kinds = tuple(options.kinds.split(","))
    if unknown := set(kinds) - {*KINDS, *FRAMEWORKS}:
        parser.error(f"no kind of script: {', '.join(sorted(unknown))}")
    if options.show:
        trial = draw(options.seed, kinds)
        print(trial.program, f"{trial.workers} workers", *trial.options, *trial.strikes, sep="\n  ")
        return 0
    summary = many(options.seed, options.trials, options.minutes, options.processes, options.home, kinds)
    return 1 if summary["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
