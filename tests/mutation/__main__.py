"""The command: see tests/mutation/__init__.py."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from tests.mutation import trial
from tests.mutation.mutate import Mutant, mutants
from tests.mutation.targets import ROOT, dotted, modules, target_of, tests_of

EQUIVALENT = Path(__file__).parent / "equivalent.txt"
JSON_FILE = ROOT / "build" / "mutation.json"
LEAST = 0.9
"""So many of those that could be noticed have to be."""

SLOWER = 10
MARGIN_S = 30.0
"""A mutant whose tests take SLOWER times what they usually take, and that, does not end."""

POLL_S = 0.02


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("--sample", type=int, default=500, help="how many mutants (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--only", default="", metavar="TEXT", help="of the mutants whose name has this text")
    parser.add_argument("--again", type=Path, metavar="FILE", help="those that survived, of such a file of outcomes")
    parser.add_argument("--processes", type=int, default=2, help="how many at a time (default %(default)s)")
    parser.add_argument("--json", type=Path, default=JSON_FILE, metavar="FILE", help="where all outcomes go")
    options = parser.parse_args()
    paths = {dotted(path): path for path in modules()}
    every = [one for module, path in paths.items() for one in mutants(module, path.read_text(encoding="utf-8"))]
    possible = [one for one in every if options.only in one.name]
    if options.again is not None:
        survived = {told["name"] for told in json.loads(options.again.read_bytes()) if not told["killed"]}
        possible = [one for one in possible if one.name in survived]
    chosen = random.Random(options.seed).sample(possible, min(options.sample, len(possible)))
    print(f"{len(every)} mutants of {len(paths)} modules; {len(chosen)} are tried", flush=True)
    known = _equivalent()
    counts: Counter[str] = Counter()
    outcomes: list[dict[str, object]] = []
    options.json.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="elastic-mutation-") as directory:
        for one, killed in _try_all(chosen, paths, options.processes, Path(directory)):
            outcome = "killed" if killed else "equivalent" if one.name in known else "survived"
            counts[outcome] += 1
            outcomes.append(asdict(one) | {"killed": killed})
            options.json.write_text(json.dumps(outcomes, indent=1) + "\n", encoding="utf-8")
            if not killed:
                where = f"{paths[one.module].relative_to(ROOT)}:{one.line}"
                print(f"{len(outcomes)}/{len(chosen)} {outcome}: {where} {one.name}", flush=True)
    for stale in sorted(known - {one.name for one in every}):
        print(f"equivalent.txt: there is no such mutant any more: {stale}")
    share = counts["killed"] / max(1, counts["killed"] + counts["survived"])
    print(
        f"mutation: {len(chosen)} mutants, seed {options.seed}: {counts['killed']} killed, {counts['equivalent']} "
        f"equivalent, {counts['survived']} survived; {100 * share:.1f} % of those that could be noticed"
    )
    return 0 if share >= LEAST else 1


def _try_all(
    chosen: list[Mutant], paths: dict[str, Path], processes: int, directory: Path
) -> Iterator[tuple[Mutant, bool]]:
    """Whether its tests failed, of each as it is known. Raises RuntimeError if tests fail without any mutant."""
    examples = {target_of(paths[one.module]): paths[one.module] for one in chosen}
    usual_s = {target: _usual_s(tests_of(path), directory) for target, path in examples.items()}
    waiting = list(reversed(chosen))
    running: dict[int, tuple[Mutant, float]] = {}
    while waiting or running:
        while waiting and len(running) < processes:
            one = waiting.pop()
            path = paths[one.module]
            pid = trial.begin(one.module, one.number, tests_of(path), directory / f"{one.module}-{one.number}")
            running[pid] = one, time.monotonic() + SLOWER * usual_s[target_of(path)] + MARGIN_S
        for pid, (one, until_s) in list(running.items()):
            if (code := trial.ended(pid, until_s)) is not None:
                del running[pid]
                yield one, code != trial.PASSED
        time.sleep(POLL_S)


def _usual_s(tests: list[str], directory: Path) -> float:
    begun_s = time.monotonic()
    pid = trial.begin("", -1, tests, directory / "usual")
    while (code := trial.ended(pid, begun_s + 600)) is None:
        time.sleep(POLL_S)
    if code != trial.PASSED:
        raise RuntimeError(f"without any mutant {' '.join(tests)} fail:\n{(directory / 'usual').read_text()[-2000:]}")
    print(f"{time.monotonic() - begun_s:.0f} s: {' '.join(str(Path(t).relative_to(ROOT)) for t in tests)}", flush=True)
    return time.monotonic() - begun_s


def _equivalent() -> set[str]:
    """Names of mutants, a line each; a line that begins with # says why the ones below it are."""
    lines = EQUIVALENT.read_text(encoding="utf-8").splitlines()
    return {line for line in lines if line and not line.startswith("#")}


if __name__ == "__main__":
    sys.exit(main())
